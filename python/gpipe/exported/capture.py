"""Captures a model as a graph, by torch.export. Refuses what would be lost without an error."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe.checks import shown
from gpipe.exported.blocks import Calls, kept_whole
from gpipe.exported.exporter import NotExported, exported, mode, unchanged
from gpipe.exported.graph import Graph, Reader, Value
from gpipe.exported.guards import facts_of
from gpipe.exported.read import Read
from gpipe.exported.twins import difference
from gpipe.randomness import random_scope
from gpipe.wrapper import ConvertedSequence


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
        kept = unchanged((), variables=calls.read_by(module.modules()).variables())  # blocks may assign globals, on fake tensors
        with mode(module, training), kept, kept_whole(blocks, calls, any_shape=any_shape, runs=runs):
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
        if tensor.dim() == 0 or len(tensor) == 0:
            raise ValueError(f"an input is {shown(tensor)}, but dimension 0 of each input must be the batch, of one sample or more")
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


def refuse_shared_state(sequence: ConvertedSequence, input: Any, read: Read, effects: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError if layers do something else when each runs for two inputs before the next layer does, as in a pipeline:
    then blocks share what a forward changes. ``effects`` tell what that is, and ``read`` what code reads outside of modules."""
    module, variables = sequence.module, read.variables() if effects else []

    def call(index: int, number: int, value: Any) -> Any:
        with random_scope(0, index, number):
            return sequence[index](value)

    def behaviour(by_layer: bool) -> dict[str, Any] | Exception:
        values: list[Any] = [input, tree_map_only(Tensor, lambda each: each[:1].expand_as(each), input)]
        found: dict[str, Any] = {}
        with unchanged(module.modules(), variables=variables), ExitStack() as stack:
            sequence.follow_model()
            threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in values]  # each has its own skips
            values = [sequence.entering(tree_map_only(Tensor, Tensor.clone, each)) for each in values]
            order = itertools.product(range(len(sequence)), range(2))
            for index, number in order if by_layer else sorted(order, key=lambda pair: pair[1]):
                try:
                    values[number] = threads[number].submit(call, index, number, values[number]).result()
                except Exception as error:
                    return error
                found[f"output of '{sequence[index].name}' in call {number}"] = copies(values[number])
            own = [facts_of(module.get_submodule(at)).get(what, str)() for at, what in effects if what != "a global"]
            found["what forwards change"] = copies([own, [get() for get in variables]])
        return {f"{what}, {number}": each for what, leaves in found.items() for number, each in enumerate(leaves)}

    def copies(value: Any) -> list[Any]:
        return [each.detach().clone() if isinstance(each, Tensor) else str(each) for each in tree_leaves(value)]

    for training in (False, True) if effects else ():
        with mode(module, training):
            apart, together = (behaviour(by_layer) for by_layer in (False, True))
            reason = difference(together, apart)
            # Some globals are not restored between runs, so outputs may differ. What a run leaves in a global, such as a time, may
            # differ in any case.
            may_differ = reason.startswith("output") and any(what == "a global" for _, what in effects)
            if reason and (may_differ or not difference(behaviour(False), apart)):
                shared = "; ".join(f"{path or 'the model'}: {what}" for path, what in effects[:3])
                raise ValueError(
                    f"cannot convert the model: blocks share what a forward changes ({shared}), but a pipeline runs them at the "
                    f"same time, with another result ({reason.partition(',')[0]}); return values from one block and pass them to "
                    "the other, or if it is a cache, call the model once before"
                )


def check_outputs(graph: Graph, batch_dim: int) -> None:
    """Raises ValueError for an output that the outputs of micro-batches cannot be joined to. Tells shapes as the model has
    them, whose dimension ``batch_dim`` is the batch."""
    samples = {value.shape[0] for value in graph.inputs if value is not None}
    for number, output in enumerate(graph.outputs):
        if output is None:
            continue
        where = f"cannot convert the model: output {number} of {len(graph.outputs)}"
        if not isinstance(output, Value) or not isinstance(output.example, Tensor):
            what = "a number that it computes" if isinstance(output, Value) else shown(output)
            raise ValueError(f"{where} is {what}, but must be a tensor; leave it out")
        shape = output.shape
        if not shape or shape[0] not in samples:
            own = (*shape[: batch_dim + 1][::-1], *shape[batch_dim + 1 :])
            loss = "or leave it out: call the model without labels, and give step() the loss"
            advice = "not flattened nor selected, or leave it out" if shape else loss
            what = f"{where} has the shape {own}, without the batch as dimension {batch_dim}"
            raise ValueError(f"{what}; return it per sample, {advice}")
