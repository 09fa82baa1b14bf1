"""Captures a model as a graph, by torch.export."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe.exported.graph import Graph, read_graph, with_names
from gpipe.exported.modes import combine_modes, evaluation_of
from gpipe.exported.opaque import kept_whole, whole_modules
from gpipe.exported.tensors import Owned, is_inside, modes_of, tensors_of_module, tensors_of_program

__all__ = ["Captured", "capture", "capture_program"]


class Captured(NamedTuple):
    """A model as a graph, with its tensors."""

    graph: Graph
    tensors: dict[str, Owned]
    """By name; those that the graph does not use, too."""
    modes: dict[str, bool]
    """Whether each module is in training mode, by path."""
    whole: dict[str, nn.Module]
    """The modules that are kept whole, by path."""


def capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], opaque: Iterable[type[nn.Module]]
) -> Captured:
    """Captures a model for any number of samples, in training and in evaluation mode.

    Raises:
        ValueError: if the model cannot be captured. The message tells where and why.
    """
    whole = whole_modules(module, opaque)
    _refuse_hooks(module, whole)
    args, kwargs = _with_two_samples(args, dict(kwargs))
    programs = []
    for training in (True, False):
        with _mode(module, training), kept_whole(module, whole.values(), args, kwargs):
            programs.append(_exported(module, args, kwargs))
    own = tensors_of_module(module)
    training_tensors, evaluation_tensors = (tensors_of_program(program) for program in programs)
    renamed = _differing_constants(training_tensors, evaluation_tensors, own)
    tensors = {**own, **training_tensors}
    tensors.update({renamed.get(name, name): owned for name, owned in evaluation_tensors.items()})
    names = _one_name_each(tensors)
    with _explained():
        graph = with_names(read_graph(programs[0]), names)
        evaluation = with_names(read_graph(programs[1]), {**names, **renamed})
        return Captured(combine_modes(graph, evaluation), tensors, modes_of(module), whole)


def capture_program(program: ExportedProgram) -> Captured:
    """Reads an exported program. What it computes in evaluation mode follows from its operators.

    Raises:
        ValueError: if the program cannot be converted, or was not exported in training mode with a dynamic batch.
    """
    tensors = tensors_of_program(program)
    with _explained():
        graph = with_names(read_graph(program), _one_name_each(tensors))
        for value in graph.inputs:
            if value is not None and not (value.example.dim() and isinstance(value.example.shape[0], torch.SymInt)):
                raise ValueError(
                    f"the program was exported for inputs with a fixed dimension 0 ('{value.name}' of shape "
                    f"{tuple(value.example.shape)}); export with dynamic_shapes that have {{0: Dim.DYNAMIC}} for each tensor"
                )
        return Captured(combine_modes(graph, evaluation_of(graph)), tensors, {}, {})


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise ValueError(f"cannot convert the model: {error}") from None


def _one_name_each(tensors: dict[str, Owned]) -> dict[str, str]:
    """Returns one name for all names of a tied tensor."""
    first = {id(owned.tensor): name for name, owned in reversed(tensors.items())}
    return {name: first[id(owned.tensor)] for name, owned in tensors.items()}


def _refuse_hooks(module: nn.Module, whole: Iterable[str]) -> None:
    """Refuses hooks, which run while the model is exported, but would not run later."""
    for path, each in module.named_modules():
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


def _differing_constants(
    training: dict[str, Owned], evaluation: dict[str, Owned], own: dict[str, Owned]
) -> dict[str, str]:
    """Returns new names for the constants of evaluation mode that are others in training mode."""
    return {
        name: f"{name}_eval"
        for name, owned in evaluation.items()
        if name not in own and name in training and not _equal(owned.tensor, training[name].tensor)
    }


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def _exported(module: nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor):
            shapes[tensor] = {0: Dim.DYNAMIC}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ValueError(_explanation(module, error)) from error


def _with_two_samples(args: Any, kwargs: Any) -> Any:
    """Repeats samples until there are two, because torch.export treats a size of 1 as a constant."""
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and tensor.dim() == 0:
            raise ValueError("an input has no dimensions, but dimension 0 of each input must be the batch")
    return tree_map_only(
        Tensor, lambda tensor: tensor.repeat_interleave(2, 0) if tensor.shape[0] == 1 else tensor, (args, kwargs)
    )


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets the mode of a module and all its submodules for a block."""
    modes = {each: each.training for each in module.modules()}
    try:
        module.train(training)
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def _explanation(module: nn.Module, error: Exception) -> str:
    """Tells which module cannot be captured, and why."""
    paths = {id(each): path for path, each in module.named_modules()}
    inner = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths and frame.f_code.co_name == "forward":
            inner = owner
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
    if found := re.search(r"specialized it to be a constant \((\d+)\)", str(error)):
        reason = f"its code fixes dimension 0 of an input, the batch, to {found[1]}; use x.shape[0] or -1 there"
    if inner is None or inner is module:
        return f"cannot convert the model ({type(module).__name__}): {reason}"
    return (
        f"cannot convert the model: '{paths[id(inner)]}' ({type(inner).__name__}) cannot be exported: {reason}; to keep "
        f"each such module whole as one layer, pass opaque=[{type(inner).__name__}]"
    )
