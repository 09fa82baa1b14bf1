"""Calls torch.export for any number of samples or any sizes, without its output, with an error that tells the module."""

import functools
import importlib
import inspect
import logging
import re
import threading
import traceback
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from gpipe.loss_state import put_back
from gpipe.randomness import GeneratorState, is_generator


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets the mode of a module and all its submodules for a block. A module in training mode stays as it is, with submodules in
    evaluation mode. Calls each ``train()`` that does more than set the mode."""
    named = sorted(module.named_modules(remove_duplicate=False), key=lambda each: len(each[0] and each[0].split(".")))
    modes = {each: each.training for _, each in reversed(named)}  # inner modules first
    try:
        if not training or not module.training or all(modes.values()):
            module.train(training)
        yield
    finally:
        for each, was in reversed(modes.items()):
            if was == training == each.training:
                continue
            if getattr(each.train, "__func__", None) is nn.Module.train:
                each.training = was  # without the submodules, whose modes may differ
            else:
                each.train(was)


OF_MODULES = {*vars(nn.Module()), "_compiled_call_impl"}  # attributes of any module; compile() changes no result
_PLAIN = {bool, int, float, str, type(None)}
_CHANGING = {list, dict, set, deque, Counter, OrderedDict, defaultdict}


def _hold(value: Any, held: list[tuple[Any, Any]]) -> None:
    """Adds to ``held`` an object and the containers and tensors in it, each with a copy of what can change in it."""
    if type(value) in _CHANGING:
        held.append((value, value.copy()))
    if type(value) in {tuple, *_CHANGING}:
        for each in value.values() if isinstance(value, dict) else value:
            _hold(each, held)
    elif type(value) is Tensor and not value.is_inference():
        held.append((value, value.detach().clone()))


@contextmanager
def unchanged(
    modules: Iterable[nn.Module], seed: int | None = None, *, values: bool = False, variables: Iterable[functools.partial[Any]] = ()
) -> Iterator[None]:
    """Restores attributes and tensors of modules, buffers' values, ``variables``, as functions that return them, and random
    numbers after a block, which runs from a seed if one is given. With ``values``, restores parameters' values too. A forward may
    set attributes and globals, an export to fake tensors."""
    modules = list(modules)
    tensors = {each: None for module in modules for each in (*module.parameters(False), *module.buffers(False))}
    kept = (each for each in tensors if not is_lazy(each) and (values or not isinstance(each, nn.Parameter)))
    saved = [(tensor, tensor.detach().clone()) for tensor in kept]
    devices = {each.device for each in tensors if each.is_cuda}
    plain = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    held: list[tuple[Any, Any]] = [(vars(each), dict(vars(each))) for each in plain if not isinstance(each, LazyModuleMixin)]
    attributes = [each for _, own in held for name, each in own.items() if name not in OF_MODULES and type(each) not in _PLAIN]
    held += [(table, dict(table)) for each in plain for table in (each._parameters, each._buffers)]
    before = [(get, get()) for get in variables]
    for value in (*attributes, *(value for _, value in before)):
        _hold(value, held)
    generators = GeneratorState(filter(is_generator, attributes))
    with torch.random.fork_rng(devices):
        if seed is not None:  # torch.manual_seed() would seed devices that are not restored
            for generator in (torch.default_generator, *(torch.cuda.default_generators[each.index] for each in devices)):
                generator.manual_seed(seed)
        try:
            yield
        finally:
            for get, value in before:
                table = getattr(get.func, "__self__", None)
                if isinstance(table, dict) and get() is not value:
                    table[get.args[0]] = value
            for value, copy in (*held, *saved):
                if isinstance(value, dict):
                    value.clear()
                    value.update(copy)
                elif not isinstance(value, Tensor):
                    put_back(value, copy)
                elif not value.is_meta and not torch.equal(value, copy):  # guards see each write
                    with torch.no_grad():
                        value.copy_(copy)
            generators.restore()


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, any_shape: bool
) -> ExportedProgram:
    """Exports a module in its present mode, for any number of samples. With ``any_shape``, also for other sizes where its code
    allows them. Raises NotExported."""
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor):
            shapes[tensor] = {0: Dim.DYNAMIC} | dict.fromkeys(range(1, tensor.dim() if any_shape else 1), Dim.AUTO)
    try:
        few_guards = _few_guards() if any_shape else nullcontext()
        with _silence(), unchanged(module.modules()), _named_arguments(module, kwargs), _symbolic_lengths(module), few_guards:
            return export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise _explained(module, error) from error


def _named_arguments(module: nn.Module, kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Makes ``forward`` name its arguments for a block: torch.export cannot tell the shapes of ``**kwargs``."""
    signature = inspect.signature(module.forward)
    parameters = {each.name: each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD}
    for name in kwargs:
        parameters.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
    named = functools.partial(module.forward)
    named.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return patch.object(module, "forward", named)


