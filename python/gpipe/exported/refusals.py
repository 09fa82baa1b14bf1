"""Refuses what torch.export would lose without an error."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import function

from gpipe.exported.graph import Graph, Value
from gpipe.exported.routes import same_size
from gpipe.exported.tensors import is_inside
from gpipe.generators import GeneratorState

__all__ = ["check_outputs", "guards_of", "nothing_lost", "refuse_modules", "replaced"]


def refuse_modules(module: nn.Module, whole: Iterable[str]) -> None:
    """Raises ValueError for a module that TorchScript has compiled, and for one with a hook, except inside the modules
    at some paths. A hook runs while the model is exported, but would not run later."""
    for path, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise ValueError(
                f"cannot convert the model: '{path}' is compiled by TorchScript; use the module that it was compiled "
                "from"
            )
        if is_inside(path, whole):
            continue
        hooks = [*each._forward_pre_hooks.values(), *each._forward_hooks.values()]
        hooks += [*each._backward_pre_hooks.values(), *each._backward_hooks.values()]
        for hook in hooks:
            # Those of weight_norm and spectral_norm compute weights, which the export records.
            if not (type(hook).__module__ or "").startswith("torch.nn.utils"):
                raise ValueError(
                    f"cannot convert the model: '{path}' ({type(each).__name__}) has a hook, which the layers would not "
                    "run; remove it, or register it on a layer of the sequence"
                )


def check_outputs(graph: Graph) -> None:
    """Raises NotImplementedError for an output that the outputs of micro-batches cannot be joined to."""
    batch = [value.example.shape[0] for value in graph.inputs if value is not None]
    for number, output in enumerate(graph.outputs):
        if output is None:
            continue
        where = f"output {number} of {len(graph.outputs)}"
        if not isinstance(output, Value) or not output.is_tensor:
            raise NotImplementedError(f"{where} is not a tensor; leave it out")
        shape = output.example.shape
        if not shape or not any(same_size(shape[0], size) for size in batch):
            raise NotImplementedError(
                f"{where} has the shape {tuple(shape)}, without the batch as dimension 0; return it per sample, or "
                "leave it out"
            )


def guards_of(graph: Graph) -> dict[str, bool]:
    """Returns what the export took for granted about the number of samples, as in ``if len(x) > 4``: Python expressions of
    ``samples``, each with whether only operators of torch asked for it, not the model's code."""
    import sympy  # type: ignore[import-untyped]  # takes a second, so only here
    from torch.utils._sympy.printers import PythonPrinter

    samples = sympy.Symbol("samples", integer=True, positive=True)
    found: dict[str, bool] = {}
    for value in graph.inputs:
        batch = None if value is None else value.example.shape[0]
        if isinstance(batch, torch.SymInt):
            for guard in batch.node.shape_env.guards:
                # All inputs have the same number of samples.
                expression = guard.expr.xreplace(dict.fromkeys(guard.expr.free_symbols, samples))
                if expression != sympy.true:
                    text = PythonPrinter().doprint(expression)
                    found[text] = found.get(text, True) and _is_of_operator(guard)
    return found


def _is_of_operator(guard: Any) -> bool:
    """Returns whether code of torch, not of the model, has added a guard. Of modules and functions, a model may choose."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    place = Path(getattr(frame, "filename", ""))
    return place.is_relative_to(_TORCH) and not place.is_relative_to(_TORCH / "nn")


_TORCH = Path(torch.__file__).parent


@contextmanager
def nothing_lost() -> Iterator[None]:
    """Raises ValueError if the calling thread does something in a block that an export does not record: backwards of its
    own, hooks of tensors, and random numbers of Python and NumPy."""
    thread = threading.get_ident()
    is_defined: Any = function._is_setup_context_defined
    register_hook: Any = Tensor.register_hook

    # Function.apply() calls this. The function itself may be bound to names elsewhere, so replacing it would not do.
    def checked_apply(setup_context: Any) -> Any:
        kind = sys._getframe(1).f_locals["cls"]
        own = not kind.__module__.startswith("torch.") or kind.__name__ == "CheckpointFunction"
        if own and threading.get_ident() == thread:
            raise ValueError(f"it calls {kind.__name__}, whose backward would be lost")
        return is_defined(setup_context)

    def checked_hook(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise ValueError("it registers a hook of a tensor, which would be lost")
        return register_hook(tensor, *args, **kwargs)

    with suppress(ImportError):
        importlib.import_module("numpy.random")  # else the export may import it, which would look like a draw
    before = GeneratorState()
    with replaced(function, "_is_setup_context_defined", checked_apply):
        with replaced(Tensor, "register_hook", checked_hook):
            yield
    if GeneratorState() != before:
        raise ValueError("it draws random numbers from Python or NumPy, which would be constants; draw them with torch")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object for a block. Before, the object may inherit it or lack it."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
