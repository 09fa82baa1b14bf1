"""What the code of a model reads, and whether it has changed."""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe.exported.exporter import OF_MODULES
from gpipe.randomness import GeneratorState, is_generator

_VALUES = bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None)
_COLLECTIONS = list, tuple, set, frozenset, dict, partial


class Read(NamedTuple):
    """What code reads by name: globals, each with the name of its file's module, and attributes."""

    globals: set[tuple[str, str]]
    names: set[str]

    def add(self, code: CodeType, space: str) -> None:
        """Adds what a function reads that is defined in the module ``space``."""
        self.globals.update((space, name) for name in _names_of(code))
        self.names.update(code.co_names)

    def places(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[Mapping[str, Any], str]]:
        """Returns the values that stand outside of some modules, which are given by path: globals, and attributes of the modules'
        classes and of objects. Returns for each a text that tells where it is, the dict that it is in, and its name there."""
        found: dict[str, tuple[Mapping[str, Any], str]] = {}
        reached: list[tuple[str, Any]] = []

        def note(where: str, table: Mapping[str, Any], names: Set[str]) -> None:
            for name in sorted(names & table.keys()):
                reached.append((f"{where}.{name}", table[name]))
                is_function = isinstance(table[name], FunctionType) and not {"__name__", "__module__"}.isdisjoint(table)
                if is_function or _is_plain(table[name]):  # others are other objects in a copy of the guards
                    found[f"{where}.{name}"] = table, name

        for space, name in sorted(self.globals):
            if space in sys.modules:
                note(space, vars(sys.modules[space]), {name})
        for kind in {each: None for module in modules.values() for each in type(module).__mro__}:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                note(kind.__qualname__, vars(kind), self.names)
        for path, module in modules.items():
            names = sorted((self.names & vars(module).keys()) - OF_MODULES)
            reached += [(f"{path or type(module).__name__}.{name}", vars(module)[name]) for name in names]
        # Names such as dtype are mostly read of tensors. Trainers set attributes of these names in configurations.
        of_objects = {name for name in self.names if callable(getattr(Tensor, name, len))}
        seen: set[int] = set()
        for place, value in reached:  # which grows
            if id(value) in seen or isinstance(value, (*_VALUES, Tensor, nn.Module)):
                continue
            seen.add(id(value))
            if isinstance(value, _COLLECTIONS):
                is_set = isinstance(value, (set, frozenset))  # whose order is another in a copy
                elements = value.items() if isinstance(value, dict) else () if is_set else enumerate(_elements(value))
                for number, (key, each) in enumerate(elements):
                    reached.append((f"{place}[{key if isinstance(key, _VALUES) else number!r}]", each))
            if type(value) in _COLLECTIONS:
                continue
            if isinstance(value, MethodType):
                reached.append((place, value.__self__))
            elif isinstance(value, FunctionType):
                cells = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
                table = _Live({name: partial(getattr, cell, "cell_contents") for name, cell in cells.items()})
                note(place, table, cells.keys() - {"__class__"} - _stored(value.__code__))
            else:
                declared = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
                slots = {name for each in declared for name in ([each] if isinstance(each, str) else each)}
                note(place, _Live({name: partial(getattr, value, name) for name in slots & of_objects}), of_objects)
                has_dict = hasattr(value, "__dict__")
                own = vars(value) if has_dict else {}
                note(place, own, of_objects)
                hidden = sorted((of_objects & {*dir(type(value))}) - own.keys() - slots if has_dict else ())
                of_class = (name for name in hidden if not callable(inspect.getattr_static(type(value), name, None)))
                found |= {f"{place}.{name}": (own, name) for name in of_class}  # which the object may hide
        return found


class _Live(Mapping[str, Any]):
    """Values by name, which functions return."""

    def __init__(self, functions: Mapping[str, Callable[[], Any]]) -> None:
        self._functions = functions

    def __getitem__(self, name: str) -> Any:
        try:
            return self._functions[name]()
        except (AttributeError, ValueError):  # not assigned yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _VALUES) or (isinstance(value, _COLLECTIONS) and all(map(_is_plain, _elements(value))))


@cache
def _names_of(code: CodeType) -> list[str]:
    """Returns the names of the globals that a function's code loads: ``co_names`` has names of attributes too."""
    return list(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"))


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """Returns the variables of its closure that a function assigns, such as a counter."""
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")


def noted(value: Any) -> Any:
    """Returns a value with what can change in it: elements, versions and states."""
    if isinstance(value, _COLLECTIONS):
        return value, [*map(noted, _elements(value))]
    if isinstance(value, Tensor) and not value.is_inference():
        return value, None if isinstance(value, nn.Parameter) else value._version  # which an optimizer advances
    return value, GeneratorState([value]).of_last() if is_generator(value) else None


def _elements(value: Any) -> list[Any]:
    """Returns the elements of a collection. Equal sets give them in the same order."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=lambda each: (repr(each), 0) if isinstance(each, _VALUES) else ("", hash(each)))
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    return list(value.items() if isinstance(value, dict) else value)


def same(before: Any, now: Any) -> bool:
    """Returns whether a value is as it was when :func:`noted` returned ``before``."""
    value, state = before
    if isinstance(value, _VALUES):
        return type(value) is type(now) and (value == now or (value != value and now != now))
    if type(value) is not type(now):
        return False
    if isinstance(state, list) and isinstance(now, _COLLECTIONS):
        elements = _elements(now)
        return len(elements) == len(state) and all(map(same, state, elements))
    return value is now and noted(now)[1] == state


def can_change(before: Any) -> bool:
    """Returns whether something in a value can change, as :func:`noted` returned it."""
    value, state = before
    return any(map(can_change, state)) if isinstance(value, (tuple, frozenset, partial)) else state is not None
