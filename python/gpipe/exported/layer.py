"""The layers of a converted model, and the Python functions that they run."""

import itertools
import keyword
import linecache
import math
import os
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from gpipe import _C
from gpipe.exported.exporter import OPERATOR, run_whole
from gpipe.exported.graph import Choice, Number, Operation, Value, inputs_of
from gpipe.exported.layers import Route
from gpipe.names import ConvertedLayer

_INDENT = "    "


class ModeError(RuntimeError):
    """Two modules are in different modes."""


def batch_norm(input: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *more: Any) -> Tensor:
    """Computes ``aten.batch_norm``. Raises ValueError in training mode for one value per channel, without a variance."""
    if training and input.numel() == input.shape[1]:
        raise ValueError(
            f"batch norm needs more than one value per channel in training mode, but a micro-batch has the shape "
            f"{tuple(input.shape)}; give it more samples by fewer chunks"
        )
    output: Tensor = torch.ops.aten.batch_norm.default(input, weight, bias, mean, variance, training, *more)
    return output


def check_modes(path: str, training: bool, other: str, other_training: bool) -> None:
    """Raises ModeError unless two modules are in the same mode."""
    if training != other_training:
        names = " and ".join(f"'{each}'" if each else "the model" for each in (path, other))
        raise ModeError(
            f"{names} are in different modes, but one uses what the other computes in one mode only; call train() or "
            "eval() on both"
        )


class Code(NamedTuple):
    """A function as text. Its arguments: the layer's places, functions that pop, peek and stash, the activation."""

    text: str
    functions: dict[str, str]  # where to find each function that the text uses, by its name there
    places: list[str]  # paths of the modules that have tensors, or whose mode counts: ``_place0``, ``_place1``, ...


