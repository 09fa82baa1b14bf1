"""What a conversion takes for granted, and the checks of it: of a module's attributes, of modes of torch, and of behaviour.

An export sees one run. So the conversion compares the model with its sequence in the modes of torch that calls may have, and
each call compares the model with what it was.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe import _C
from gpipe.exported.blocks import Calls, autocast_dtype
from gpipe.exported.exporter import mode, unchanged
from gpipe.generators import GeneratorState, is_generator

_OF_MODULES = {*vars(nn.Module()), "_compiled_call_impl"}  # compile() changes no result
_HOOKS = [name for name in _OF_MODULES if name.endswith("_hooks") and "_state_dict" not in name]
_NAMED = "_parameters", "_buffers", "_modules"
_VALUES = bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None)


class Attributes:
    """What the code of a module may read from it: attributes, hooks, names of tensors, class, and states of generators."""

    def __init__(self, module: nn.Module) -> None:
        self._class = type(module)
        self._plain = {name: _frozen(value) for name, value in vars(module).items() if name not in _OF_MODULES}
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
        new = {name for name in now.keys() - _OF_MODULES - self._plain.keys() if added or hasattr(self._class, name)}
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
    return space, [name for name in code.co_names if name in space] if code else []


def _is_object(value: object) -> bool:
    return not callable(value) and not isinstance(value, ModuleType)


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
        self._tables = [vars(each)[name] for each in self._modules for name in _HOOKS]
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
        self._watched: Watched | None = None
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


class Twins:
    """A model and its sequence, which ``call`` calls with the model's arguments. Compares outputs, gradients and buffers.
    ``calls`` were recorded with ``arguments``; the ``blocks`` of both repeat these, so that comparisons cost little."""

    def __init__(
        self, module: nn.Module, call: Callable[[Any, Any], Any], calls: Calls, blocks: Iterable[nn.Module], arguments: Any
    ) -> None:
        self._module, self._call, self._calls, self._blocks, self._arguments = module, call, calls, list(blocks), arguments
        self._given = False  # whether blocks ignore tensors that only the sequence gives them
        inside = {id(tensor) for block in self._blocks for tensor in (*block.parameters(), *block.buffers())}
        tensors = (tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in inside)
        self._has_own_floats = any(tensor.is_floating_point() for tensor in tensors)

    def _difference(
        self, arguments: Any, calls: int = 1, dtype: torch.dtype | None = None, *, replay: bool = True, **tolerance: Any
    ) -> str:
        with self._calls.replayed(self._blocks if replay else [], dtype, given=self._given) as probes:
            ours = _behaviour(self._module, arguments, lambda args, kwargs: self._module(*args, **kwargs), calls, probes)
            return _difference(ours, _behaviour(self._module, arguments, self._call, calls, probes), **tolerance)

    def take(self) -> bool:
        """Returns whether the sequence takes the sizes of the arguments."""
        with self._calls.replayed(self._blocks) as probes:
            theirs = _behaviour(self._module, self._arguments, self._call, 1, probes)
        return not (isinstance(theirs, ValueError) and "the model was converted for inputs with" in str(theirs))

    def agree(self, arguments: Any) -> bool:
        """Returns whether both do the same, or raise, in training and in evaluation mode."""
        reasons = []
        for training in (True, False):
            with mode(self._module, training):
                reasons.append(self._difference(arguments))
        return not any(reasons)

    def compared(self) -> dict[str, str]:
        """Compares both in the present modes, in training and in evaluation mode, and in each mode of torch that calls may
        have. Returns how they differ in modes of torch, as :class:`Guards` takes it. Raises ValueError if they differ as they
        are called now."""
        module, arguments = self._module, self._arguments
        modes: list[Callable[[], AbstractContextManager[None]]] = [lambda: mode(module, True), lambda: mode(module, False)]
        if len({each.training for each in module.modules()}) == 2:
            modes.insert(0, nullcontext)
        for context in modes:
            with context():
                reason = self._difference(arguments, calls=2)
                if self._blocks and (reason or self._given):  # an export may call them with a mask that the model leaves out
                    reason, self._given = self._difference(arguments, calls=2, replay=False), True
                    if self._difference(arguments):
                        self._blocks = []
                if reason:
                    name = type(module).__name__
                    raise ValueError(f"cannot convert the model ({name}): its layers would not do what it does: {reason}")
        with_grad = tree_map_only(Tensor, lambda each: copy_of(each).requires_grad_(each.is_floating_point()), arguments)
        strided = tree_map_only(Tensor, _strided, arguments)
        settings: dict[str, tuple[Callable[[], AbstractContextManager[object]], Any]] = {
            "without grad mode": (torch.no_grad, arguments),
            "in inference mode": (torch.inference_mode, arguments),
            "for inputs that require grad": (nullcontext, with_grad),
            "for inputs that are not contiguous": (nullcontext, strided),
        }
        for kind in device_kinds(module):
            if now := autocast_dtype(kind):
                settings[f"without autocast on {kind}"] = partial(torch.autocast, kind, enabled=False), arguments
            for dtype in {torch.bfloat16, *(() if kind == "cpu" else (torch.float16,))} - {now}:
                settings[f"under autocast to {dtype} on {kind}"] = partial(torch.autocast, kind, dtype), arguments
        for dtype in _FLOATS | _INTEGERS:
            others = tree_map_only(Tensor, partial(_of_dtype, dtype), arguments)
            settings[f"for inputs of {dtype}"] = nullcontext, others
        tested = {}
        for about, (setting, given) in settings.items():
            reasons = []
            for training in (True, False):
                with setting(), mode(module, training):
                    if "autocast" in about and self._blocks and training:
                        self._record()
                    reasons.append(self._difference(given))
                    if "autocast" in about and self._given and self._blocks:  # rounding differs, so only shapes and types
                        reasons.append(self._difference(given, replay=False, atol=math.inf, rtol=0))
            tested[about] = next(filter(None, reasons), "")
        if self._blocks and not self._given and not self._has_own_floats:
            for dtype in _FLOATS - {torch.uint8}:
                cast = tree_map_only(Tensor, partial(_float_of, dtype), arguments)
                with unchanged(module):
                    _pretend(module, dtype)
                    tested[f"with parameters of {dtype}"] = self._difference(cast, dtype=dtype)
        return tested

    def _record(self) -> None:
        """Records what the blocks return under the present autocast, unless the model raises."""
        with unchanged(self._module), self._calls.recorded(self._module), torch.no_grad(), suppress(Exception):
            args, kwargs = tree_map_only(Tensor, copy_of, self._arguments)
            self._module(*args, **kwargs)


def _float_of(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _pretend(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a model, whose blocks are not called, parameters and buffers of a dtype, without memory."""
    for each in module.modules():
        of_each: Any = () if isinstance(each, torch.jit.ScriptModule) else (each._parameters, each._buffers)
        for tensors in of_each:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point():
                    other = torch.zeros((), dtype=dtype, device=tensor.device).expand(tensor.shape)
                    tensors[name] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}  # that inputs of floats may become