@contextmanager
def _symbolic_lengths(module: nn.Module) -> Iterator[None]:
    """Makes ``len()`` in the files of a model's modules return the symbolic size of a tensor: the built-in one would fix it."""

    def length(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else len(value)

    plain = (each for each in module.modules() if not isinstance(each, torch.jit.ScriptModule))
    functions = (inspect.unwrap(each.__class__.forward) for each in plain)
    spaces = {getattr(each, "__module__", None) or "": getattr(each, "__globals__", {}) for each in functions}
    changed = [space for name, space in spaces.items() if name.partition(".")[0] != "torch" and "len" not in space]
    for space in changed:
        space["len"] = length
    try:
        yield
    finally:
        for space in changed:
            del space["len"]


@contextmanager
def _silence() -> Iterator[None]:
    """Drops what torch prints, warns and logs about an export on the calling thread: the error tells what matters."""
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.WARNING

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    trace = importlib.import_module("torch.export._trace")  # takes a second, so only here
    for handler in handlers:
        handler.addFilter(is_kept)
    try:
        with warnings.catch_warnings(), patch.object(trace, "print", create=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_kept)


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


def innermost_line(trace: str) -> str:
    """Returns the innermost line of code outside torch in the text of a traceback, such as ``'model.py:12'``."""
    lines = re.findall(r'File "(.+)", line (\d+)', trace)
    outside = [each for each in lines if "/torch/" not in each[0]] or lines
    return ":".join(outside[-1]) if outside else ""


class NotExported(ValueError):
    """The code of the module at a path, or of the model itself, cannot be exported."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.path = path


def _explained(module: nn.Module, error: Exception) -> NotExported:
    if isinstance(error, NotExported):
        return error
    paths = {id(each): path for path, each in module.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "forward"]
    inner: Any = next((owner for owner in reversed(owners) if id(owner) in paths), None)
    reason = first_line(error)
    if found := re.search(r"specialized it to be a constant \((\d+)\)", str(error)):
        reason = f"its code fixes dimension 0 of an input, the batch, to {found[1]}; use x.shape[0] or -1 there"
        kept = ((name, getattr(value, "shape", value)) for each in module.modules() for name, value in vars(each).items())
        if names := [name for name, shape in kept if isinstance(shape, torch.Size) and shape[:1] == (int(found[1]),)]:
            reason += f"; its attribute '{names[0]}' may be of an earlier call: convert the model before its first call"
    line = innermost_line("".join(traceback.format_tb(error.__traceback__)))
    apart = "move that to a submodule that the model calls once, which is kept whole"
    if "data-dependent" in reason:
        reason = f"its control flow or a number depends on data ({line}); {apart}"
    if ".numpy()" in reason:
        reason = f"it calls numpy() of a tensor ({line}); use functions of torch, or {apart}"
    if "fake tensor in the exported program constant" in reason:
        reason = "it uses a tensor that an export cannot record, such as the .data of another; use detach() instead"
    if found := re.search(r"Found <class '([^']+)'> in output", str(error)):
        reason = f"it returns a {found[1]}; return tensors, alone or in tuples, lists and dicts"
        reason += "; with a cache of transformers, pass use_cache=False" if "ache" in found[1] else ""
    is_causal = any(frame.f_code.co_name == "_detect_is_causal_mask" for frame in frames)
    if is_causal:
        reason = "it looks at the values of its mask; pass is_causal=True or False when calling it (src_is_causal= of Transformer)"
    if inner is None or inner is module:
        return NotExported(f"cannot convert the model ({type(module).__name__}): {reason}")
    path = paths[id(inner)]
    advice = "" if is_causal else f"; to keep each such module whole as one layer, pass opaque=[{type(inner).__name__}]"
    text = f"cannot convert the model: '{path}' ({type(inner).__name__}) cannot be exported: {reason}{advice}"
    return NotExported(text, path)


@contextmanager
def _few_guards() -> Iterator[None]:
    """Raises NotExported for an export in a block whose conditions for sizes become too many, as it would take minutes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes a second, so only here

    log_guard, thread = ShapeEnv._log_guard, threading.get_ident()

    def counted(environment: ShapeEnv, *args: Any, **kwargs: Any) -> None:
        if len(environment.guards) > _MOST_GUARDS and threading.get_ident() == thread:
            raise NotExported(f"cannot convert the model: its code has more than {_MOST_GUARDS} conditions for sizes")
        log_guard(environment, *args, **kwargs)

    with patch.object(ShapeEnv, "_log_guard", counted):
        yield


_MOST_GUARDS = 64


def is_inside(name: str, paths: Iterable[str]) -> bool:
    """Returns whether a module or tensor is one of the modules at some paths, or belongs to one."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def whole_modules(module: nn.Module, classes: Iterable[type[nn.Module]]) -> dict[str, nn.Module]:
    """Returns the submodules of some classes, and those that are compiled, by path, without those inside another. Raises
    TypeError for anything but subclasses of ``nn.Module``, and ValueError for a class that no submodule has."""
    kinds = (classes,) if isinstance(classes, type) else tuple(classes)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"opaque must be a list of subclasses of nn.Module, but has {kind!r}")
    found: dict[str, nn.Module] = {}
    for path, each in module.named_modules():
        is_whole = isinstance(each, kinds) or each._compiled_call_impl is not None
        if is_whole and path and not is_inside(path, found):
            found[path] = each
    for kind in kinds:
        if not any(isinstance(each, kind) for path, each in module.named_modules() if path):
            raise ValueError(f"opaque has {kind.__name__}, but no submodule of the model is one")
    return found
