"""The layers of a converted model."""

from __future__ import annotations

import cmath
import json
import math
import pkgutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from gpipe import _C
from gpipe.exported.blocks import OPERATOR, parsed, run_whole
from gpipe.exported.graph import Number, Operation, Value, name_of
from gpipe.exported.layers import Route
from gpipe.exported.sizes import Size, Sizes, described, text_of
from gpipe.skip import Skippable
from gpipe.wrapper import ConvertedLayer


_RUN_WHOLE = f"{run_whole.__module__}:{run_whole.__qualname__}"


class Description:
    """Describes what a layer computes, for ``gpipe::Graph``. ``routes`` are those of the layer in each mode, training first. If
    they differ, the calls of both are there, and the model's mode decides.

    Args:
        inputs: of the first layer: the model's, flattened, in each mode.
        sizes: of the first layer: those of its inputs.
        outputs: of the last layer: the model's, flattened, in each mode.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        inputs: Sequence[list[Value | None]] | None,
        sizes: Sizes | None,
        outputs: Sequence[list[Any]] | None,
    ) -> None:
        self._numbers: dict[Value, int] = {}
        self._values = 0
        self.called: set[str] = set()  # paths of modules that are kept whole
        self._blocks: dict[str, int] = {}
        self._modes = len(routes)
        entering = [route.arriving for route in routes] if inputs is None else inputs
        leaving = [route.leaving for route in routes] if outputs is None else outputs
        of_inputs = [self._slot(values) for values in zip_longest(*entering)]
        guards = [] if sizes is None else [(described(each, sizes.places.get), text_of(each)) for each in sizes.guards]
        self._fields = {
            "inputs": of_inputs,
            "shapes": [value and _constants(value.shape) for value in (inputs[0] if inputs else ())],
            "guards": [(self._number_of(guard), text) for guard, text in guards],
            "tensors": self._named([{value.tensor: value for value in route.owned} for route in routes], self._slot),
            "pops": self._named([dict(route.pops) for route in routes], self._slot),
            "peeks": self._named([dict(route.peeks) for route in routes], self._slot),
            "calls": [call for number, route in enumerate(routes) for call in self._calls(route, number)],
            "stashes": self._named([dict(route.stashes) for route in routes], self._choice),
            "outputs": [self._choice(values) for values in zip_longest(*leaving)],
        }

    def __str__(self) -> str:
        fields = {name: field for name, field in self._fields.items() if field}
        return json.dumps({"values": self._values, **fields})

    @staticmethod
    def _named(modes: Sequence[Mapping[str, Value]], function: Callable[[Sequence[Any]], Any]) -> list[Any]:
        """Returns a tuple of each name that a mode has, and what a function returns for its values in each mode."""
        return [(name, function([each.get(name) for each in modes])) for name in dict.fromkeys(chain(*modes))]

    def _slot(self, values: Sequence[Value | None]) -> int | None:
        """Returns the number of a value that enters, which stands for another one in each mode."""
        given = [value for value in values if value is not None]
        for value in given:
            self._numbers[value] = self._values
        self._values += bool(given)
        return self._values - 1 if given else None

    def _choice(self, values: Sequence[Any]) -> Any:
        """Returns an argument that is another one in each mode."""
        arguments = [self._argument(value) for value in values]
        if len(arguments) == 1 or arguments[0] == arguments[1]:
            return arguments[0]
        return {"training": arguments[0], "evaluation": arguments[1]}

    def _calls(self, route: Route, number: int) -> Iterator[dict[str, Any]]:
        for operation in route.operations:
            yield self._call(operation) | ({} if self._modes == 1 else {"mode": number == 0})

    def _call(self, operation: Operation) -> dict[str, Any]:
        call: dict[str, Any] = {}
        args, function = operation.args, operation.function
        if operation.schema is None:
            call["python"] = f"{function.__module__}:{function.__qualname__}".replace("_operator:", "operator:")
        elif operation.schema.name == OPERATOR:
            call["python"] = _RUN_WHOLE
            path = parsed(args[2]).path
            self.called.add(path)
            args = (path, args[2], args[0], args[1])
        else:
            call["operator"] = ".".join(filter(None, (operation.schema.name, operation.schema.overload_name)))
        call["args"] = [self._argument(arg) for arg in args]
        if operation.kwargs and operation.schema is None:
            raise ValueError(f"cannot convert the model: it calls {call['python']} with arguments by name")
        if operation.kwargs:
            call["kwargs"] = {name: self._argument(arg) for name, arg in operation.kwargs.items()}
        call["result"] = self._number(operation.result)
        if operation.contexts:
            blocks = ((self._blocks.setdefault(key, len(self._blocks)), settings) for key, settings in operation.contexts)
            call["within"] = [{"block": block, **settings} for block, settings in blocks]
        if operation.line:
            call["at"] = operation.line
        return call

    def _number(self, value: Value) -> int:
        if value not in self._numbers:
            self._slot([value])
        return self._numbers[value]

    def _number_of(self, described: Any) -> Any:
        if isinstance(described, Size):
            size = {"size": [self._number(described.value), described.dimension]}
            return size if described.divisor == 1 else ["//", size, described.divisor]
        return list(map(self._number_of, described)) if isinstance(described, list) else described

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return {"value": self._number(arg)}
        if isinstance(arg, Number):
            return {"size": self._number_of(arg.expression)}
        if isinstance(arg, (tuple, list)):
            return [self._argument(item) for item in arg]
        if isinstance(arg, torch.device):
            return {"device": None}
        for name, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory format", torch.memory_format)):
            if isinstance(arg, kind):
                return {name: name_of(arg)}
        if isinstance(arg, complex) and cmath.isfinite(arg):
            return {"complex": [arg.real, arg.imag]}
        if isinstance(arg, float) and not math.isfinite(arg):
            return {"float": str(arg)}
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise ValueError(f"cannot convert the model: it uses an operator with an argument of {type(arg)}")


def _constants(shape: Sequence[Any]) -> list[int | None]:
    return [None, *(size if isinstance(size, int) else None for size in shape[1:])]


_resolved = cache(pkgutil.resolve_name)


class ExportedLayer(ConvertedLayer, Skippable):
    """A layer of a converted model: what the module at the path ``name`` computes, with the operators around it.

    Args:
        model: the model.
        called: the paths of the modules that it calls.
        description: what the layer computes, for ``gpipe::Graph``.
    """

    def __init__(self, name: str, model: nn.Module, called: Iterable[str], description: str) -> None:
        super().__init__(model, called)
        self.name = name
        self.describe(description)
        self.child("")  # whose mode a recompute needs

    def describe(self, description: str) -> None:
        self.description = description
        layer: Any = weakref.proxy(self)  # which the graph belongs to
        self._graph = graph = _C.Graph(description, lambda *call: layer._call_python(*call))
        self.stashable_names, self.poppable_names = frozenset(graph.stashes), frozenset(graph.pops)
        self.peekable_names = frozenset(graph.peeks)

    @property
    def python_functions(self) -> list[str]:
        """The Python functions that the layer calls, and the paths of the modules that are kept whole."""
        functions = dict.fromkeys(self._graph.python_functions)
        return [f"the module '{self.name}', which is kept whole" if each == _RUN_WHOLE else each for each in functions]

    def name_in_messages(self, key: str) -> str:
        return self.name

    def forward(self, input: Any) -> Any:
        graph = self._graph
        owned = [name.rpartition(".") for name in graph.tensors]
        depth = _functorch.maybe_current_level() or 0
        try:
            outputs = graph.run(
                list(input) if isinstance(input, tuple) else [input],
                [getattr(self.child(path), name) for path, _, name in owned],
                self.model.training,
                *(list(map(self.native_key, names)) for names in (graph.pops, graph.peeks, graph.stashes)),
            )
        except Exception:
            while (_functorch.maybe_current_level() or 0) > depth:  # vmap() was not left
                _functorch._vmap_decrement_nesting()
            raise
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def own_tensors(self) -> list[Tensor | None]:
        """The parameters, buffers and constants of the layer that its graph uses, without stand-ins."""
        places = [(self.child(path), name) for path, _, name in (each.rpartition(".") for each in self._graph.tensors)]
        return [module._parameters.get(name, module._buffers.get(name)) for module, name in places]

    def _call_python(self, name: str, *args: Any) -> Any:
        if name == _RUN_WHOLE:
            return run_whole(self.child(args[0]), *args[1:])
        return _resolved(name)(*args)

    def __repr__(self) -> str:
        return f"ExportedLayer({self.name})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_graph"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.describe(self.description)
