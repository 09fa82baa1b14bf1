"""The state of a loss, which the comparison with the whole mini-batch leaves as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from gpipe import _C

_HELD = (nn.Module, Tensor, dict, list, set, deque)
# Limits, nearest first: what is larger is rather data than state.
_MOST_VALUES = 10_000
_MOST_ELEMENTS = 2**26  # of tensors, together


def hold_state(loss: object, others: Iterable[object]) -> Callable[[], None]:
    """Notes variables, attributes, containers and tensors of a loss and of what it captures, except ``others``. Returns a
    function that puts them back. Does not look into attributes of attributes other than modules, containers, and objects of
    classes that stand beside the loss."""
    excluded = {id(each) for each in others}
    seen: set[int] = set()
    found: list[Any] = [loss]
    beside = {type(loss).__module__}  # modules of the loss's code
    tensors: list[Tensor] = []
    elements = 0
    steps: list[Callable[[], object]] = []

    def held(values: Iterable[object]) -> list[object]:
        return [each for each in values if isinstance(each, _HELD) or type(each).__module__ in beside]

    for value in found:  # which grows
        if id(value) in seen or id(value) in excluded or isinstance(value, (type, ModuleType, nn.Parameter)):
            continue
        if len(seen) == _MOST_VALUES:
            break
        seen.add(id(value))
        if isinstance(value, Tensor):
            elements += value.numel()
            tensors += [value] if elements <= _MOST_ELEMENTS else []
        elif isinstance(value, MethodType):
            beside.add(type(value.__self__).__module__)
            found += [value.__func__, value.__self__]
        elif isinstance(value, partial):
            found += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, CellType):
            if value != CellType():  # an empty one
                found.append(value.cell_contents)
                steps.append(partial(setattr, value, "cell_contents", value.cell_contents))
        elif isinstance(value, FunctionType):
            beside.add(value.__module__)
            variables = value.__globals__
            used = {name: variables[name] for name in value.__code__.co_names if name in variables}
            found += [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            found += held(used.values())
            found += [each for each in used.values() if isinstance(each, FunctionType) and each.__module__ == value.__module__]
            steps.append(partial(variables.update, used))
        elif isinstance(value, (dict, list, set, deque)):
            found += held(value.values() if isinstance(value, dict) else value)
            steps.append(partial(put_back, value, value.copy()))
        elif hasattr(value, "__dict__"):
            found.append(vars(value))
            found += value.buffers() if isinstance(value, nn.Module) else ()  # a script's are not in a dict
    steps.append(_C.hold_values(tensors))

    def undo() -> None:
        for step in reversed(steps):
            step()

    return undo


def put_back(container: Any, before: Any) -> None:
    """Gives a dict, set, list or deque the elements of a copy."""
    if isinstance(container, dict):
        for name in [name for name in container if name not in before]:
            del container[name]
        for name in [name for name, each in before.items() if container.get(name) is not each]:
            container[name] = before[name]  # because update() of a Counter adds
    elif isinstance(container, set):
        container &= before
        container |= before
    elif list(map(id, container)) != list(map(id, before)):
        container.clear()
        container.extend(before)
