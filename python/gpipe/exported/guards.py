"""What a conversion takes for granted, and what each call checks of it: modules' attributes, and modes of torch."""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from operator import is_, itemgetter
from types import CodeType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpipe.exported.blocks import autocast_dtype
from gpipe.exported.exporter import OF_MODULES
from gpipe.generators import GeneratorState, is_generator

_HOOKS = [name for name in OF_MODULES if name.endswith("_hooks") and "_state_dict" not in name]
_NAMED = "_parameters", "_buffers", "_modules"
_VALUES = bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None)


class Attributes:
    """What the code of a module may read from it: attributes, hooks, names of tensors, class, and states of generators."""

    def __init__(self, module: nn.Module) -> None:
        self._class = type(module)
        self._plain = {name: _frozen(value) for name, value in vars(module).items() if name not in OF_MODULES}
        self._hooks = {name: list(vars(module)[name].values()) for name in _HOOKS}
        self._globals = _globals_of(module)
        self._names = {kind: list(getattr(module, kind)) for kind in _NAMED}

    def has_forward(self, module: nn.Module) -> bool:
        """Returns whether the forward() of a module was not replaced."""
        return "forward" in self._plain or "forward" not in vars(module)

    def changing(self) -> Iterator[tuple[str, Any]]:
        """Yields the names of the attributes in which something can change, each as ``_frozen()`` returns it."""
        return ((name, frozen) for name, frozen in self._plain.items() if _can_change(frozen))

    def difference(self, module: nn.Module, *, added: bool = False) -> str:
        """Returns what is another than it was, such as ``"its attribute 'p'"``; an empty text if nothing is. With ``added``, all
        new attributes count: trainers add some, which the code of modules does not know."""
        if type(module) is not self._class:
            return "its class"
        now = vars(module)
        new = {name for name in now.keys() - OF_MODULES - self._plain.keys() if added or hasattr(self._class, name)}
        if "forward" in new and _runs(now["forward"]):  # and calls the pipeline
            new.remove("forward")
        for name in new | self._plain.keys():
            if name not in now or name in new or not _same(self._plain[name], now[name]):
                return f"its attribute '{name}'"
        if "forward" not in now and self._globals != _globals_of(module):
            return "a global that its forward() reads"
        for name, hooks in self._hooks.items():
            if len(now[name]) != len(hooks) or any(a is not b for a, b in zip(now[name].values(), hooks)):
                return f"its {name.strip('_').replace('_', ' ')}"
        for kind, names in self._names.items():
            if list(getattr(module, kind)) != names:
                return f"its {kind.strip('_')}"
        return ""


def _runs(function: Any) -> bool:
    """Returns whether a function, or one that it wraps, runs on this thread."""
    codes = {getattr(each, "__code__", None) for each in (function, inspect.unwrap(function))}
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _globals_of(module: nn.Module) -> dict[str, Any]:
    """Returns the plain values that a module's forward() reads from its file, by name, also those of objects there."""
    space, names = _names_of_globals(module.forward)
    objects = {name: space[name] for name in names if _is_object(space[name])}
    inner = {f"{name}.{each}": it for name, value in objects.items() for each, it in getattr(value, "__dict__", {}).items()}
    return {name: value for name, value in (objects | inner).items() if isinstance(value, _VALUES)}


