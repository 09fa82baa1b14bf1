"""What the code of a model reads, and whether it has changed."""

import dis
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from io import BytesIO
from logging import Logger
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe.exported.exporter import OF_MODULES
from gpipe.randomness import GeneratorState, is_generator

_VALUES = bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None)
_LISTS = list, tuple, deque, partial
_COLLECTIONS = *_LISTS, set, frozenset, dict
OF_TENSORS = {"dtype", "device"}  # mostly read of tensors, and trainers set them in models and configurations


Place = partial[Any]  # returns a value of now


class Gone:
    """Stands for a value that is not there."""


class Read(NamedTuple):
    """What code reads by name: globals, each with the name of its file's module, and attributes."""

    globals: set[tuple[str, str]]
    names: set[str]

    def add(self, code: CodeType, space: str) -> None:
        """Adds what a function reads that is defined in the module ``space``."""
        self.globals.update((space, name) for name in _names_of(code))
        self.names.update(code.co_names)

    def variables(self) -> list[Place]:
        """Returns the globals, and the attributes and elements of objects in globals, that hold only values and tensors, which code
        may change."""
        return [get for get in self.places({}).values() if _is_plain(get(), Tensor)]

    def places(self, modules: Mapping[str, nn.Module]) -> dict[str, Place]:
        """Returns the values that stand outside of some modules, which are given by path: globals, and attributes of the modules'
        classes and of objects. Returns for each a text that tells where it is, and a function that returns it, or ``Gone``."""
        found: dict[str, Place] = {}
        reached: list[tuple[str, Any]] = []

        def note(where: str, get: Place) -> None:
            if (value := get()) is not Gone:
                reached.append((where, value))
                found[where] = get

        for space, name in sorted(self.globals):
            if space in sys.modules:
                note(f"{space}.{name}", partial(vars(sys.modules[space]).get, name, Gone))
        for kind in {each: None for module in modules.values() for each in type(module).__mro__}:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                for name in sorted(self.names & vars(kind).keys()):  # so that a place has the same name in each process
                    note(f"{kind.__qualname__}.{name}", partial(vars(kind).get, name, Gone))
        for path, module in modules.items():
            names = sorted((self.names & vars(module).keys()) - OF_MODULES)
            reached += [(f"{path or type(module).__name__}.{name}", vars(module)[name]) for name in names]
        of_objects = {name for name in self.names if not name.startswith("__")} - OF_TENSORS
        seen = {id(sys.modules)}  # has modules that the code does not read
        for place, value in reached:  # which grows
            if id(value) in seen or type(value) in _VALUES or isinstance(value, (Tensor, nn.Module, Logger)):
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                for key in [] if _is_plain(value) else [*filter(_is_plain, list(dict.keys(value)))]:
                    note(f"{place}[{key!r}]", partial(dict.get.__get__(value), key, Gone))
            elif isinstance(value, _LISTS):
                reached += [(f"{place}[{number}]", each) for number, each in enumerate(_elements(value))]
            if isinstance(value, MethodType):
                reached.append((place, value.__self__))
            elif isinstance(value, FunctionType):
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                    if name != "__class__" and name not in _stored(value.__code__):
                        note(f"{place}.{name}", partial(_content, cell))
                for name in ("__defaults__", "__kwdefaults__"):
                    if getattr(value, name):
                        note(f"{place}.{name}", partial(getattr, value, name, Gone))
            else:
                declared = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
                slots = {name for each in declared for name in ([each] if isinstance(each, str) else each)}
                for name in sorted(slots & of_objects):
                    note(f"{place}.{name}", partial(getattr, value, name, Gone))
                has_dict = hasattr(value, "__dict__")
                own = vars(value) if has_dict else {}
                for name in sorted(of_objects & own.keys()):
                    note(f"{place}.{name}", partial(own.get, name, Gone))
                hidden = sorted((of_objects & {*dir(type(value))}) - own.keys() - slots if has_dict else ())
                of_class = ((name, inspect.getattr_static(type(value), name, None)) for name in hidden)
                constants = (name for name, each in of_class if not (callable(each) or hasattr(type(each), "__get__")))
                found |= {f"{place}.{name}": partial(own.get, name, Gone) for name in constants}  # which the object may hide
        return found


