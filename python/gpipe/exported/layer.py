"""The layers of a converted model."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from gpipe import _C
from gpipe.exported.code import Code, load
from gpipe.exported.layers import Route
from gpipe.names import ConvertedLayer


class Expected(NamedTuple):
    """What a converted model takes as its input."""

    example: Any  # an object of the input's structure
    shapes: list[tuple[int, ...] | None]  # of the tensors, without dimension 0; None for what was a constant
    guards: list[str]  # conditions for the number of samples, as Python expressions of ``samples``

    def flattened(self, input: Any) -> list[Any]:
        """Returns the flattened input. Raises TypeError if its structure is another, and ValueError for other shapes."""
        leaves, found = tree_flatten(_in_order_of(self.example, input))
        if found != (expected := tree_structure(self.example)):
            what = f"expected {_shown(expected)}, but got {_shown(found)}"
            raise TypeError(f"the model was converted for another structure of the input: {what}")
        for number, (leaf, shape) in enumerate(zip(leaves, self.shapes)):
            if shape is None and leaf is not None:
                raise ValueError(f"input {number} was a constant when the model was converted; give None, not {leaf!r}")
            if shape is not None and (not isinstance(leaf, Tensor) or tuple(leaf.shape[1:]) != shape):
                given = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
                what = f"the model was converted for {('batch', *shape)}"
                raise ValueError(f"input {number} has the shape {given}, but {what}")
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
        self, route: Route, model: nn.Module, order: list[str], code: Code, input: Expected | None, output: Any
    ) -> None:
        super().__init__()
        self.name = route.name
        self.stashable_names = frozenset(name for name, _ in route.stashes)
        self.poppable_names = frozenset(name for name, _ in route.pops)
        self.model, self.order = model, order
        self._code = code
        self._input = input  # of the first layer
        self._output = output  # of the last layer: objects of the output's structure in training and evaluation mode
        self._prepare()

    def _prepare(self) -> None:
        modules = dict(self.model.named_modules())
        self._run = load(self._code, self.name)
        self.__dict__["_places"] = [modules[path] for path in self._code.places]

    def name_in_messages(self, key: str) -> str:
        return self.name

    def forward(self, input: Any) -> Any:
        if self._input is not None:
            input = self._input.flattened(input)
        output = self._run(self._places, self._pop, self._stash, input)
        if self._output is None:
            return output
        spec = tree_structure(self._output[0 if self.model.training else 1])
        return tree_unflatten(output[: spec.num_leaves], spec)

    def _pop(self, name: str) -> Tensor | None:
        return _C.pop(self.native_namespace(name), name)

    def _stash(self, name: str, tensor: Tensor | None) -> None:
        _C.stash(self.native_namespace(name), name, tensor)

    def __repr__(self) -> str:
        return f"ExportedLayer({self.name})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_run", "_places")}  # of _prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()


def holds(guard: str, samples: int) -> bool:
    """Returns whether a number of samples meets a condition."""
    return bool(eval(guard, {"math": math}, {"samples": samples}))


def _in_order_of(example: Any, value: Any) -> Any:
    """Returns a value with the keys of its dicts in the order of an example."""
    if isinstance(example, dict) and isinstance(value, dict) and example.keys() == value.keys():
        return {key: _in_order_of(each, value[key]) for key, each in example.items()}
    if type(example) is tuple and type(value) is tuple and len(example) == len(value):
        return tuple(_in_order_of(*pair) for pair in zip(example, value))
    return value


def _shown(spec: TreeSpec) -> str:
    return str(tree_unflatten(["..."] * spec.num_leaves, spec)).replace("'...'", "...")
