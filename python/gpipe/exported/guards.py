"""What a conversion takes for granted, and what each call checks of it: modules' attributes, and modes of torch."""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.exported.blocks import autocast_dtype
from gpipe.exported.exporter import OF_MODULES
from gpipe.exported.read import OF_TENSORS, Gone, Read, can_change, noted, same

_GLOBAL_HOOKS: list[dict[int, Any]] = [
    hooks
    for name, hooks in vars(nn.modules.module).items()
    if name.startswith("_global") and name.endswith(("ward_hooks", "_pre_hooks"))
]
_OF_OTHERS = " has changed since the conversion"  # ends the names of facts that are outside of modules
_TABLES = [name for name in OF_MODULES if name.endswith("_hooks") and "_state_dict" not in name]
_TABLES += ["_parameters", "_buffers", "_modules"]


Facts = dict[str, Callable[[], Any]]  # the name of a fact in messages, and a function that returns it


def facts_of(module: nn.Module, inherited: Iterable[str] = ()) -> Facts:
    """Returns what the code of a module may read from it: its class, attributes, hooks, and names of tensors and modules."""
    own = vars(module)
    facts: Facts = {"its class": partial(type, module)}
    facts |= {f"its attribute '{name}'": partial(own.get, name, Gone) for name in (*own, *inherited) if name not in OF_MODULES}
    return facts | {f"its {name.strip('_').replace('_', ' ')}": partial(_keys, own, name) for name in _TABLES}


def _keys(own: Mapping[str, Any], table: str) -> str:
    return "\n".join(map(str, own[table])) if own[table] else ""  # no two hooks share an id


