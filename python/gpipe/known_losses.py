"""The losses of a pipeline: which are the same, and what their state is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import _C

_VALUES = (bool, int, float, complex, str, bytes, torch.device)
Known = list[tuple[object, _C.LossIdentity]]


def identity_of(loss: object, known: Known) -> _C.LossIdentity:
    """Returns the identity of a loss among the pipeline's recent ones, and adds it to these. Two functions are the same if
    they have the same code and capture the same variables, or the same objects and equal numbers."""
    found = next((each for each in known if _same(loss, each[0])), None) or (loss, _C.LossIdentity())
    known[:] = [*(each for each in known if each is not found), found][-8:]  # which it keeps alive
    return found[1]


def _same(one: object, other: object, depth: int = 0) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or depth > 16:  # a function may capture itself
        return False
    if isinstance(one, _VALUES):
        return one == other
    parts, others = _parts_of(one), _parts_of(other)
    if parts is None or others is None or len(parts) != len(others):
        return False
    return all(_same(*pair, depth + 1) for pair in zip(parts, others))


def _parts_of(value: object) -> tuple[object, ...] | None:
    """Returns what a function, or what it captures, is made of; ``None`` for other objects."""
    if isinstance(value, FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, CellType):
        return () if value == CellType() else (value.cell_contents,)
    if isinstance(value, dict):
        return *value, *value.values()
    return value if isinstance(value, tuple) else None


def hold_state(loss: object, others: Iterable[object]) -> Callable[[], None]:
    """Notes variables, attributes and buffers of a loss and of what it captures, except ``others``. Returns a function that
    puts them back. Does not look into lists, global variables other than modules, attributes of attributes other than
    modules, nor the object of a bound method, such as a trainer with its data, unless that is a module."""
    excluded = {id(each) for each in others}
    seen = set(excluded)
    found: list[Any] = [loss]
    cells: list[tuple[CellType, tuple[object, ...]]] = []
    spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for value in found:  # which grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_method = isinstance(value, MethodType) and not isinstance(value.__self__, nn.Module)
        found += [value.__func__] if is_method else _parts_of(value) or ()
        if isinstance(value, CellType):
            cells.append((value, _parts_of(value) or ()))
        elif isinstance(value, FunctionType):
            used = map(value.__globals__.get, value.__code__.co_names)
            found += [each for each in used if isinstance(each, nn.Module)]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, Tensor, partial)):
            own = vars(value)
            of_module = [own.get(name) for name in ("_modules", "_buffers")] if isinstance(value, nn.Module) else []
            notes = [(space, dict(space)) for space in (own, *of_module) if isinstance(space, dict)]
            spaces += notes
            found += [each for _, space in notes for each in space.values() if isinstance(each, (nn.Module, Tensor))]
            found += value.buffers() if isinstance(value, nn.Module) else ()  # a script's are not in a dict
    tensors = {id(each): each for each in found if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)}
    put_back_values = _C.hold_values([each for key, each in tensors.items() if key not in excluded])

    def put_back() -> None:
        put_back_values()
        for cell, contents in cells:
            if contents and cell.cell_contents is not contents[0]:
                cell.cell_contents = contents[0]
        for space, before in spaces:
            space.update({name: each for name, each in before.items() if space.get(name) is not each})

    return put_back
