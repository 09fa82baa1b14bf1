"""Captures a model as a graph, by torch.export. Refuses what would be lost without an error."""

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_map_only

from gpipe.exported.exporter import exported, is_inside, kept_whole, mode, whole_modules
from gpipe.exported.graph import Graph, Reader, Value
from gpipe.exported.modes import Combination, evaluation_of


class Owned(NamedTuple):
    """A tensor of a model."""

    tensor: Tensor
    persistent: bool  # whether it is part of the model's state


class Captured(NamedTuple):
    """A model as a graph, with its tensors."""

    graph: Graph
    tensors: dict[str, Owned]  # by name, also tensors that the graph does not use
    modes: dict[str, bool]  # whether each module is in training mode, by path
    whole: dict[str, nn.Module]  # the modules that are kept whole, by path


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    opaque: Iterable[type[nn.Module]],
    *,
    any_shape: bool,
) -> Captured:
    """Captures a model in training and in evaluation mode, for any number of samples. With ``any_shape``, also for other sizes
    where its code allows them, unless it has modules that are kept whole. Raises ValueError if that fails."""
    whole = whole_modules(module, opaque)
    refuse_modules(module, whole)
    args, kwargs = examples_of((args, dict(kwargs)))
    programs, calls = [], []
    for training in (True, False):
        with mode(module, training), kept_whole(module, whole.values(), args, kwargs), _calls_of(module) as called:
            programs.append(exported(module, args, kwargs, any_shape=any_shape and not whole, runs=bool(whole)))
        calls.append(called)
    own = _tensors_of_module(module)
    tensors = dict(own)
    graph, evaluation = (Reader(program, _names_in(program, own, tensors)).graph for program in programs)
    check_outputs(graph)
    check_outputs(evaluation)
    combined = Combination(graph, evaluation, calls[0] & calls[1]).graph
    modes = {path: each.training for path, each in module.named_modules(remove_duplicate=False)}
    return Captured(combined, tensors, modes, whole)


def capture_program(program: ExportedProgram) -> Captured:
    """Reads an exported program. What it computes in evaluation mode follows from its operators. Raises ValueError if it
    cannot be converted, or was not exported in training mode with a dynamic batch."""
    tensors: dict[str, Owned] = {}
    graph = Reader(program, _names_in(program, (), tensors)).graph
    if conditions := graph.sizes.has_no_guards() and getattr(program, "_guards_code", None):
        raise ValueError(
            f"the program's file does not keep its conditions for sizes, such as {conditions[0]}; convert the module, or the "
            "program before it is saved"
        )
    for number, value in enumerate(graph.inputs):
        if value is not None and not (value.example.dim() and isinstance(value.example.shape[0], torch.SymInt)):
            raise ValueError(
                f"the program was exported for inputs with a fixed dimension 0 (input {number} has the shape "
                f"{tuple(value.example.shape)}); export with dynamic_shapes that have {{0: Dim.DYNAMIC}} per tensor"
            )
    check_outputs(graph)
    called = {call.path for operation in graph.operations for call in operation.call.around()}
    return Captured(Combination(graph, evaluation_of(graph), called).graph, tensors, {}, {})


def _tensors_of_program(program: ExportedProgram) -> dict[str, Owned]:
    """Returns the tensors that an exported program uses, by name."""
    found = {name: Owned(tensor, True) for name, tensor in program.state_dict.items()}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target in program.constants:
            found[spec.target] = Owned(program.constants[spec.target], False)
    return found


def _tensors_of_module(module: nn.Module) -> dict[str, Owned]:
    """Returns all parameters and buffers of a module, by name. A tensor can have several names."""
    found = {}
    for path, each in module.named_modules(remove_duplicate=False):
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is not None:
                found[f"{path}.{name}".lstrip(".")] = Owned(tensor, name not in each._non_persistent_buffers_set)
    return found