_INTEGERS = {torch.uint8, torch.int32, torch.int64}


def _of_dtype(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Returns a tensor with a dtype, if a user may give it with that too."""
    kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
    return tensor.detach().to(dtype) if dtype in kinds and tensor.dtype in kinds else tensor


def _strided(tensor: Tensor) -> Tensor:
    return tensor.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(tensor.requires_grad)


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def _behaviour(module: nn.Module, arguments: Any, call: Callable[[Any, Any], Any], calls: int, probes: list[Tensor]) -> dict[str, Any] | Exception:
    """Returns what calls of a model or sequence in a row return, with gradients, and leave in buffers, by name; or the
    exception that they raise."""
    found: dict[str, Any] = {}
    leaves: list[list[Tensor]] = []  # of each call, without parameters and inputs
    with unchanged(module, seed=0):
        for number in ("", " of a second call")[:calls]:
            own = tree_map_only(Tensor, copy_of, arguments)  # which the model may change
            try:
                outputs = tree_leaves(call(*own))
            except Exception as error:
                return error
            found |= {f"output {index}{number}": output for index, output in enumerate(outputs)}
            wanted: dict[str, Tensor] = {f"the gradient of '{name}'": each for name, each in module.named_parameters() if each.requires_grad}
            wanted |= {f"the gradient of a block's output {index}": each for index, each in enumerate(probes)}
            wanted |= {f"the gradient of input {index}": each for index, each in enumerate(tree_leaves(own)) if _needs_grad(each)}
            roots = [each for each in outputs if _needs_grad(each)]
            leaves.append([each for each in _leaves_of(roots) if all(each is not other for other in wanted.values())])
            for index, each in enumerate(leaves[-1]):  # those of one call may be made in it
                if any(each is other for other in leaves[0]) and number:
                    wanted[f"the gradient of tensor {index} that requires grad and that no module has registered"] = each
            if roots and wanted and len(leaves) == calls:
                given = [torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype, device=each.device).view(each.shape) for each in roots]
                found.update(zip(wanted, torch.autograd.grad(roots, [*wanted.values()], given, allow_unused=True)))
            found |= {f"buffer '{name}'{number}": buffer.clone() for name, buffer in module.named_buffers()}
    return found


def _leaves_of(roots: list[Tensor]) -> Iterator[Tensor]:
    """Yields the leaves of the autograd graph of some tensors."""
    nodes: list[Any] = [each.grad_fn for each in roots]
    seen: set[Any] = {None}
    for node in nodes:  # which grows
        if node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


def _needs_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def _difference(ours: Any, theirs: Any, **tolerance: Any) -> str:
    """Returns the first difference of two behaviours; an empty text if there is none. Both may raise."""
    if isinstance(ours, Exception):
        return "" if isinstance(theirs, Exception) else f"the model raises {type(ours).__name__}, the layers do not"
    if isinstance(theirs, _C.ModeError):
        return ""  # calls raise it too
    if isinstance(theirs, Exception):
        return f"the layers raise {type(theirs).__name__}: {theirs}"
    for name in ours | theirs:
        mine, other = ours.get(name), theirs.get(name)
        tensors = isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.layout == other.layout == torch.strided
        if tensors and (mine.dtype, mine.device) == (other.dtype, other.device) and torch.equal(mine, other):
            continue  # assert_close() takes ten times as long
        try:
            torch.testing.assert_close(mine, other, equal_nan=True, **tolerance)
        except (AssertionError, TypeError) as error:
            return f"{name} differs: {next(line for line in str(error).splitlines() if line.strip())}"
    return ""


def prove_batch(module: nn.Module, arguments: Any, output: Any, calls: Calls) -> None:
    """Raises ValueError if what a model returns for a sample depends on the other samples, so that dimension 0 is not the batch.
    ``output`` is that of evaluation mode. Lets batch norm without running statistics through, and random outputs. Adds the
    shapes for fewer samples to ``calls``."""

    def outputs(begin: int, end: int, runs: int = 1) -> list[Tensor]:
        with unchanged(module, seed=0):
            for _ in range(runs):
                args, kwargs = tree_map_only(Tensor, lambda each: each[begin:end].clone(), arguments)
                leaves = tree_leaves(module(*args, **kwargs))
        return [each.detach() for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]

    samples = len(next(each for each in tree_leaves(arguments) if isinstance(each, Tensor)))
    close = partial(torch.testing.assert_close, rtol=1e-2, atol=1e-3, equal_nan=True, check_stride=False)
    part = max(samples // 2, min(2, samples - 1))  # code may treat one sample differently
    with mode(module, False):  # with grad mode, as for ``output``: code and kernels may differ without
        try:
            with (few := Calls()).recorded(module):
                parts = [outputs(0, part), outputs(samples - part, samples)]
        except Exception:  # for so few samples, or the export explains it
            return
    calls.fewer = few.shapes
    if any(isinstance(each, _NormBase) and each.running_mean is None for each in module.modules()):
        return
    whole = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
    for number, (output, first, last) in enumerate(zip(whole, *parts)):
        rows = first.shape[0] if first.dim() else 0
        if rows == 0 or rows * samples != output.shape[0] * part:
            continue  # it is named later
        try:
            close(output[:rows], first)
            close(output[-rows:], last)
        except AssertionError:
            with mode(module, False):
                random = not torch.equal(outputs(0, samples, runs=2)[number], output)  # maybe by a generator of its own
            if random:
                return
            raise ValueError(
                f"cannot convert the model: output {number} for one sample depends on the other samples of the mini-batch, which a "
                "pipeline cuts along dimension 0; give the batch as dimension 0 (batch_first=True), or batch_dim=1, and compute losses "
                "and statistics over samples in the loss function"
            ) from None