def _names_of_globals(function: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the globals of a function's file, and the names of those that it uses."""
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    return space, [name for name in _names_of(code) if name in space] if code else []


@cache
def _names_of(code: CodeType) -> list[str]:
    """Returns the names of the globals that a function's code loads: ``co_names`` has names of attributes too."""
    return list(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"))


def _is_object(value: object) -> bool:
    return not callable(value) and not isinstance(value, ModuleType)


def _module_at(path: str, model: nn.Module) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _frozen(value: Any) -> Any:
    """Returns a value with what can change in it: elements, versions and states."""
    if type(value) in _COLLECTIONS:
        return value, [*map(_frozen, _elements(value))]
    if isinstance(value, Tensor) and not value.is_inference():
        return value, value._version
    return value, GeneratorState([value]) if is_generator(value) else None


_COLLECTIONS = list, tuple, set, frozenset, torch.Size, dict


def _elements(value: Any) -> list[Any]:
    """Returns the elements of a collection, those of equal sets in the same order."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=hash)
    return list(value.items() if type(value) is dict else value)


def _same(frozen: Any, now: Any) -> bool:
    before, state = frozen
    if isinstance(before, _VALUES):
        return type(before) is type(now) and (before == now or (before != before and now != now))
    if type(before) is not type(now):
        return False
    if isinstance(state, list) and type(now) in _COLLECTIONS:
        elements = _elements(now)
        return len(elements) == len(state) and all(map(_same, state, elements))
    return before is now and _frozen(now)[1] == state


def _can_change(frozen: Any) -> bool:
    value, state = frozen
    return any(map(_can_change, state)) if type(value) in (tuple, frozenset, torch.Size) else state is not None


class Watched:
    """Tells fast that no object which :class:`Attributes` compares was replaced, and nothing in them has changed."""

    def __init__(self, exported: Iterable[tuple[str, nn.Module, Attributes]]) -> None:
        self._modules = [module for _, module, _ in exported]
        self._attributes = [(vars(each), itemgetter(*vars(each).keys() - {"training"})) for each in self._modules]
        self._changing = [(vars(module), *each) for _, module, attributes in exported for each in attributes.changing()]
        self._names = [vars(each)[name] for each in self._modules for name in _NAMED]
        functions = {getattr(each.forward, "__func__", each.forward) for each in self._modules}
        spaces = [_names_of_globals(each) for each in functions]
        self._globals = [(space, name) for space, names in spaces for name in names]
        objects = [space[name] for space, name in self._globals if _is_object(space[name])]
        self._tables = [vars(each)[name] for each in self._modules for name in (*_HOOKS, "_modules")]
        self._tables += [vars(each) for each in objects if hasattr(each, "__dict__")]
        self._objects, self._sizes = list(self._now()), [len(table) for table, _ in self._attributes]

    def _now(self) -> Iterator[object]:
        values = map(dict.values, filter(None, self._tables))
        return chain(
            map(type, self._modules),
            chain.from_iterable(of(table) for table, of in self._attributes),
            chain.from_iterable((*values, *self._names)),
            (space.get(name) for space, name in self._globals),
        )

    def is_same(self) -> bool:
        """Returns whether all is as at first."""
        if [len(table) for table, _ in self._attributes] != self._sizes:
            return False
        with suppress(KeyError):  # of an attribute that was deleted
            now = list(self._now())
            same = len(now) == len(self._objects) and all(map(is_, now, self._objects))
            return same and all(_same(frozen, table[name]) for table, name, frozen in self._changing)
        return False


def effects_on(module: nn.Module, run: Callable[[], object]) -> dict[nn.Module, str]:
    """Returns what a run changes in a model's modules, except values of tensors."""
    before = {each: Attributes(each) for each in module.modules() if not isinstance(each, torch.jit.ScriptModule)}
    run()
    changed = {each: attributes.difference(each, added=True) for each, attributes in before.items()}
    return {each: text for each, text in changed.items() if text}


class Guards:
    """Refuses calls of a sequence for which its conversion does not hold.

    Args:
        module: the model.
        exported: the modules whose code was exported, by path.
        dtypes: of the model's input tensors.
        tested: the modes of torch in which the sequence was compared with the model: an empty text, or how they differ.
    """

    def __init__(
        self,
        module: nn.Module,
        exported: Mapping[str, nn.Module],
        dtypes: list[torch.dtype],
        tested: Mapping[str, str],
    ) -> None:
        self._exported = [(path, each, Attributes(each)) for path, each in exported.items()]
        self._model, self._watched = module, cast(Watched | None, None)
        self._name = type(module).__name__
        self._dtypes = [
            (each._parameters, name, parameter.dtype)
            for each in module.modules()
            if not isinstance(each, torch.jit.ScriptModule)
            for name, parameter in each._parameters.items()
            if parameter is not None
        ]
        self._of_inputs, self._tested = dtypes, tested
        names: dict[int, list[tuple[str, dict[str, Any], str]]] = {}
        for path, each in exported.items():
            for tensors in (each._parameters, each._buffers):
                for name, tensor in tensors.items():
                    names.setdefault(id(tensor), []).append((f"{path}.{name}".lstrip("."), tensors, name))
        self._ties = [tied for tied in names.values() if len(tied) > 1 and tied[0][1].get(tied[0][2]) is not None]
        self._autocast = {kind: autocast_dtype(kind) for kind in device_kinds(module)}
        self._defaults = torch.get_default_dtype(), torch.get_default_device()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": None}

    def check(self, inputs: Iterable[Any]) -> None:
        """Raises RuntimeError if a call of the sequence with some tensors would not compute what the model does."""
        known = self._watched is not None and self._watched.is_same()
        for path, module, attributes in () if known else self._exported:
            if _module_at(path, self._model) is not module:
                raise RuntimeError(
                    f"'{path}' of the model was replaced since the conversion; change the model first, then convert it and make "
                    "the pipeline"
                )
            if difference := attributes.difference(module):
                raise RuntimeError(
                    f"{repr(path) if path else 'the model'} ({type(module).__name__}) has changed since the conversion: "
                    f"{difference}, which its exported code may read; change the model first, then convert it"
                )
        for (first, tensors, name), *others in self._ties:
            for other, its_tensors, its_name in others:
                if its_tensors.get(its_name) is not tensors.get(name):
                    raise RuntimeError(
                        f"'{first}' and '{other}' of the model ({self._name}) are no longer one tensor, as they were at the "
                        "conversion; change the model first, then convert it"
                    )
        # A forward that was replaced may be there only while it runs.
        if not known and all(attributes.has_forward(module) for _, module, attributes in self._exported):
            self._watched = Watched(self._exported)
        for about in self._differing([each for each in inputs if isinstance(each, Tensor)]):
            if reason := self._tested.get(about, "it was not converted so"):
                raise RuntimeError(
                    f"the layers of the model ({self._name}) may not compute {about} what it does: {reason}; convert the model as "
                    "it is used, or move the code to a submodule that the model calls once, which is kept whole"
                )

    def _differing(self, inputs: list[Tensor]) -> Iterator[str]:
        """Yields in what a call differs from the conversion."""
        if (torch.get_default_dtype(), torch.get_default_device()) != self._defaults:
            yield "with another default dtype or device"
        for parameters, name, dtype in self._dtypes:
            parameter = parameters.get(name)
            if parameter is not None and parameter.dtype != dtype:
                yield f"with parameters of {parameter.dtype}"
        for kind, of_kind in self._autocast.items():
            if (now := autocast_dtype(kind)) != of_kind:
                yield f"under autocast to {now} on {kind}" if now else f"without autocast on {kind}"
        for tensor, dtype in zip(inputs, self._of_inputs):
            if tensor.dtype != dtype:
                yield f"for inputs of {tensor.dtype}"
        if torch.is_inference_mode_enabled():
            yield "in inference mode"
        elif not torch.is_grad_enabled():
            yield "without grad mode"
        elif any(each.requires_grad for each in inputs):
            yield "for inputs that require grad"
        if not all(each.is_contiguous() for each in inputs):
            yield "for inputs that are not contiguous"


def device_kinds(module: nn.Module) -> list[str]:
    return sorted({"cpu", *(parameter.device.type for parameter in module.parameters())} - {"meta"})
