"""Splits objects into tensors and structure, and rebuilds them."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    SUPPORTED_NODES,
    LeafSpec,
    TreeSpec,
    is_namedtuple_class,
    tree_flatten,
    tree_unflatten,
)

__all__ = ["Structure", "decode", "encode", "take_apart"]


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


def encode(structure: Structure) -> bytes:
    """Returns a structure as bytes, for other ranks.

    Raises:
        TypeError: for a structure that cannot be pickled, such as one with a class that a function defines.
    """
    try:
        return pickle.dumps((structure._tree, structure._present))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"{structure!r} cannot go to another rank: {error}") from error


def decode(encoded: bytes) -> Structure:
    """Returns the structure of :func:`encode`. Creates objects of containers only.

    Raises:
        pickle.UnpicklingError: for other bytes, and for classes that this process has not imported or that are not
            containers.
    """
    return Structure(*_Containers(io.BytesIO(encoded)).load())


class _Containers(pickle.Unpickler):
    """Refuses everything but containers and what they consist of."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in sys.modules else None
        named = isinstance(found, type) and is_namedtuple_class(found)
        if named or found in SUPPORTED_NODES or found in (TreeSpec, LeafSpec):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a container that this process knows")


class _AnyTensor:
    def __repr__(self) -> str:
        return "Tensor"
