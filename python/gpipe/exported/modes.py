"""Combines the graphs of a model in training and in evaluation mode."""

import math
from collections.abc import Container, Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_structure, tree_unflatten

from gpipe.exported.graph import Call, Choice, Graph, Mode, Operation, Value, inputs_of
from gpipe.exported.layer import check_modes


class Combination:
    """Adds what evaluation mode does differently to the graph of training mode. ``called`` are the paths of the modules that
    are called in both modes.

    Operations of the two graphs with the same call and function, in the same order, correspond. Their arguments that differ
    become a :class:`Choice`. The other operations run in one mode: that of the innermost module around them that is called
    in both modes and computes different things in them, because a module may decide by its mode what it computes or calls.
    """

    def __init__(self, training: Graph, evaluation: Graph, called: Container[str]) -> None:
        self.graph = training
        self._called = called
        self._computed = _computed(training), _computed(evaluation)
        self._same: dict[Value, Value] = {}  # of evaluation: the value in training
        for name, value in evaluation.tensors.items():
            self._same[value] = training.tensors.setdefault(name, value)
        for ours, theirs in zip(training.inputs, evaluation.inputs, strict=True):
            if theirs is not None:
                assert ours is not None
                self._same[theirs] = ours
                shapes = zip(ours.shape, theirs.shape, strict=True)
                ours.shape = tuple(other if isinstance(other, int) else size for size, other in shapes)
        self._sources: dict[Value, Operation] = {}
        order: list[Operation] = []
        for pair in _aligned(training.operations, evaluation.operations):
            order += self._combined(*pair)
        self.graph.sizes.merge(evaluation.sizes, self._same)
        self.graph.out_specs = training.out_specs[0], evaluation.out_specs[0]
        theirs_out = tree_map_only(Value, self._same.__getitem__, evaluation.outputs)
        self.graph.outputs = [_choice("", *pair) for pair in zip_longest(training.outputs, theirs_out)]
        self.graph.operations = list(self._checked(order))

    def _combined(self, ours: Operation | None, theirs: Operation | None) -> Iterator[Operation]:
        """Yields one operation for both modes, or one for each."""
        if ours is not None:
            yield self._sources.setdefault(ours.result, ours)
            if theirs is not None and self._share_arguments(ours, theirs):
                self._same[theirs.result] = ours.result
                shapes = ours.result.shape, theirs.result.shape
                ours.result.shape = tuple(size if size == other else None for size, other in zip_longest(*shapes))
                return
            ours.result.mode = Mode(self._decider(ours.call), True)
        if theirs is not None:
            theirs.args, theirs.kwargs = tree_map_only(Value, self._same.__getitem__, (theirs.args, theirs.kwargs))
            theirs.result.mode = Mode(self._decider(theirs.call), False)
            self._same[theirs.result] = theirs.result
            yield self._sources.setdefault(theirs.result, theirs)

    def _share_arguments(self, ours: Operation, theirs: Operation) -> bool:
        """Gives an operation the arguments of both modes. Returns whether it could."""
        if [each.settings for each in ours.contexts] != [each.settings for each in theirs.contexts]:
            return False
        arguments: Any = (ours.args, ours.kwargs), (theirs.args, theirs.kwargs)
        if ours.schema is not None and tree_structure(arguments[0]) != tree_structure(arguments[1]):
            # One mode may leave defaults out.
            arguments = ((), _all_arguments(ours)), ((), _all_arguments(theirs))
        leaves, tree = tree_flatten(arguments[0])
        others, other_tree = tree_flatten(tree_map_only(Value, self._same.__getitem__, arguments[1]))
        if tree != other_tree:
            return False
        ours.args, ours.kwargs = tree_unflatten([self._leaf(*pair, ours.call) for pair in zip(leaves, others)], tree)
        return True

    def _leaf(self, ours: Any, theirs: Any, call: Call) -> Any:
        """Returns the argument of a call for both modes."""
        differ = ours is not theirs and (isinstance(ours, Value) or isinstance(theirs, Value))
        return _choice(self._chooser(ours, theirs, call) if differ else call.path, ours, theirs)

    def _chooser(self, ours: Any, theirs: Any, call: Call) -> str:
        """Returns the path of the module that passes one or the other argument to a call."""
        sources = [self._sources[each] for each in (ours, theirs) if isinstance(each, Value) and each in self._sources]
        for source in sources:
            if source.result.mode is not None:
                return source.result.mode.path
        around = {each for source in sources for each in source.call.around()}
        return self._decider(next((each for each in call.around() if each in around or not sources), call))

    def _checked(self, operations: list[Operation]) -> Iterator[Operation]:
        """Yields the operations, and checks before those that exist or choose by one module's mode and use what another
        module's mode decides about. These modules must be in one mode, because the exports show no other case."""
        deciders: dict[tuple[Value, bool], set[str]] = {}
        for operation in operations:
            if (mode := operation.result.mode) is not None:
                deciders[operation.result, mode.training] = {mode.path}
            for (path, training), value in _uses(None, (operation.args, operation.kwargs)):
                deciders.setdefault((value, training), set()).add(path)
        checked: set[tuple[str, str]] = set()
        shaping: set[str] = set()  # modules whose modes may decide about shapes

        def check(path: str, others: set[str], call: Call) -> Iterator[Operation]:
            for other in sorted(others - {path}):
                if (path, other) not in checked:
                    checked.add((path, other))
                    args = (path, Choice(path, True, False), other, Choice(other, True, False))
                    yield Operation(Value(None), check_modes, args, {}, call)

        def checks(uses: Iterator[tuple[Mode, Value]], call: Call) -> Iterator[Operation]:
            for (path, training), value in uses:
                yield from check(path, deciders.get((value, training), set()), call)

        for operation in operations:
            yield from checks(_uses(operation.result.mode, (operation.args, operation.kwargs)), operation.call)
            choices = [each for each in _choices((operation.args, operation.kwargs)) if not _is_setting(each)]
            for choice in choices:
                if not any(inputs_of((choice.training, choice.evaluation))):  # of numbers
                    yield from check(choice.path, shaping, operation.call)
            yield operation
            shaping |= {each.path for each in (*choices, operation.result.mode) if each is not None}
        yield from checks(_uses(None, self.graph.outputs), operation.call)

    def _decider(self, call: Call) -> str:
        """Returns the path of the innermost module around a call whose mode decides what it computes."""
        ours, theirs = self._computed
        called = (each for each in call.around() if each.path in self._called)
        return next((each.path for each in called if ours.get(each.key) != theirs.get(each.key)), "")


