"""Splits objects into tensors and structure, and rebuilds them."""

import functools
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES, MappingKey, TreeSpec, is_namedtuple_class
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from gpipe._C import micro_batch_sizes


class Structure:
    """An object without its tensors: the containers and ``None`` that it is made of, and the classes of its tensors."""

    def __init__(self, tree: TreeSpec, classes: tuple[type[Tensor] | None, ...]) -> None:
        self._tree = tree
        self._classes = classes  # of each leaf; None for None

    def build(self, tensors: Iterable[Any]) -> Any:
        """Returns an object of this structure with the given tensors, in the order of :func:`take_apart`."""
        remaining = iter(tensors)
        leaves = [cls and (next(remaining) if cls is Tensor else next(remaining).as_subclass(cls)) for cls in self._classes]
        return tree_unflatten(leaves, self._tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._classes == other._classes and self._tree == other._tree

    def __repr__(self) -> str:
        return repr(tree_unflatten([cls and _Name(cls.__name__) for cls in self._classes], self._tree))


def _class_of(leaf: Tensor | None) -> type[Tensor] | None:
    if leaf is None:
        return None
    cls = type(leaf)
    if cls is Tensor or isinstance(leaf, nn.Parameter):
        return Tensor
    if cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ or vars(leaf):
        raise TypeError(
            f"a {cls.__name__} cannot enter or leave a stage, because a tensor there keeps its class but neither attributes "
            "nor __torch_dispatch__; convert it to a torch.Tensor first"
        )
    return cls


def take_apart(value: object) -> tuple[list[Tensor], Structure]:
    """Splits a tensor, or tensors and ``None`` in containers that :mod:`torch.utils._pytree` knows, into the tensors and the
    structure. Raises TypeError for any other object, and for a subclass of Tensor with ``__torch_dispatch__`` or attributes."""
    # A PackedSequence is not a container here: its two tensors have different sizes in dimension 0.
    leaves, tree = tree_flatten(value, is_leaf=lambda node: isinstance(node, PackedSequence))
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and (leaf is not None or leaf is value):
            path = next((path for path, each in tree_flatten_with_path(value)[0] if each is leaf), ())
            name = path[-1].key if path and isinstance(path[-1], MappingKey) else None
            place = "" if name is None else f" for '{name}'"
            advice = "; pass dict(...) of it" if isinstance(leaf, Mapping) else ""
            if name is not None and isinstance(leaf, (bool, int, float, str)):
                advice = "; a converted model has it as a constant: leave it out, or call pipe.module for another value"
            raise TypeError(
                f"expected Tensor, but got {type(leaf)}{place}; a pipeline and its stages take and return tensors, alone or "
                f"in tuples, named tuples, lists and dicts{' that hold None' if leaf is None else ', which may hold None'}{advice}"
            )
    classes = tuple(_class_of(leaf) for leaf in leaves)
    return [leaf for leaf in leaves if leaf is not None], Structure(tree, classes)


def first_micro_batch(value: object, chunks: int) -> tuple[Any, int]:
    """Returns the first micro-batch of a mini-batch, and the number of micro-batches. Errors as :func:`take_apart`."""
    tensors, structure = take_apart(value)
    sizes = micro_batch_sizes(len(tensors[0]), chunks, 0, 1) if tensors else []
    return structure.build(tensor[: sizes[0]] for tensor in tensors), len(sizes)


def encode(structure: Structure) -> bytes:
    """Returns a structure as JSON, for other ranks. Raises TypeError for one that :func:`decode` would not return."""
    leaves = [cls is not None if cls in (None, Tensor) else _name_of(cls) for cls in structure._classes]
    try:
        encoded = json.dumps(_written(tree_unflatten(leaves, structure._tree))).encode()
        if decode(encoded) != structure:
            raise TypeError("its keys are not texts and numbers")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{structure!r} cannot go to another rank: {error}") from error
    return encoded


@functools.lru_cache(maxsize=256)
def decode(encoded: bytes) -> Structure:
    """Returns the structure of :func:`encode`. Makes only containers, of classes that this process has imported. Raises
    ValueError for anything else."""
    try:
        leaves, tree = tree_flatten(_read(json.loads(encoded)))
        classes = [_class_named(leaf, Tensor) if isinstance(leaf, str) else Tensor if leaf else None for leaf in leaves]
    except Exception as error:  # a container may raise any
        raise ValueError(f"not a structure: {error}") from error
    return Structure(tree, tuple(classes))


# A container is written as a list of its class, what pytree calls its context, and its elements. A bool stands for a tensor
# or None, and a text for a tensor of a subclass.


def _written(value: Any) -> Any:
    cls = type(value)
    if cls in (bool, str):
        return value
    parts, context = (value, None) if is_namedtuple_class(cls) else SUPPORTED_NODES[cls].flatten_fn(value)
    return [_name_of(cls), context, [*map(_written, parts)]]


def _read(written: Any) -> Any:
    if isinstance(written, (bool, str)):
        return written
    name, context, parts = written
    cls, parts = _class_named(name, object), [*map(_read, parts)]
    return cls(*parts) if is_namedtuple_class(cls) else SUPPORTED_NODES[cls].unflatten_fn(parts, context)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_named(name: str, base: type) -> type[Any]:
    module, _, qualname = name.partition(":")
    found = getattr(sys.modules.get(module), qualname, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    raise ValueError(f"this process has imported no class {name}")


class _Name:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