def _inherited(kind: type[nn.Module]) -> list[str]:
    """Returns the names of what a class has, which attributes of a module may hide."""
    names = {name for base in kind.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    return [name for name in {*names, "forward"} if not name.startswith("__")]


def changes_in(modules: Mapping[str, nn.Module], read: Read) -> Callable[[], set[tuple[str, str]]]:
    """Returns a function that tells what has changed in modules, except values of tensors, and in what is read: tuples of a path,
    or where it is read, and a fact."""

    def facts() -> dict[tuple[str, str], Any]:
        found = {(f"'{where}'", "a global"): get() for where, get in read.places({}).items()}
        for path, each in modules.items():
            if not isinstance(each, torch.jit.ScriptModule):
                shapes = [buffer.shape for buffer in each.buffers(recurse=False)]
                found |= {(path, "its mode"): each.training, (path, "the shape of a buffer"): shapes}
                found |= {(path, what): get() for what, get in facts_of(each).items()}
        return found

    before = {fact: noted(value, may_grow=fact[1] == "a global") for fact, value in facts().items()}

    def changes() -> set[tuple[str, str]]:
        now = facts()
        return {fact for fact in before | now if not same(before.get(fact, (Gone, None)), now.get(fact, Gone))}

    return changes


def _runs(function: Any) -> bool:
    """Returns whether a function, or one that it wraps, runs on this thread."""
    codes = {getattr(each, "__code__", None) for each in (function, inspect.unwrap(function))}
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _global_hooks() -> list[list[Any]]:
    return [list(hooks.values()) for hooks in _GLOBAL_HOOKS]


class Guards:
    """Refuses calls of a sequence for which its conversion does not hold.

    Args:
        module: the model.
        exported: the modules whose code was exported, by path.
        dtypes: of the model's input tensors.
        tested: the modes of torch in which the sequence was compared with the model: an empty text, or how they differ.
        read: what their code reads by name.
        effects: what forwards change, as :func:`changes_in` tells.
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
        effects: Container[tuple[str, str]],
        deciding: Sequence[nn.Module],
        decided: Sequence[list[bool]],
    ) -> None:
        self._model, self._exported, self._read, self._effects = module, dict(exported), read, effects
        self._deciding, self._decided = deciding, decided
        self._dtypes = [
            (each._parameters, name, parameter.dtype)
            for each in module.modules()
            if not isinstance(each, torch.jit.ScriptModule)
            for name, parameter in each._parameters.items()
            if parameter is not None
        ]
        self._of_inputs, self._tested, self._global_hooks = dtypes, tested, noted(_global_hooks())
        names: dict[int, list[tuple[str, dict[str, Any], str]]] = {}
        for path, each in exported.items():
            for table in (each._parameters, each._buffers, each._modules):
                for name, value in table.items():
                    names.setdefault(id(value), []).append((f"{path}.{name}".lstrip("."), table, name))
        self._ties = [tied for tied in names.values() if len(tied) > 1 and tied[0][1].get(tied[0][2]) is not None]
        self._autocast = {kind: autocast_dtype(kind) for kind in device_kinds(module)}
        inner = chain.from_iterable(each.children() for each in exported.values())
        self._with_modes = list(dict.fromkeys([*exported.values(), *inner]))
        self._modes = [each.training for each in self._with_modes]
        self._defaults = torch.get_default_dtype(), torch.get_default_device()
        facts = self._facts()
        self._before = {what: noted(get(), what.endswith(_OF_OTHERS)) for what, get in facts.items()}
        # Of each fact its name, a function that returns it, the value seen, at first ``self``, and whether it can change.
        self._watched: list[list[Any]] = [[what, get, self, True] for what, get in facts.items()]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": []}

    def _facts(self) -> Facts:
        """Returns what the exported code of the model may read, except values of tensors."""
        facts: Facts = {f"'{place}'{_OF_OTHERS}": get for place, get in self._read.places(self._exported).items()}
        for path, each in self._exported.items():
            outer, _, name = path.rpartition(".")
            if path:
                child = partial(self._exported[outer]._modules.get, name)
                facts[f"'{path}' of the model was replaced since the conversion"] = child
            who = f"{repr(path) if path else 'the model'} ({type(each).__name__})"
            own = facts_of(each, _inherited(type(each)))
            own["attributes that it lacked"] = partial(_added, vars(each), {*vars(each)}, self._read.names - OF_TENSORS)
            for table in (each._parameters, each._buffers):
                own |= {f"the shape of its '{name}'": partial(_shape_of, table, name) for name in table}
            facts |= {f"{who} has changed since the conversion: {what}": get for what, get in own.items()}
        facts |= self._facts_of_blocks()
        for (first, table, name), *others in self._ties:
            for other, its_table, its_name in others:
                what = f"'{first}' and '{other}' of the model ({type(self._model).__name__}) are no longer the same"
                facts[what] = partial(_are_one, table, name, its_table, its_name)
        return facts

    def _facts_of_blocks(self) -> Facts:
        """Returns what the exported code may read of modules that are kept whole, and of parameters: what it names, unless forwards
        change it."""
        facts: Facts = {}
        for path, each in self._model.named_modules():
            has_changed = f"{repr(path) if path else 'the model'} ({type(each).__name__}) has changed since the conversion:"
            if path not in self._exported and not isinstance(each, torch.jit.ScriptModule):
                own = vars(each)
                for name in self._read.names & {*own, *_inherited(type(each))} - OF_MODULES - {"forward"}:
                    if (path, what := f"its attribute '{name}'") not in self._effects:
                        facts[f"{has_changed} {what}"] = partial(own.get, name, Gone)
            if "requires_grad" in self._read.names:
                for name in each._parameters:
                    facts[f"{has_changed} requires_grad of its '{name}'"] = partial(_needs_grad, each._parameters, name)
        return facts

    def check_model(self) -> None:
        """Raises RuntimeError if something has changed since the conversion that the exported code of the model reads."""
        if not self._watched:  # in a copy: another process may not have filled a global yet, such as a dict of classes
            self._watched = [[what, get, self, True] for what, get in self._facts().items() if what in self._before]
        for fact in self._watched:
            what, get, value, changes = fact
            now = get()
            if now is value and not changes:
                continue
            if same(self._before[what], now):
                if value is self:
                    fact[2:] = now, can_change(now)
                continue
            if same(self._before[what], Gone) and what.endswith("'forward'") and _runs(now):  # and calls the pipeline
                continue
            raise RuntimeError(
                f"{what}, and the exported code of the model ({type(self._model).__name__}) may depend on it; change the model "
                "first, then convert it and make the pipeline"
            )

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError if a call of the sequence with some tensors would not compute what the model does."""
        self.check_model()
        for about in self._differing(inputs):
            if reason := self._tested.get(about, "it was not converted so"):
                raise RuntimeError(
                    f"the layers of the model ({type(self._model).__name__}) may not compute {about} what it does: {reason}; "
                    "convert the model as it is used, or move the code to a submodule that the model calls once, which is kept "
                    "whole"
                )

    def _differing(self, inputs: Sequence[Tensor]) -> Iterator[str]:
        """Yields in what a call differs from the conversion."""
        if not same(self._global_hooks, _global_hooks()):
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
        if any(each.requires_grad for each in inputs):
            yield "for inputs that require grad"
        if not all(each.is_contiguous() for each in inputs):
            yield "for inputs that are not contiguous"


def device_kinds(module: nn.Module) -> list[str]:
    return sorted({"cpu", *(parameter.device.type for parameter in module.parameters())} - {"meta"})


def _added(own: Mapping[str, Any], before: Set[str], read: Set[str]) -> str:
    return "" if len(own) <= len(before) else " ".join(sorted((own.keys() - before) & read))


def _shape_of(tensors: Mapping[str, Any], name: str) -> int:
    return hash(getattr(tensors.get(name), "shape", (-1,)))  # compared faster than the shape


def _needs_grad(parameters: Mapping[str, Any], name: str) -> bool:
    return getattr(parameters.get(name), "requires_grad", False)


def _are_one(first: Mapping[str, Any], name: str, second: Mapping[str, Any], other: str) -> bool:
    return first.get(name) is second.get(other)
