"""What a conversion takes for granted, and what each call checks of it: modules' attributes, and modes of torch."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpipe.exported.blocks import autocast_dtype
from gpipe.exported.exporter import OF_MODULES
from gpipe.exported.read import Place, Read, can_change, noted, same

_GLOBAL_HOOKS: list[dict[int, Any]] = [
    hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global") and name.endswith(("ward_hooks", "_pre_hooks"))
]
_HOOKS = [name for name in OF_MODULES if name.endswith("_hooks") and "_state_dict" not in name]
_NAMED = "_parameters", "_buffers", "_modules"


class Attributes:
    """What the code of a module may read from it: attributes, hooks, names of tensors, class, and states of generators."""

    def __init__(self, module: nn.Module) -> None:
        self._class = type(module)
        self._plain = {name: noted(value) for name, value in vars(module).items() if name not in OF_MODULES}
        self._hooks = {name: list(vars(module)[name].values()) for name in _HOOKS}
        self._names = {kind: list(getattr(module, kind)) for kind in _NAMED}

    def has_forward(self, module: nn.Module) -> bool:
        """Returns whether the forward() of a module was not replaced."""
        return "forward" in self._plain or "forward" not in vars(module)

    def changing(self) -> Iterator[tuple[str, Any]]:
        """Yields the names of the attributes in which something can change, each as :func:`noted` returns it."""
        return ((name, before) for name, before in self._plain.items() if can_change(before))

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
            if name not in now or name in new or not same(self._plain[name], now[name]):
                return f"its attribute '{name}'"
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


def _global_hooks() -> list[list[Any]]:
    return [list(hooks.values()) for hooks in _GLOBAL_HOOKS]


def _module_at(path: str, model: nn.Module) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


class Watched:
    """Tells fast that no object which :class:`Attributes` compares was replaced, and nothing in them has changed."""

    def __init__(
        self, exported: Iterable[tuple[str, nn.Module, Attributes]], read: Mapping[str, Place]
    ) -> None:
        self._modules = [module for _, module, _ in exported]
        self._attributes = [(vars(each), itemgetter(*vars(each).keys() - {"training"})) for each in self._modules]
        self._changing: list[tuple[Mapping[str, Any], str, Any]]
        self._changing = [(vars(module), *each) for _, module, attributes in exported for each in attributes.changing()]
        self._names = [vars(each)[name] for each in self._modules for name in _NAMED]
        self._read = [(table, name) for _, table, name in read.values()]
        self._changing += [(table, name, before) for value, table, name in read.values() if can_change(before := noted(value))]
        self._tables = [vars(each)[name] for each in self._modules for name in (*_HOOKS, "_modules")]
        self._objects, self._sizes = list(self._now()), [len(table) for table, _ in self._attributes]

    def _now(self) -> Iterator[object]:
        values = map(dict.values, filter(None, self._tables))
        return chain(
            map(type, self._modules),
            chain.from_iterable(of(table) for table, of in self._attributes),
            chain.from_iterable((*values, *self._names)),
            (table.get(name) for table, name in self._read),
        )

    def is_same(self) -> bool:
        """Returns whether all is as at first."""
        if [len(table) for table, _ in self._attributes] != self._sizes:
            return False
        with suppress(KeyError):  # of an attribute that was deleted
            now = list(self._now())
            unchanged = len(now) == len(self._objects) and all(map(is_, now, self._objects))
            return unchanged and all(same(before, table[name]) for table, name, before in self._changing)
        return False


def effects_on(modules: Iterable[nn.Module]) -> Callable[[], dict[nn.Module, str]]:
    """Returns a function that tells what has changed in modules, except values of tensors."""

    def shapes(each: nn.Module) -> dict[str, torch.Size]:
        return {name: buffer.shape for name, buffer in each.named_buffers(recurse=False)}

    plain = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    before = [(each, Attributes(each), shapes(each), each.training) for each in plain]

    def effects() -> dict[nn.Module, str]:
        found = {}
        for each, attributes, had, training in before:
            other = "its mode" * (each.training != training) or "the shape of a buffer" * (shapes(each) != had)
            if text := attributes.difference(each, added=True) or other:
                found[each] = text
        return found

    return effects


def changes_in(modules: Mapping[str, nn.Module], read: Read) -> Callable[[], dict[str, str]]:
    """Returns a function that tells what has changed in modules, except values of tensors, and in what is read."""
    effects = effects_on(modules.values())
    values = {place: noted(each.value) for place, each in read.values({}).items()}

    def changes() -> dict[str, str]:
        found = effects()
        now = read.values({})
        changed = {place for place, value in values.items() if place not in now or not same(value, now[place].value)}
        own = {f"a change of '{path}'": found.get(each, "") for path, each in modules.items()}
        return own | {f"a change of '{place}'": "a global" for place in changed}

    return changes


class Guards:
    """Refuses calls of a sequence for which its conversion does not hold.

    Args:
        module: the model.
        exported: the modules whose code was exported, by path.
        dtypes: of the model's input tensors.
        tested: the modes of torch in which the sequence was compared with the model: an empty text, or how they differ.
        read: what their code reads by name.
        deciding: the modules whose modes decide what the exported code computes, and their modes in the exports of
            training and of evaluation mode.
    """

    def __init__(
        self,
        module: nn.Module,
        exported: Mapping[str, nn.Module],
        dtypes: list[torch.dtype],
        tested: Mapping[str, str],
        read: Read,
        deciding: Sequence[nn.Module] = (),
        decided: Sequence[list[bool]] = (),
    ) -> None:
        self._deciding, self._decided = deciding, decided
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
        self._read, self._global_hooks = read, _global_hooks()
        self._values = {place: noted(each.value) for place, each in read.values(self._modules()).items()}
        names: dict[int, list[tuple[str, dict[str, Any], str]]] = {}
        for path, each in exported.items():
            for tensors in (each._parameters, each._buffers):
                for name, tensor in tensors.items():
                    names.setdefault(id(tensor), []).append((f"{path}.{name}".lstrip("."), tensors, name))
        self._ties = [tied for tied in names.values() if len(tied) > 1 and tied[0][1].get(tied[0][2]) is not None]
        self._autocast = {kind: autocast_dtype(kind) for kind in device_kinds(module)}
        inner = chain.from_iterable(each.children() for each in exported.values())
        self._with_modes = list(dict.fromkeys([*exported.values(), *inner]))
        self._modes = [each.training for each in self._with_modes]
        self._defaults = torch.get_default_dtype(), torch.get_default_device()

    def _modules(self) -> dict[str, nn.Module]:
        return {path: module for path, module, _ in self._exported}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": None}

    def check_model(self) -> None:
        """Raises RuntimeError if something has changed since the conversion that the exported code of the model reads."""
        known = self._watched is not None and self._watched.is_same()
        present = {} if known else self._read.values(self._modules())
        for place, value in self._values.items() if not known else ():
            if place not in present or not same(value, present[place].value):
                raise RuntimeError(
                    f"'{place}' has changed since the conversion of the model ({self._name}), and its exported code reads it; "
                    "change it first, then convert the model"
                )
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
            self._watched = Watched(self._exported, self._read.values(self._modules()))

    def check(self, inputs: Iterable[Any]) -> None:
        """Raises RuntimeError if a call of the sequence with some tensors would not compute what the model does."""
        self.check_model()
        for about in self._differing([each for each in inputs if isinstance(each, Tensor)]):
            if reason := self._tested.get(about, "it was not converted so"):
                raise RuntimeError(
                    f"the layers of the model ({self._name}) may not compute {about} what it does: {reason}; convert the model as "
                    "it is used, or move the code to a submodule that the model calls once, which is kept whole"
                )

    def _differing(self, inputs: list[Tensor]) -> Iterator[str]:
        """Yields in what a call differs from the conversion."""
        if self._global_hooks != _global_hooks():
            yield "with other hooks of all modules"
        if (torch.get_default_dtype(), torch.get_default_device()) != self._defaults:
            yield "with another default dtype or device"
        for parameters, name, dtype in self._dtypes:
            parameter = parameters.get(name)
            if parameter is not None and parameter.dtype != dtype:
                yield f"with parameters of {parameter.dtype}"
        if self._deciding and [each.training for each in self._deciding] != self._decided[0 if self._model.training else 1]:
            yield "with modules in other modes than at the conversion"
        modes = [each.training for each in self._with_modes]
        if True in modes and False in modes and modes != self._modes:
            yield "with modules in different modes"
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