def _is_plain(value: Any, *more: type) -> bool:
    """Returns whether something is a value, or a collection of values. Some ``more`` classes count as values."""
    is_value = isinstance(value, (*_VALUES, *more))
    return is_value or (isinstance(value, _COLLECTIONS) and all(_is_plain(each, *more) for each in _elements(value)))


def _content(cell: CellType) -> Any:
    with suppress(ValueError):  # not assigned yet
        return cell.cell_contents
    return Gone


@cache
def _names_of(code: CodeType) -> list[str]:
    """Returns the names of the globals that a function's code loads: ``co_names`` has names of attributes too."""
    return list(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"))


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """Returns the variables of its closure that a function assigns, such as a counter."""
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")


def noted(value: Any, may_grow: bool = False) -> tuple[Any, Any]:
    """Returns what a value is, and the parts that can change in it: elements, a state or bytes. For values without such parts,
    returns which object it is; with ``may_grow`` also for dicts and sets of objects, which may be registries or caches."""
    if isinstance(value, _VALUES):
        return value, None
    if may_grow and isinstance(value, (dict, set)) and not _is_plain(value):
        return _Object(value), None
    if isinstance(value, (*_LISTS, dict)):
        return _name_of(type(value)), [noted(each, may_grow) for each in _elements(value)]
    parts = _state_of(value)
    return (_Object(value), None) if parts is None else (_name_of(type(value)), parts)


class _Object:
    """Tells which object a value is. A copy, which may be in another process, tells what it is like until it has seen one."""

    def __init__(self, value: object, like: str = "") -> None:
        self._value, self._like, self._version = value, like, _version_of(value)

    def __reduce__(self) -> Any:
        return _Object, (None, self._like or _described(self._value))

    def is_now(self, value: object) -> bool:
        if self._like and self._like == _described(value):
            self._value, self._like, self._version = value, "", _version_of(value)
        return not self._like and value is self._value and self._version == _version_of(value)


def _version_of(value: Any) -> Any:
    """Returns the version of a tensor that is not a parameter, which an optimizer advances."""
    is_counted = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()
    return value._version if is_counted else None


def _state_of(value: Any) -> Any:
    """Returns the elements of a set of values, the number of other elements, the state of a generator, or the bytes of an array,
    such as of NumPy; ``None`` for anything else."""
    if isinstance(value, (set, frozenset)):
        return frozenset(value) if _is_plain(value) else len(value)
    if is_generator(value):
        return GeneratorState([value]).of_last()
    with suppress(Exception):
        view = memoryview(value)
        return None if "O" in view.format else view.tobytes()  # which are addresses for elements that are objects
    return None


def _described(value: Any) -> str:
    """Describes a value alike in each process: a function by its name and a hash of its code, a tensor by a hash of its elements,
    another object by its class."""
    named, inside = type(value), BytesIO()
    with suppress(Exception):  # objects may raise for any attribute, and tensors on meta have no elements
        code = getattr(getattr(value, "fget", getattr(value, "__func__", value)), "__code__", None)
        if isinstance(code, CodeType):
            inside.write(_text_of(code).encode())
        elif _version_of(value) is not None:
            torch.save(value.detach().cpu(), inside)
        named = value if hasattr(value, "__qualname__") else named
    return f"{_name_of(named)} {hashlib.sha256(inside.getbuffer()).hexdigest()}"


def _name_of(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _text_of(code: CodeType) -> str:
    """Returns a text that code has in each process."""
    sets = (sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts)
    return f"{code.co_code.hex()} {code.co_names} {[_text_of(each) if isinstance(each, CodeType) else each for each in sets]}"


def _elements(value: Any) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]  # a kind of dict may make its values when it is asked
    return list(value)


def same(before: tuple[Any, Any], now: Any) -> bool:
    """Returns whether a value is as it was when :func:`noted` returned ``before``."""
    value, parts = before
    if isinstance(value, _Object):
        return value.is_now(now)
    if parts is None:
        return value is now or type(value) is type(now) and (value == now or (value != value and now != now))
    if _name_of(type(now)) != value:
        return False
    if isinstance(parts, list):
        elements = _elements(now)
        return len(elements) == len(parts) and all(map(same, parts, elements))
    return bool(_state_of(now) == parts)


def can_change(value: Any) -> bool:
    """Returns whether something in a value can change."""
    if isinstance(value, (tuple, frozenset, partial)):
        return any(map(can_change, _elements(value)))
    return noted(value)[1] is not None or _version_of(value) is not None