def load(code: Code, name: str) -> Callable[..., Any]:
    """Returns the function. ``name`` is the layer's, for tracebacks."""
    file = f"<layer '{name}'>"
    linecache.cache[file] = len(code.text), None, code.text.splitlines(keepends=True), file
    scope: dict[str, Any] = {name: pkgutil.resolve_name(where) for name, where in code.functions.items()}
    scope.update(torch=torch, math=math, inf=math.inf, nan=math.nan, __name__=f"gpipe.exported <{name}>")
    exec(compile(code.text, file, "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    return function


class Writer:
    """Writes the function of a layer. The first layer has the model's flattened ``inputs`` and gets a list. The last
    layer has the model's flattened ``outputs`` and returns a list."""

    def __init__(self, route: Route, inputs: list[Value | None] | None, outputs: list[Any] | None) -> None:
        self._owned = route.owned
        self._functions: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._needs_device = False
        self._last_use = self._last_uses(route, outputs)  # of each value that the function computes or gets
        body = self._operations(route.operations)
        entering: list[Value | None] = [*(route.arriving if inputs is None else inputs)]
        arriving = [None if value is None else value.name for value in entering]
        targets = ", ".join(name or "_" for name in arriving)
        lines = [f"{targets}{'' if inputs is None else ','} = _input", "del _input"] if arriving else []
        lines += [f"{value.name} = _pop({name!r})" for name, value in route.pops]
        lines += [f"{value.name} = _peek({name!r})" for name, value in route.peeks]
        if route.samples:
            lines.append(f"_samples = {route.samples}")
        if self._needs_device:
            read = [value for _, value in route.pops + route.peeks]
            names = [*filter(None, arriving), *(value.name for value in read if value.mode is None)]
            may_be_none = "".join(f"{value.name}, " for value in read)
            last = f"next(each for each in ({may_be_none}) if each is not None)" if read else "torch.tensor(0)"
            tensor = next(itertools.chain(names, map(self._argument, self._owned), [last]))
            lines += [f"_device = {tensor}.device"]
        lines += body
        lines += [f"_stash({name!r}, {self._argument(value)})" for name, value in route.stashes]
        leaving = [self._argument(value) for value in (route.leaving if outputs is None else outputs)]
        lines += [f"return [{', '.join(leaving)}]" if outputs is not None else f"return {', '.join(leaving) or '()'}"]
        places = [f"{name} = _places[{index}]" for index, name in enumerate(self._places.values())]
        body = [_INDENT + line for line in [*places, *lines]]
        text = "\n".join(["def forward(_places, _pop, _peek, _stash, _input):", *body, ""])
        self.code = Code(text, self._functions, list(self._places))

    def _last_uses(self, route: Route, outputs: list[Any] | None) -> dict[Value, int]:
        """Returns the index of the last operation that uses each value."""
        last = {value: index for index, operation in enumerate(route.operations) for value in operation.inputs()}
        leaving = inputs_of((route.leaving, [value for _, value in route.stashes], outputs))
        return last | dict.fromkeys([*leaving, *self._owned], len(route.operations))

    def _operations(self, operations: list[Operation]) -> list[str]:
        lines: list[str] = []
        opened: list[str] = []  # the statements that the last line is inside of
        for index, operation in enumerate(operations):
            around = [f"with {context.expression}:" for context in operation.contexts]
            self._needs_device |= any("_device" in each for each in around)
            keys = [context.key for context in operation.contexts]
            if operation.result.mode is not None:
                path, training = operation.result.mode
                around.append(f"if {'' if training else 'not '}{self._place(path)}.training:")
                keys.append(around[-1])
            for depth in range(len(os.path.commonprefix([keys, opened])), len(keys)):
                lines.append(_INDENT * depth + around[depth])
            opened = keys
            lines.append(_INDENT * len(keys) + self._line(operation))
            # Frees tensors as soon as possible.
            used = dict.fromkeys(value for value in operation.inputs() if self._last_use[value] == index)
            lines += [f"{_INDENT * len(keys)}{value.name} = None" for value in used if value.is_tensor]
        return lines

    def _line(self, operation: Operation) -> str:
        name = operation.result.name
        args = [self._argument(arg) for arg in operation.args]
        if operation.schema is not None and operation.schema.name == OPERATOR:
            inputs, arguments, _ = args
            return f"{name} = {self._function(run_whole)}({self._place(operation.call.path)}, {arguments}, {inputs})"
        args += [f"{key}={self._argument(value)}" for key, value in operation.kwargs.items()]
        function = operation.function
        if function is torch.ops.aten.batch_norm.default:
            shape = next(operation.inputs()).example.shape
            if math.prod(shape[2:]) == 1:  # as many values per channel as samples
                function = batch_norm
        call = f"{self._function(function)}({', '.join(args)})"
        return f"{name} = {call}" if operation.result in self._last_use else call

    def _function(self, function: Callable[..., Any]) -> str:
        is_operator = isinstance(function, torch._ops.OpOverload)
        where = f"torch:ops.{function}" if is_operator else f"{function.__module__}:{function.__qualname__}"
        name = "_" + where.removeprefix("torch:ops.").replace(".", "_").replace(":", "_")
        self._functions[name] = where
        return name

    def _place(self, path: str) -> str:
        return self._places.setdefault(path, f"_place{len(self._places)}")

    def _argument(self, arg: Any) -> str:
        """Returns an argument as an expression."""
        if isinstance(arg, Choice):
            yes, no = self._argument(arg.training), self._argument(arg.evaluation)
            return f"({yes} if {self._place(arg.path)}.training else {no})"
        if isinstance(arg, Value):
            if arg not in self._owned:
                return arg.name
            owner, _, name = arg.tensor.rpartition(".")
            plain = name.isidentifier() and not keyword.iskeyword(name)
            return f"{self._place(owner)}.{name}" if plain else f"getattr({self._place(owner)}, {name!r})"
        if isinstance(arg, Number):
            return f"({arg.text})"
        if isinstance(arg, (tuple, list)):
            items = ", ".join(self._argument(item) for item in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items},)" if arg else "()"
        if isinstance(arg, slice):
            return f"slice({', '.join(self._argument(part) for part in (arg.start, arg.stop, arg.step))})"
        if isinstance(arg, torch.device):
            self._needs_device = True
            return "_device"
        if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
            return str(arg)
        if arg is None or arg is Ellipsis or isinstance(arg, (bool, int, float, complex, str)):
            return repr(arg)
        raise ValueError(f"cannot convert the model: it uses an operator with an argument of {type(arg)}")


class Expected(NamedTuple):
    """What a converted model takes as its input."""

    example: Any  # an object of the input's structure
    shapes: list[tuple[int, ...] | None]  # of the tensors, without dimension 0; None for what was a constant
    guards: list[str]  # conditions for the number of samples, as Python expressions of ``samples``

    def flattened(self, input: Any) -> list[Any]:
        """Returns the flattened input. Raises TypeError if its structure is another, and ValueError for other shapes."""
        leaves, found = tree_flatten(_in_order_of(self.example, input))
        expected = tree_structure(self.example)
        if found != expected:
            raise TypeError(
                f"the model was converted for another structure of the input: expected {_shown(expected)}, but got "
                f"{_shown(found)}; give what was expected, with a tensor for each '...'"
            )
        for number, (leaf, shape) in enumerate(zip(leaves, self.shapes)):
            if shape is None and leaf is not None:
                raise ValueError(f"input {number} was a constant when the model was converted; give None, not {leaf!r}")
            if shape is not None and (not isinstance(leaf, Tensor) or tuple(leaf.shape[1:]) != shape):
                given = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
                raise ValueError(
                    f"input {number} has the shape {given}, but the model was converted for {('batch', *shape)}; only "
                    "dimension 0 may differ, so convert it for this shape, or pad or resize the input"
                )
        samples = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor))
        for guard in self.guards:
            if not holds(guard, samples):
                raise ValueError(
                    f"the model was converted for a number of samples with {guard}, but a micro-batch has {samples}: its "
                    "code depends on that; choose chunks accordingly, or keep the module whole by opaque"
                )
        return leaves


