"""The state of a loss, which the comparison with the whole mini-batch leaves as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from gpipe import _C

_LARGE = 2**24  # elements of a tensor that is rather data than state
_HELD = (nn.Module, Tensor, dict, list, set, deque)


def hold_state(loss: object, others: Iterable[object]) -> Callable[[], None]:
    """Notes variables, attributes, containers and tensors of a loss and of what it captures, except ``others``. Returns a
    function that puts them back. Does not look into attributes of attributes other than modules and containers."""
    seen = {id(each) for each in others}
    found: list[Any] = [loss]
    tensors: list[Tensor] = []
    steps: list[Callable[[], object]] = []
    for value in found:  # which grows
        if id(value) in seen or isinstance(value, (type, ModuleType, nn.Parameter)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors += [value] if value.numel() <= _LARGE else []
        elif isinstance(value, MethodType):
            found += [value.__func__, value.__self__]
        elif isinstance(value, partial):
            found += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, CellType):
            if value != CellType():  # an empty one
                found.append(value.cell_contents)
                steps.append(partial(setattr, value, "cell_contents", value.cell_contents))
        elif isinstance(value, FunctionType):
            variables = value.__globals__
            used = {name: variables[name] for name in value.__code__.co_names if name in variables}
            found += [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            found += [each for each in used.values() if isinstance(each, _HELD) or _is_beside(value, each)]
            steps.append(partial(variables.update, used))
        elif isinstance(value, (dict, list, set, deque)):
            items = list(value.values() if isinstance(value, dict) else value)
            found += [each for each in items if isinstance(each, _HELD)]
            steps.append(partial(_put_back, value, value.copy()))
        elif hasattr(value, "__dict__"):
            found.append(vars(value))
            found += value.buffers() if isinstance(value, nn.Module) else ()  # a script's are not in a dict
    steps.append(_C.hold_values(tensors))

    def put_back() -> None:
        for step in reversed(steps):
            step()

    return put_back


def _is_beside(function: FunctionType, other: object) -> bool:
    return isinstance(other, FunctionType) and other.__module__ == function.__module__


def _put_back(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        for name in [name for name in container if name not in before]:
            del container[name]
        container.update({name: each for name, each in before.items() if container.get(name) is not each})
    elif isinstance(container, set):
        container &= before
        container |= before
    elif list(map(id, container)) != list(map(id, before)):
        container.clear()
        container.extend(before)
