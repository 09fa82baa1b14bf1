"""What the code of a model reads, and whether it has changed."""

import dis
import sys
from collections.abc import Mapping
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gpipe.exported.exporter import OF_MODULES
from gpipe.randomness import GeneratorState, is_generator

_VALUES = bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None)
_COLLECTIONS = list, tuple, set, frozenset, torch.Size, dict, partial


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
        places: list[tuple[str, Mapping[str, Any], str]] = []
        for space, name in sorted(self.globals):
            if space in sys.modules:
                places.append((space, vars(sys.modules[space]), name))
        for kind in {each: None for module in modules.values() for each in type(module).__mro__}:
            if kind.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            places += [(kind.__qualname__, vars(kind), name) for name in sorted(self.names & vars(kind).keys())]
        for path, module in modules.items():
            names = sorted((self.names & vars(module).keys()) - OF_MODULES)
            places += [(path or type(module).__name__, vars(module), name) for name in names if _has_attributes(vars(module)[name])]
        seen: set[int] = set()
        for where, table, name in places:  # which grows
            if name not in table:  # a built-in
                continue
            value, place = table[name], f"{where}.{name}"
            in_object = "__name__" not in table and "__module__" not in table
            is_plain = type(value) in _COLLECTIONS and all(isinstance(leaf, _VALUES) for leaf in tree_leaves(value))
            if isinstance(value, (*_VALUES, FunctionType)) or (in_object and is_plain):
                found[place] = table, name
            elif _has_attributes(value) and id(value) not in seen:
                seen.add(id(value))
                inside = sorted(self.names & vars(value).keys())
                # Names such as dtype are mostly read of tensors. Trainers set attributes of these names in configurations.
                of_tensors = {name for name in inside if not callable(getattr(Tensor, name, len))}
                places += [(place, vars(value), name) for name in inside if name not in of_tensors]
        return found


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor))


@cache
def _names_of(code: CodeType) -> list[str]:
    """Returns the names of the globals that a function's code loads: ``co_names`` has names of attributes too."""
    return list(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"))


def noted(value: Any) -> Any:
    """Returns a value with what can change in it: elements, versions and states."""
    if type(value) in _COLLECTIONS:
        return value, [*map(noted, _elements(value))]
    if isinstance(value, Tensor) and not value.is_inference():
        return value, value._version
    return value, GeneratorState([value]).of_last() if is_generator(value) else None


def _elements(value: Any) -> list[Any]:
    """Returns the elements of a collection. Equal sets give them in the same order."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=hash)
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    return list(value.items() if type(value) is dict else value)


def same(before: Any, now: Any) -> bool:
    """Returns whether a value is as it was when :func:`noted` returned ``before``."""
    value, state = before
    if isinstance(value, _VALUES):
        return type(value) is type(now) and (value == now or (value != value and now != now))
    if type(value) is not type(now):
        return False
    if isinstance(state, list) and type(now) in _COLLECTIONS:
        elements = _elements(now)
        return len(elements) == len(state) and all(map(same, state, elements))
    return value is now and noted(now)[1] == state


def can_change(before: Any) -> bool:
    """Returns whether something in a value can change, as :func:`noted` returned it."""
    value, state = before
    return any(map(can_change, state)) if type(value) in (tuple, frozenset, torch.Size, partial) else state is not None