class ExportedLayer(ConvertedLayer):
    """A layer of a converted model: what the module at the path ``name`` computes, with the operators around it."""

    def __init__(
        self,
        route: Route,
        model: nn.Module,
        order: list[str],
        code: Code,
        input: Expected | None,
        output: tuple[Any, Any] | None,
    ) -> None:
        super().__init__()
        self.name = route.name
        self.stashable_names = frozenset(name for name, _ in route.stashes)
        self.poppable_names = frozenset(name for name, _ in route.pops)
        self.peekable_names = frozenset(name for name, _ in route.peeks)
        self.model, self.order = model, order
        self._code = code
        self._input = input  # of the first layer
        self._output = output  # of the last layer: objects of the output's structure in training and evaluation mode
        self._prepare()

    def _prepare(self) -> None:
        modules = dict(self.model.named_modules())
        self._run = load(self._code, self.name)
        self.__dict__["_places"] = [modules[path] for path in self._code.places]
        self._output_specs = self._output and list(map(tree_structure, self._output))

    def name_in_messages(self, key: str) -> str:
        return self.name

    def forward(self, input: Any) -> Any:
        if self._input is not None:
            input = self._input.flattened(input)
        output = self._run(self._places, self._pop, self._peek, self._stash, input)
        if self._output_specs is None:
            return output
        spec = self._output_specs[0 if self.model.training else 1]
        return tree_unflatten(output[: spec.num_leaves], spec)

    def _pop(self, name: str) -> Tensor | None:
        return _C.pop(self.native_key(name))

    def _peek(self, name: str) -> Tensor | None:
        return _C.peek(self.native_key(name))

    def _stash(self, name: str, tensor: Tensor | None) -> None:
        _C.stash(self.native_key(name), tensor)

    def __repr__(self) -> str:
        return f"ExportedLayer({self.name})"

    def __getstate__(self) -> dict[str, Any]:
        made = ("_run", "_places", "_output_specs")  # by _prepare()
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()


def holds(guard: str, samples: int) -> bool:
    """Returns whether a number of samples meets a condition."""
    return bool(eval(guard, {"math": math, "torch": torch}, {"samples": samples}))


def _in_order_of(example: Any, value: Any) -> Any:
    """Returns a value with the keys of its dicts in the order of an example."""
    if isinstance(example, dict) and isinstance(value, dict) and example.keys() == value.keys():
        return {key: _in_order_of(each, value[key]) for key, each in example.items()}
    if type(example) is tuple and type(value) is tuple and len(example) == len(value):
        return tuple(_in_order_of(*pair) for pair in zip(example, value))
    return value


def _shown(spec: TreeSpec) -> str:
    return str(tree_unflatten(["..."] * spec.num_leaves, spec)).replace("'...'", "...")
