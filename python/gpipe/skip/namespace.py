"""Namespaces of skips, in Python and in C++."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable

from gpipe import _C


class _NamespaceMeta(type):
    # None is the namespace of layers that are not isolated.
    def __instancecheck__(cls, instance: object) -> bool:
        return instance is None or type.__instancecheck__(cls, instance)


@functools.total_ordering
class Namespace(metaclass=_NamespaceMeta):
    """Separates skips that have the same name. Namespaces are hashable and ordered. A copy equals its original, after
    pickling too.

    ``None`` is a namespace as well: that of all layers that are not isolated.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return type(other) is Namespace and self.id == other.id

    def __lt__(self, other: Namespace | None) -> bool:
        return other is not None and self.id < other.id


# The C++ namespace of each namespace, in this process.
_native: dict[Namespace | None, _C.Namespace] = {None: _C.Namespace.shared()}


def native_namespace(namespace: Namespace | None) -> _C.Namespace:
    """Returns the C++ namespace that stands for a namespace in this process."""
    return _native.get(namespace) or _native.setdefault(namespace, _C.Namespace())


def native_keys(keys: Iterable[tuple[Namespace | None, str]]) -> list[tuple[_C.Namespace, str]]:
    """Replaces the namespace of each skip by its C++ namespace."""
    return [(native_namespace(namespace), name) for namespace, name in keys]
