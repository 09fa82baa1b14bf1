"""Captures a model as a graph, by torch.export. Refuses what would be lost without an error."""

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe.exported.blocks import Calls, kept_whole
from gpipe.exported.exporter import OF_MODULES, NotExported, exported, mode
from gpipe.exported.graph import Graph, Reader, Value
from gpipe.exported.guards import facts_of
from gpipe.randomness import is_generator


def capture(
    module: nn.Module,
    arguments: Any,
    blocks: Mapping[str, nn.Module],
    calls: Calls,
    batch_dim: int,
    modes: tuple[bool, ...],
    *,
    any_shape: bool,
    runs: bool,
) -> tuple[list[Graph], dict[str, Tensor]]:
    """Captures a model for any number of samples in the ``modes`` that count: training, and evaluation if what it computes
    outside the ``blocks``, which are kept whole, depends on the mode. With ``any_shape``, also for other sizes where its code
    allows them. ``calls`` are those of a plain run. Returns a graph per mode, and tensors by name, also tensors that no graph
    uses. The sizes of the first graph have what all modes require. Raises ValueError if it cannot be converted."""
    programs = []
    for training in modes:
        with mode(module, training), kept_whole(blocks, calls, any_shape=any_shape, runs=runs):
            programs.append(exported(module, *arguments, any_shape=any_shape))
    own = dict(itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
    tensors: dict[str, Tensor] = dict(own)
    graphs = [Reader(program, _names_in(program, own, tensors)).graph for program in programs]
    for graph in graphs:
        check_outputs(graph, batch_dim)
    for other in graphs[1:]:
        same = {theirs: ours for ours, theirs in zip(graphs[0].inputs, other.inputs, strict=True)}
        for ours, theirs in ((ours, theirs) for theirs, ours in same.items() if ours and theirs):
            ours.shape = tuple(size if isinstance(size, int) else own for own, size in zip(ours.shape, theirs.shape, strict=True))
        graphs[0].sizes.merge(other.sizes, same)
    return graphs, tensors


def _names_in(program: ExportedProgram, own: Container[str], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Returns one name for each tensor of a program, also if it is tied. ``own`` are the names of the model's tensors.
    Adds constants to ``tensors``, except those that equal a constant of an earlier program."""
    used: dict[str, Tensor] = dict(program.state_dict)
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target in program.constants:
            used[spec.target] = program.constants[spec.target]
    free = [name for name in tensors if name not in own]
    names = {}
    for name, owned in used.items():
        new = name
        if name not in own:
            like = [each for each in free if (tensors[each].dtype, tensors[each].shape) == (owned.dtype, owned.shape)]
            equal = [each for each in like if torch.allclose(owned, tensors[each], rtol=0, atol=0, equal_nan=True)]
            while not equal and new in tensors:
                new += "_eval"
            if equal:
                new = equal[0]
                free.remove(new)
            tensors.setdefault(new, owned)
        names[name] = new
    first = {id(owned): name for name, owned in reversed(tensors.items())}
    return {name: first[id(tensors[new])] for name, new in names.items()}


def examples_of(arguments: Any, batch_dim: int) -> Any:
    """Returns copies of the example inputs with at least two samples, because torch.export treats a size of 1 as a
    constant, and the same tensor in two places as one input. ``batch_dim`` was the batch, which is dimension 0 here."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            raise ValueError("an input has no dimensions, but dimension 0 of each input must be the batch")
        copy = tensor.detach().repeat_interleave(2 if tensor.shape[0] == 1 else 1, 0)
        return copy.requires_grad_(tensor.requires_grad)

    copies = tree_map_only(Tensor, copied, arguments)
    if len(sizes := {len(leaf) for leaf in tree_leaves(copies) if isinstance(leaf, Tensor)}) > 1:
        raise ValueError(
            f"dimension {batch_dim} of each input must be the batch, but the example's have "
            f"{' and '.join(map(str, sorted(sizes)))} samples; let the model itself make what has no batch, such as a causal mask"
            + ("" if batch_dim else ", and pass batch_dim=1 if its sequences come first")
        )
    return copies


def refuse_modules(exported: Mapping[str, nn.Module], effects: Iterable[tuple[str, str]]) -> None:
    """Raises NotExported if one of the modules that are exported was compiled, has hooks or changes something, as ``effects``
    tell by path, and ValueError if it distributes a model. A hook would run during the export, but not later."""
    from torch._dynamo.eval_frame import OptimizedModule  # takes a second, so only here

    changed = dict(sorted(effects))
    for path, each in exported.items():
        name = f"'{path}'" if path else "it"
        if isinstance(each, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ValueError(
                f"cannot convert the model: {name} is a {type(each).__name__}; convert its .module, "
                "and give the ranks replicas, gpipe.Ranks(replicas=2), or wrap the pipeline"
            )
        if isinstance(each, (torch.jit.ScriptModule, OptimizedModule)):
            compiler = "TorchScript" if isinstance(each, torch.jit.ScriptModule) else "torch.compile()"
            reason = f"is compiled by {compiler}; use the module that it was compiled from"
            reason += "" if compiler == "TorchScript" else ", and call compile() of its blocks"
            raise NotExported(f"cannot convert the model: {name} {reason}", path)
        tables = each._forward_pre_hooks, each._forward_hooks, each._backward_pre_hooks, each._backward_hooks
        if any(map(len, tables)):
            text = f"cannot convert the model: {name} ({type(each).__name__}) has a hook, which the layers would not run"
            raise NotExported(f"{text}; remove it, or keep the module whole: opaque=[{type(each).__name__}]", path)
        if path in changed:
            what = f"{name} ({type(each).__name__}) changes {changed[path]} in forward(), which an export loses"
            advice = "move that to a submodule that the model calls once, which is kept whole, or leave it out"
            raise NotExported(f"cannot convert the model: {what}; {advice}", path)


def refuse_shared_state(module: nn.Module, blocks: Mapping[str, nn.Module], effects: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError if forwards change an object, as ``effects`` tell, that two blocks of a model have: stages call blocks at
    the same time."""
    changed: dict[int, str] = {}
    for path, what in sorted(effects):
        owner = module.get_submodule(path)
        changed |= {id(owner): what, id(facts_of(owner).get(what, object)()): what}
    users: dict[int, str] = {}
    for path, block in blocks.items():
        for each in _held(block):
            if id(each) in changed and users.setdefault(id(each), path) != path:
                raise ValueError(
                    f"cannot convert the model: blocks '{users[id(each)]}' and '{path}' share what a forward changes, "
                    f"{changed[id(each)]}, but a pipeline runs them at the same time; return values from one block and pass them to "
                    "the other, or if it is a cache, call the model once before"
                )


def _held(block: nn.Module) -> Iterator[Any]:
    """Yields the modules of a block, and the objects in their attributes, lists, tuples, sets and dicts that can change."""
    found: list[Any] = [*block.modules()]
    found += [value for each in found for name, value in vars(each).items() if name not in OF_MODULES]
    seen: set[int] = set()
    for value in found:  # which grows
        if id(value) not in seen:
            seen.add(id(value))
            found += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
            if isinstance(value, (dict, list, set, nn.Module)) or is_generator(value):
                yield value


def check_outputs(graph: Graph, batch_dim: int) -> None:
    """Raises ValueError for an output that the outputs of micro-batches cannot be joined to. Tells shapes as the model has
    them, whose dimension ``batch_dim`` is the batch."""
    samples = {value.shape[0] for value in graph.inputs if value is not None}
    for number, output in enumerate(graph.outputs):
        if output is None:
            continue
        where = f"cannot convert the model: output {number} of {len(graph.outputs)}"
        if not isinstance(output, Value) or not isinstance(output.example, Tensor):
            raise ValueError(f"{where} is not a tensor; leave it out")
        shape = output.shape
        if not shape or shape[0] not in samples:
            own = (*shape[: batch_dim + 1][::-1], *shape[batch_dim + 1 :])
            loss = "or leave it out: call the model without labels, and give step() the loss"
            advice = "not flattened, or leave it out" if shape else loss
            what = f"{where} has the shape {own}, without the batch as dimension {batch_dim}"
            raise ValueError(f"{what}; return it per sample, {advice}")
