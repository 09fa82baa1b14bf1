"""Divides the operations of a model among layers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpipe.exported.graph import Call, Graph, Operation, Value, itself

__all__ = ["Block", "divide", "owners_of_memory"]


@dataclass(eq=False)
class Block:
    """The operations of one layer, in order."""

    name: str
    operations: list[Operation] = field(default_factory=list)


def divide(graph: Graph) -> list[Block]:
    """Returns the layers of a model.

    A layer begins where another module begins to compute: one without submodules, or one that uses parameters of its
    own. Operators between two such modules belong to the layer before them. A layer has the name of its module. If
    other layers have it too, a number follows.
    """
    parameters = {value: name for name, value in graph.tensors.items() if value.is_parameter}
    outer = _with_submodules(graph)
    blocks: list[Block] = []
    current: Call | None = None
    taken: set[str] = set()
    for operation in graph.operations:
        own = [parameters[value] for value in operation.inputs() if value in parameters]
        begins = operation.call.path not in outer or bool(own)
        if not blocks or (begins and operation.call != current):
            path = operation.call.path or (own[0] if own else "input")
            if begins and current is None and blocks:
                blocks[0].name = _unique(path, taken)  # operators before the first module belong to its layer
            else:
                blocks.append(Block(_unique(path, taken) if begins else ""))
            current = operation.call if begins else None
        blocks[-1].operations.append(operation)
    if blocks and not blocks[0].name:
        blocks[0].name = _unique("model", taken)
    return _keep_together(graph, blocks)


def _with_submodules(graph: Graph) -> set[str]:
    """Returns the paths of modules inside which another module computes."""
    paths = {operation.call.path for operation in graph.operations}
    outer = {""}
    for path in paths:
        while path:
            path = path.rpartition(".")[0]
            outer.add(path)
    return outer


def _unique(name: str, taken: set[str]) -> str:
    """Returns the name, with a number if it is taken. Adds it to those that are taken."""
    found, count = name, 1
    while found in taken:
        found, count = f"{name}_{count}", count + 1
    taken.add(found)
    return found


def _keep_together(graph: Graph, blocks: list[Block]) -> list[Block]:
    """Joins layers that must be in one stage: those between the first and the last use of a buffer that an operation
    changes, because other stages would not see the change; those between the first and the last use of a number that is
    read from data, because numbers do not leave a layer; and those between the begin and the end of a ``torch.vmap``,
    because it changes what operators on its thread do."""
    tensors = set(graph.tensors.values())
    memory = owners_of_memory(graph)
    uses: dict[Value, list[int]] = {}
    together: set[Value] = set()
    begun: list[int] = []
    spans: list[tuple[int, int]] = []
    for index, block in enumerate(blocks):
        for operation in block.operations:
            inputs = list(operation.inputs())
            for value in inputs:
                uses.setdefault(memory.get(value, value), []).append(index)
            together.update(tensors.intersection(memory.get(value, value) for value in _changed_by(operation)))
            name = getattr(operation.function, "__name__", "")
            if name == "_vmap_increment_nesting":
                begun.append(index)
            elif name == "_vmap_decrement_nesting":
                spans.append((begun.pop(), index))
            if operation.result.is_number and (_reads_data(operation) or together.intersection(inputs)):
                together.add(operation.result)
                uses.setdefault(operation.result, []).append(index)
    spans += [(uses[value][0], uses[value][-1]) for value in together]
    return _joined(blocks, [span for span in spans if span[0] < span[1]])


def _reads_data(operation: Operation) -> bool:
    """Returns whether an operation computes a number from the elements of a tensor, not from its size."""
    tensors = any(value.is_tensor for value in operation.inputs())
    return tensors and not str(operation.function).startswith("aten.sym_")


def owners_of_memory(graph: Graph) -> dict[Value, Value]:
    """Returns the parameter, buffer or constant whose memory a value shares, for each that does."""
    owners = {value: value for value in graph.tensors.values()}
    for operation in graph.operations:
        for viewed in _viewed_by(operation):
            if viewed in owners:
                owners[operation.result] = owners[viewed]
    return owners


def _viewed_by(operation: Operation) -> Iterator[Value]:
    """Yields the values whose memory the result of an operation may share."""
    if operation.function in (operator.getitem, itself):
        yield from operation.inputs()
    elif operation.schema is not None and any(result.alias_info is not None for result in operation.schema.returns):
        for argument, value in operation.given():
            if argument.alias_info is not None and isinstance(value, Value):
                yield value


def _changed_by(operation: Operation) -> Iterable[Value]:
    """Yields the values that an operation writes to."""
    for argument, value in operation.given():
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # The schema of batch norm does not tell that it writes to its running statistics.
        if isinstance(value, Value) and (writes or argument.name in ("running_mean", "running_var")):
            yield value


def _joined(blocks: list[Block], spans: list[tuple[int, int]]) -> list[Block]:
    joined: list[Block] = []
    end = -1
    starts: dict[int, int] = {}
    for first, last in spans:
        starts[first] = max(last, starts.get(first, -1))
    for index, block in enumerate(blocks):
        if index <= end:
            joined[-1].operations += block.operations
        else:
            joined.append(block)
        end = max(end, starts.get(index, -1))
    return joined
