"""Splits objects into tensors and structure, and rebuilds them."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    SUPPORTED_NODES,
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
        TypeError: for a structure that :func:`decode` refuses, or that cannot be pickled, such as one with a class that a
            function defines.
    """
    try:
        encoded = pickle.dumps(tree_unflatten(structure._present, structure._tree))
        decode(encoded)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        raise TypeError(f"{structure!r} cannot go to another rank: {error}") from error
    return encoded


@functools.lru_cache(maxsize=256)
def decode(encoded: bytes) -> Structure:
    """Returns the structure of :func:`encode`. Creates only containers.

    Raises:
        pickle.UnpicklingError: for anything else, and for classes that this process has not imported.
    """
    try:
        leaves, tree = tree_flatten(_Containers(io.BytesIO(encoded)).load())
    except (AttributeError, EOFError, IndexError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f"not a structure: {error}") from error
    if not all(isinstance(leaf, bool) for leaf in leaves):
        raise pickle.UnpicklingError("not a structure: it has other values")
    return Structure(tree, tuple(leaves))


class _Containers(pickle.Unpickler):
    """Refuses everything but containers."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in sys.modules else None
        if isinstance(found, type) and (found in SUPPORTED_NODES or is_namedtuple_class(found)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a container that this process knows")


class _AnyTensor:
    def __repr__(self) -> str:
        return "Tensor"
