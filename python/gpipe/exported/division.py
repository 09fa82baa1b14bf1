"""Divides the operations of a model among layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from gpipe.exported.graph import Call, Graph, Operation, Value, schema_of

__all__ = ["Block", "divide"]


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
    parameters = {value: name for name, value in graph.tensors.items() if _is_parameter(value)}
    outer = _with_submodules(graph)
    blocks: list[Block] = []
    current: Call | None = None
    names = _Names()
    for operation in graph.operations:
        own = [parameters[value] for value in operation.inputs() if value in parameters]
        begins = operation.call.path not in outer or bool(own)
        if not blocks or (begins and operation.call != current):
            path = operation.call.path or (own[0] if own else "input")
            if begins and current is None and blocks:
                blocks[0].name = names.unique(path)  # operators before the first module belong to its layer
            else:
                blocks.append(Block(names.unique(path) if begins else ""))
            current = operation.call if begins else None
        blocks[-1].operations.append(operation)
    if blocks and not blocks[0].name:
        blocks[0].name = names.unique("model")
    return _keep_together(graph, blocks)


def _is_parameter(value: Value) -> bool:
    return isinstance(value.example, Tensor) and value.example.requires_grad


def _with_submodules(graph: Graph) -> set[str]:
    """Returns the paths of modules inside which another module computes."""
    paths = {operation.call.path for operation in graph.operations}
    outer = {""}
    for path in paths:
        while path:
            path = path.rpartition(".")[0]
            outer.add(path)
    return outer


class _Names:
    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, name: str) -> str:
        found, count = name, 1
        while found in self._taken:
            found, count = f"{name}_{count}", count + 1
        self._taken.add(found)
        return found


def _keep_together(graph: Graph, blocks: list[Block]) -> list[Block]:
    """Joins the layers between the first and the last use of each buffer that an operation changes. A stage has buffers of
    its own, so others would not see the change."""
    buffers = set(graph.tensors.values())
    uses: dict[Value, list[int]] = {}
    changed: set[Value] = set()
    for index, block in enumerate(blocks):
        for operation in block.operations:
            for value in buffers.intersection(operation.inputs()):
                uses.setdefault(value, []).append(index)
            changed.update(buffers.intersection(_changed_by(operation)))
    spans = [(uses[value][0], uses[value][-1]) for value in changed]
    return _joined(blocks, [span for span in spans if span[0] < span[1]])


def _changed_by(operation: Operation) -> Iterable[Value]:
    """Yields the values that an operation writes to."""
    arguments = schema_of(operation.function)
    named = {argument.name: argument for argument in arguments}
    given = [*zip(arguments, operation.args)]
    given += [(named[key], value) for key, value in operation.kwargs.items() if key in named]
    for argument, value in given:
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
