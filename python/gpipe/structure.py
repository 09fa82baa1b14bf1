"""Splits objects into tensors and structure, and rebuilds them."""

import functools
import io
import itertools
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

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
        leaves = [None if cls is None else _as_class(next(remaining), cls) for cls in self._classes]
        return tree_unflatten(leaves, self._tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._classes == other._classes and self._tree == other._tree

    def __repr__(self) -> str:
        return repr(tree_unflatten([cls and _Name(cls.__name__) for cls in self._classes], self._tree))


def _as_class(tensor: Any, cls: type[Tensor]) -> Any:
    return tensor if cls is Tensor else tensor.as_subclass(cls)


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
    """Returns a structure as bytes, for other ranks. Raises TypeError for one that :func:`decode` refuses, or that cannot be
    pickled."""
    try:
        leaves = [_name_of(cls) for cls in structure._classes]
        encoded = pickle.dumps(tree_unflatten(leaves, structure._tree))
        decode(encoded)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        raise TypeError(f"{structure!r} cannot go to another rank: {error}") from error
    return encoded


@functools.lru_cache(maxsize=256)
def decode(encoded: bytes) -> Structure:
    """Returns the structure of :func:`encode`. Creates only containers: raises pickle.UnpicklingError for anything else, for
    classes that this process has not imported, and for shared containers that unfold to more parts than there are bytes."""
    nodes = itertools.count(1)

    def is_leaf(node: object) -> bool:
        if next(nodes) > len(encoded):
            raise pickle.UnpicklingError("not a structure: it has more parts than bytes")
        return False

    try:
        leaves, tree = tree_flatten(_Containers(io.BytesIO(encoded)).load(), is_leaf)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # an unpickler raises any
        raise pickle.UnpicklingError(f"not a structure: {error}") from error
    return Structure(tree, tuple(_class_named(leaf) for leaf in leaves))


# In an encoded structure, a bool stands for a tensor or None, and a text for a tensor of a subclass. A class would let a
# message call it.


def _name_of(cls: type[Tensor] | None) -> bool | str:
    return cls is not None if cls in (None, Tensor) else f"{cls.__module__}:{cls.__qualname__}"


def _class_named(name: object) -> type[Tensor] | None:
    if isinstance(name, bool):
        return Tensor if name else None
    if isinstance(name, str):
        module, _, qualname = name.partition(":")
        found = getattr(sys.modules.get(module), qualname, None)
        if isinstance(found, type) and issubclass(found, Tensor):
            return found
        raise pickle.UnpicklingError(f"not a structure: {name} is not a subclass of Tensor that this process has imported")
    raise pickle.UnpicklingError("not a structure: it has other values")


class _Containers(pickle._Unpickler):
    """Refuses everything but containers. In Python, because the C class would set attributes of the containers' classes."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # allocates as much as it announces

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in sys.modules else None
        if isinstance(found, type) and (found in SUPPORTED_NODES or is_namedtuple_class(found)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a container that this process knows")

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("not a structure: it changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class _Name:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