def _choices(arguments: Any) -> Iterator[Choice]:
    leaves = tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, Choice))
    return (leaf for leaf in leaves if isinstance(leaf, Choice))


def _is_setting(choice: Choice) -> bool:
    """Returns whether a choice is between flags, rates or texts, such as of dropout, which shapes do not depend on."""
    return all(isinstance(each, (bool, float, str)) for each in (choice.training, choice.evaluation))


def _uses(mode: Mode | None, arguments: Any) -> Iterator[tuple[Mode, Value]]:
    """Yields the values among an operation's arguments that are used in one mode only, each with the mode."""
    if mode is not None:
        yield from ((mode, value) for value in inputs_of(arguments))
    for choice in _choices(arguments):
        yield from ((Mode(choice.path, True), value) for value in inputs_of(choice.training))
        yield from ((Mode(choice.path, False), value) for value in inputs_of(choice.evaluation))


def _choice(path: str, ours: Any, theirs: Any) -> Any:
    """Returns what is one thing in training mode and another in evaluation mode."""
    same = ours is theirs or (type(ours) is type(theirs) and ours == theirs)
    both_nan = all(isinstance(each, float) and math.isnan(each) for each in (ours, theirs))
    return ours if same or both_nan else Choice(path, ours, theirs)


def _computed(graph: Graph) -> dict[str, list[tuple[str, str]]]:
    """Returns what each call of a module computes, in order: the innermost call and the function of each operation."""
    found: dict[str, list[tuple[str, str]]] = {}
    for operation in graph.operations:
        for call in operation.call.around():
            found.setdefault(call.key, []).append((operation.call.key, str(operation.function)))
    return found


def _all_arguments(operation: Operation) -> dict[str, Any]:
    """Returns the arguments of an operator by name, with defaults."""
    defaults = {each.name: each.default_value for each in operation.declared() if each.has_default_value()}
    return defaults | {argument.name: value for argument, value in operation.given()}


def _aligned(ours: list[Operation], theirs: list[Operation]) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Yields pairs of corresponding operations, and the others alone."""
    keys = [[(each.call.key, each.call.path, str(each.function)) for each in side] for side in (ours, theirs)]
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for tag, first, last, other_first, other_last in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(ours[first:last], theirs[other_first:other_last])
            continue
        yield from ((each, None) for each in ours[first:last])
        yield from ((None, each) for each in theirs[other_first:other_last])
