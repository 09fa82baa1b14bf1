"""Divides the operations of a model among layers, and decides how values get from layer to layer."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gpipe.exported.blocks import OPERATOR, parsed
from gpipe.exported.graph import Call, Graph, Number, Operation, Value, inputs_of
from gpipe.exported.sizes import Size, described


@dataclass(eq=False)
class Route:
    """A layer in one mode, with what it gets and gives away."""

    name: str
    operations: list[Operation] = field(default_factory=list)
    arriving: list[Value] = field(default_factory=list)  # the activation that enters
    leaving: list[Value] = field(default_factory=list)  # the activation that leaves
    pops: list[tuple[str, Value]] = field(default_factory=list)
    peeks: list[tuple[str, Value]] = field(default_factory=list)
    stashes: list[tuple[str, Value]] = field(default_factory=list)
    owned: list[Value] = field(default_factory=list)  # parameters, buffers and constants


def divide(graphs: Sequence[Graph]) -> list[list[Route]]:
    """Returns the layers of a model in each mode, of which it has a graph, as many in all. Layers of the same name are one. A
    layer that a mode lacks does nothing in it."""
    memories = [_memory_of(graph) for graph in graphs]
    modes = _keep_together(_aligned([_layers_of(graph) for graph in graphs]), memories)
    owners: dict[str, int] = {}
    for index, same in enumerate(zip(*modes)):
        for value in inputs_of([(each.args, each.kwargs) for layer in same for each in layer.operations]):
            if value.tensor:
                owners.setdefault(value.tensor, index)
    for graph, layers, memory in zip(graphs, modes, memories):
        Routes(graph, layers, owners, memory)
    _level(modes)
    return modes


def _aligned(modes: list[list[Route]]) -> list[list[Route]]:
    """Returns the layers of each mode, with empty ones for those that only the other mode has."""
    if len(modes) == 1:
        return modes
    names = [[layer.name for layer in layers] for layers in modes]
    taken = set(names[0])
    found: list[tuple[Route, Route]] = []
    for tag, begin, end, other_begin, other_end in SequenceMatcher(None, names[0], names[1], autojunk=False).get_opcodes():
        ours, theirs = modes[0][begin:end], modes[1][other_begin:other_end]
        if tag == "equal":
            found += zip(ours, theirs)
            continue
        for layer in theirs:
            layer.name = _unique(layer.name, taken)
        found += [(layer, Route(layer.name)) for layer in ours]
        found += [(Route(layer.name), layer) for layer in theirs]
    return [list(layers) for layers in zip(*found)]


def _level(modes: list[list[Route]]) -> None:
    """Makes activations hold as many tensors in each mode. The others become skips."""
    for givers, takers in itertools.pairwise(zip(*modes)):
        few = min(len(giver.leaving) for giver in givers)
        for giver, taker in zip(givers, takers):
            for number, (sent, value) in enumerate(zip(giver.leaving[few:], taker.arriving[few:]), 1):
                name = f"{giver.name} -> {taker.name}" + (f" ({number})" if number > 1 else "")
                giver.stashes.append((name, sent))
                taker.pops.append((name, value))
            del giver.leaving[few:], taker.arriving[few:]


def _layers_of(graph: Graph) -> list[Route]:
    """Returns the layers of a graph. A layer begins where another module begins to compute: one without submodules, or one
    that uses parameters of its own. Operators between two such modules belong to the layer before them. A layer has the name
    of its module, followed by a number if an earlier one has it too."""
    paths = {operation.call.path for operation in graph.operations}
    # Of modules inside which another module computes.
    outer = {""} | {path[:at] for path in paths for at, letter in enumerate(path) if letter == "."}
    layers: list[Route] = []
    current: Call | None = None
    taken: set[str] = set()
    for operation in graph.operations:
        own = [value.tensor for value in operation.inputs() if value.is_parameter]
        begins = operation.call.path not in outer or bool(own)
        if not layers or (begins and operation.call != current):
            path = operation.call.path or (own[0] if own else "input")
            if begins and current is None and layers:
                layers[0].name = _unique(path, taken)  # operators before the first module belong to its layer
            else:
                layers.append(Route(_unique(path, taken) if begins else ""))
            current = operation.call if begins else None
        layers[-1].operations.append(operation)
    if layers and not layers[0].name:
        layers[0].name = _unique("model", taken)
    return layers


def _unique(name: str, taken: set[str]) -> str:
    """Returns the name, with a number if it is taken. Then the name is taken."""
    numbers = itertools.count(1)
    found = name
    while found in taken:
        found = f"{name}_{next(numbers)}"
    taken.add(found)
    return found


def _keep_together(modes: list[list[Route]], memories: list[Memory]) -> list[list[Route]]:
    """Joins layers that must be in one stage: those between the first and last use of a buffer that an operation changes,
    as other stages would not see the change; those between the first and the last use of a number that is computed, as
    numbers do not leave a layer; and those within a ``torch.vmap``, which changes what operators on its thread do."""
    uses: dict[Value | str, list[int]] = {}  # of tensors by name, in all modes
    together: set[Value | str] = set()
    begun: list[int] = []
    spans: list[tuple[int, int]] = []
    for layers, memory in zip(modes, memories):
        for index, layer in enumerate(layers):
            for operation in layer.operations:
                for value in operation.inputs():
                    uses.setdefault(memory.owner(value).tensor or value, []).append(index)
                together.update(owner.tensor for owner in map(memory.owner, _changed_by(operation)) if owner.tensor)
                name = getattr(operation.function, "__name__", "")
                if name == "_vmap_increment_nesting":
                    begun.append(index)
                elif name == "_vmap_decrement_nesting":
                    spans.append((begun.pop(), index))
                if operation.result.is_number:
                    together.add(operation.result)
                    uses.setdefault(operation.result, []).append(index)
    spans += [(min(uses[value]), max(uses[value])) for value in together]
    return [_joined(layers, [span for span in spans if span[0] < span[1]]) for layers in modes]


class Memory(dict[Value, set[Value]]):
    """For each value that an operation computes, those whose memory it may share, and itself."""

    def __missing__(self, value: Value) -> set[Value]:
        return {value}

    def owner(self, value: Value) -> Value:
        """Returns the parameter, buffer or constant whose memory a value shares, else the value."""
        return next((each for each in self[value] if each.tensor), value)


def _memory_of(graph: Graph) -> Memory:
    memory = Memory()
    for operation in graph.operations:
        memory[operation.result] = {operation.result}.union(*(memory[each] for each in _viewed_by(operation)))
    return memory


def _viewed_by(operation: Operation) -> Iterable[Value]:
    """Returns the values whose memory the result of an operation may share."""
    if operation.function is operator.getitem:
        return operation.inputs()
    if operation.schema is None or all(result.alias_info is None for result in operation.schema.returns):
        return ()
    return inputs_of([each for argument, each in operation.given() if argument.alias_info])


def _changed_by(operation: Operation) -> Iterator[Value]:
    """Yields the values that an operation writes to."""
    if operation.schema is not None and operation.schema.name == OPERATOR:
        yield from (operation.args[0][number] for number in parsed(operation.args[2]).changed)
    for argument, value in operation.given():
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # The schema of batch norm does not tell that it writes to its running statistics.
        if writes or argument.name in ("running_mean", "running_var"):
            yield from inputs_of(value)


def _joined(layers: list[Route], spans: list[tuple[int, int]]) -> list[Route]:
    joined: list[Route] = []
    end = -1  # of what the last one joins
    for index, layer in enumerate(layers):
        if index > end:
            joined.append(layer)
        else:
            joined[-1].operations += layer.operations
        end = max([end, *(last for first, last in spans if first == index)])
    return joined


class Routes:
    """Routes each value from the layer that computes it to the layers that use it: as part of the activation if only the
    next layer does, else as a skip. Of a buffer, a copy leaves.

    The first layer has the inputs, and the last layer uses the outputs. ``owners`` tells which layer a parameter or buffer
    belongs to; else it is the first one that uses it. Sizes are read off tensors that a layer gets anyway, else off one without
    elements.
    """

    def __init__(self, graph: Graph, layers: list[Route], owners: Mapping[str, int], memory: Memory) -> None:
        self.routes, self._memory = layers, memory
        self._outputs = set(inputs_of(graph.outputs))
        self._source = dict.fromkeys(filter(None, graph.inputs), 0)  # the layer that has a value first
        self._source |= {value: owners[name] for name, value in graph.tensors.items() if name in owners}
        for index, each in enumerate(self.routes):
            for operation in each.operations:
                self._source.setdefault(operation.result, index)
        self._places = graph.sizes.places
        self._shapes: dict[Value, Value] = {}  # tensors without elements that have the sizes of inputs
        self._connect([self._needed_tensors(index) for index in range(len(self.routes))])

    def _needed_tensors(self, index: int) -> dict[Value, None]:
        """Returns the tensors that a layer uses and does not compute, in the order of use."""
        needed: dict[Value, None] = {}
        values = itertools.chain.from_iterable(operation.inputs() for operation in self.routes[index].operations)
        for value in itertools.chain(values, self._outputs if index == len(self.routes) - 1 else ()):
            if value.tensor:
                self._source.setdefault(value, index)
            if self._source.get(value, index) != index:  # from another layer
                needed[value] = None
            elif value.tensor and value not in self.routes[index].owned:
                self.routes[index].owned.append(value)
        self._find_sizes(index, needed)
        return needed

    def _find_sizes(self, index: int, needed: dict[Value, None]) -> None:
        """Describes a layer's numbers by sizes of tensors that it gets from other layers, else of the inputs. May add a tensor
        that only has sizes to ``needed``, those that the layer gets."""
        operations = list(self.routes[index].operations)
        resized = {next(each.inputs()) for each in operations if torch.Tag.inplace_view in getattr(each.function, "tags", ())}
        for value in resized:
            value.shape = tuple(size if isinstance(size, int) else None for size in value.shape)
        known: dict[Any, Size] = {}  # by expression
        for value in needed:
            _add_sizes(known, value)

        def find(expression: Any) -> Size | None:
            if expression.is_Symbol and expression not in known:
                size = self._places[expression]
                if index > 0 or size.value in resized:
                    size = Size(self._shape_of(size.value), size.dimension + 1, size.divisor)
                if index > 0:
                    needed[size.value] = None
                known[expression] = size
            return known.get(expression)

        for each in operations:
            each.args, each.kwargs = tree_map_only(
                Number, lambda number: Number(described(number.expression, find)), (each.args, each.kwargs)
            )

    def _shape_of(self, input: Value) -> Value:
        """Returns a tensor of the shape (0, *sizes of an input), which the first layer makes."""
        if input not in self._shapes:
            sizes = [0, *(Number(Size(input, dimension)) for dimension in range(len(input.shape)))]
            made = self._shapes[input] = Value(input.example, (0, *input.shape))
            operation = Operation(made, torch.ops.aten.new_empty.default, (input, sizes), {}, Call("", ""))
            self.routes[0].operations.insert(0, operation)
            self._source[made] = 0
        return self._shapes[input]

    def _connect(self, needs: list[dict[Value, None]]) -> None:
        takers: dict[Value, list[int]] = {}
        for index, needed in enumerate(needs):
            for value in needed:
                takers.setdefault(value, []).append(index)
        written = [map(_changed_by, each.operations) for each in self.routes]
        changed = [set[Value]().union(*map(self._memory.__getitem__, itertools.chain.from_iterable(each))) for each in written]
        skips: Counter[tuple[int, int]] = Counter()  # by their first and last layers
        for value, layers in takers.items():
            owner, giver = self._memory.owner(value), self._source[value]
            if value.tensor and value not in self.routes[giver].owned:
                self.routes[giver].owned.append(value)
            is_buffer = bool(owner.tensor) and not owner.is_parameter
            sent = self._copied(value, giver) if is_buffer else value
            # A layer that changes the value sends it on.
            ends = [index for index, taker in enumerate(layers, 1) if value in changed[taker] or index == len(layers)]
            for begin, end in itertools.pairwise([0, *ends]):
                self._send(sent, value, giver, layers[begin:end], skips)
                sent, giver = value, layers[end - 1]

    def _send(self, sent: Value, value: Value, giver: int, takers: list[int], skips: Counter[tuple[int, int]]) -> None:
        *others, last = takers
        if last == giver + 1:
            self.routes[giver].leaving.append(sent)
            self.routes[last].arriving.append(value)
            return
        skips[giver, last] += 1
        name = f"{self.routes[giver].name} -> {self.routes[last].name}"
        name += f" ({skips[giver, last]})" if skips[giver, last] > 1 else ""
        self.routes[giver].stashes.append((name, sent))
        for taker in others:
            self.routes[taker].peeks.append((name, value))
        self.routes[last].pops.append((name, value))

    def _copied(self, value: Value, index: int) -> Value:
        """Returns a copy of a value, which the layer makes. A recompute of its stage writes to buffers."""
        copy = Value(value.example, value.shape)
        self.routes[index].operations.append(Operation(copy, torch.ops.aten.clone.default, (value,), {}, Call("", "")))
        return copy


def _add_sizes(known: dict[Any, Size], value: Value) -> None:
    for dimension, size in enumerate(value.shape):
        if size is not None and not isinstance(size, int):
            factor, symbol = size.as_coeff_Mul()
            known[size] = Size(value, dimension)
            if symbol.is_Symbol and factor != 1:
                known.setdefault(symbol, Size(value, dimension, int(factor)))