def _names_in(program: ExportedProgram, own: Container[str], tensors: dict[str, Owned]) -> dict[str, str]:
    """Returns one name for each tensor of a program, also if it is tied. ``own`` are the names of the model's tensors.
    Adds constants to ``tensors``, except those that equal a constant of an earlier program."""
    free = [name for name in tensors if name not in own]
    names = {}
    for name, owned in _tensors_of_program(program).items():
        new = name
        if name not in own:
            equal = [each for each in free if _equal(owned.tensor, tensors[each].tensor)]
            while not equal and new in tensors:
                new += "_eval"
            if equal:
                new = equal[0]
                free.remove(new)
            tensors.setdefault(new, owned)
        names[name] = new
    first = {id(owned.tensor): name for name, owned in reversed(tensors.items())}
    return {name: first[id(tensors[new].tensor)] for name, new in names.items()}


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return alike and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def examples_of(arguments: Any) -> Any:
    """Returns copies of the example inputs with at least two samples, because torch.export treats a size of 1 as a
    constant, and the same tensor in two places as one input."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            raise ValueError("an input has no dimensions, but dimension 0 of each input must be the batch")
        copy = tensor.detach().repeat_interleave(2 if tensor.shape[0] == 1 else 1, 0)
        return copy.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, copied, arguments)


@contextmanager
def _calls_of(module: nn.Module) -> Iterator[set[str]]:
    """Collects the paths of the modules that are called in a block."""
    paths: dict[nn.Module, list[str]] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        paths.setdefault(each, []).append(path)
    called: set[str] = set()
    with ExitStack() as hooks:
        for each, own in paths.items():
            # torch.export passes a stand-in to the hooks if a module of the model has several paths.
            hooks.enter_context(each.register_forward_pre_hook(lambda each, args, own=own: called.update(own)))
        yield called


def refuse_modules(module: nn.Module, whole: Iterable[str]) -> None:
    """Raises ValueError for a module that TorchScript or ``torch.compile`` has made, and for one with a hook, except inside
    the modules at some paths. A hook runs while the model is exported, but would not run later."""
    from torch._dynamo.eval_frame import OptimizedModule  # takes a second, so only here

    for path, each in module.named_modules():
        if isinstance(each, (torch.jit.ScriptModule, OptimizedModule)):
            compiler = "TorchScript" if isinstance(each, torch.jit.ScriptModule) else "torch.compile()"
            raise ValueError(
                f"cannot convert the model: '{path}' is compiled by {compiler}; use the module that it was compiled from. "
                "A submodule on which compile() was called stays compiled, as one layer"
            )
        if isinstance(each, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ValueError(
                f"cannot convert the model: {repr(path) if path else 'it'} is a {type(each).__name__}; convert its .module, "
                "and give the ranks replicas, gpipe.Ranks(replicas=2), or wrap the pipeline"
            )
        tables = each._forward_pre_hooks, each._forward_hooks, each._backward_pre_hooks, each._backward_hooks
        for hook in () if is_inside(path, whole) else itertools.chain(*(table.values() for table in tables)):
            # The hooks of weight_norm and spectral_norm compute weights, which the export records.
            if not (type(hook).__module__ or "").startswith("torch.nn.utils"):
                raise ValueError(
                    f"cannot convert the model: '{path}' ({type(each).__name__}) has a hook, which the layers would not "
                    "run; remove it, or register it on a layer of the sequence"
                )


def check_outputs(graph: Graph) -> None:
    """Raises ValueError for an output that the outputs of micro-batches cannot be joined to."""
    samples = {value.shape[0] for value in graph.inputs if value is not None}
    for number, output in enumerate(graph.outputs):
        if output is None:
            continue
        where = f"cannot convert the model: output {number} of {len(graph.outputs)}"
        if not isinstance(output, Value) or not isinstance(output.example, Tensor):
            raise ValueError(f"{where} is not a tensor; leave it out")
        shape = output.shape
        if not shape or shape[0] not in samples:
            raise ValueError(
                f"{where} has the shape {tuple(shape)}, without the batch as dimension 0; return it per sample, or "
                "leave it out" + (": call the model without labels, and give step() the loss" if not shape else "")
            )
