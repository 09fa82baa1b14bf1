"""Splits objects into tensors and structure, and rebuilds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Structure", "take_apart"]


class Structure:
    """An object without its tensors: the tuples, named tuples, lists, dicts and ``None`` that it is made of."""

    def __init__(self, tree: TreeSpec, present: tuple[bool, ...]) -> None:
        self._tree = tree
        self._present = present  # for each leaf: whether it is a tensor, not None

    def build(self, tensors: Iterable[Any]) -> Any:
        """Returns an object of this structure with the given tensors, in the order of :func:`take_apart`."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if present else None for present in self._present], self._tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._present == other._present and self._tree == other._tree

    def __repr__(self) -> str:
        return repr(self.build([_AnyTensor()] * sum(self._present)))


def take_apart(value: object) -> tuple[list[Tensor], Structure]:
    """Splits an object.

    Args:
        value: a tensor; or tensors and ``None`` in tuples, named tuples, lists, dicts and classes that are registered
            with :mod:`torch.utils._pytree`.

    Returns:
        The tensors, and the structure.

    Raises:
        TypeError: for any other object.
    """
    # A PackedSequence is not a container here: its two tensors have different sizes in dimension 0.
    leaves, tree = tree_flatten(value, is_leaf=lambda node: isinstance(node, PackedSequence))
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and (leaf is not None or leaf is value):
            raise TypeError(
                f"expected Tensor, but got {type(leaf)}; a pipeline and its stages take and return tensors, alone or "
                "in tuples, named tuples, lists and dicts, which may hold None"
            )
    present = tuple(leaf is not None for leaf in leaves)
    return [leaf for leaf in leaves if leaf is not None], Structure(tree, present)


class _AnyTensor:
    def __repr__(self) -> str:
        return "Tensor"
