"""Calls torch.export: for any number of samples, without its output, with an error that tells the module."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.utils._pytree import tree_leaves

from gpipe.exported.refusals import nothing_lost, replaced
from gpipe.exported.trial import unchanged

__all__ = ["exported"]


def exported(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """Exports a module in its present mode, for any number of samples.

    Raises:
        ValueError: if that fails. The message tells which submodule is the cause, and why.
    """
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor):
            shapes[tensor] = {0: Dim.DYNAMIC}
    try:
        with _silence(), nothing_lost(), _named_arguments(module, args, kwargs):
            return export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ValueError(_failure(module, args, kwargs) or _explanation(module, error)) from error


@contextmanager
def _named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Makes ``forward`` name its keyword arguments for a block, because torch.export cannot tell the shapes of those of
    ``**kwargs``."""
    forward = module.forward
    signature = inspect.signature(forward)
    parameters = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {each.name for each in parameters}
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in known]

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with replaced(module, "forward", named):
        yield


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
        with warnings.catch_warnings(), replaced(trace, "print", lambda *args, **kwargs: None):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_kept)


def _failure(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Tells why the module fails without an export, too; nothing if it does not."""
    try:
        with unchanged(module), torch.enable_grad():
            module(*args, **kwargs)
    except Exception as error:
        return f"cannot convert the model ({type(module).__name__}), because it fails on this input: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


def _explanation(module: nn.Module, error: Exception) -> str:
    """Tells which module cannot be captured, and why."""
    paths = {id(each): path for path, each in module.named_modules()}
    inner = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths and frame.f_code.co_name == "forward":
            inner = owner
    reason = _first_line(error)
    if found := re.search(r"specialized it to be a constant \((\d+)\)", str(error)):
        reason = f"its code fixes dimension 0 of an input, the batch, to {found[1]}; use x.shape[0] or -1 there"
    if found := re.search(r"Found <class '([^']+)'> in output", str(error)):
        reason = f"it returns a {found[1]}; return tensors: with a cache of transformers, pass use_cache=False"
    if inner is None or inner is module:
        return f"cannot convert the model ({type(module).__name__}): {reason}"
    return (
        f"cannot convert the model: '{paths[id(inner)]}' ({type(inner).__name__}) cannot be exported: {reason}; to "
        f"keep each such module whole as one layer, pass opaque=[{type(inner).__name__}]"
    )
