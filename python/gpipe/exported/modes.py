"""Combines the graphs of a model in training and in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten

from gpipe.exported.graph import Choice, Graph, Operation, Value, itself, map_values

__all__ = ["combine_modes", "evaluation_of"]


def combine_modes(training: Graph, evaluation: Graph) -> Graph:
    """Adds what evaluation mode does differently to the graph of training mode.

    An operation of one graph corresponds to the one of the other graph with the same module and function, in the same
    order. The others run in one mode only. Arguments that differ become a :class:`Choice`.

    Returns:
        The first graph, changed.

    Raises:
        NotImplementedError: if the modes differ in what the model returns, or in which value an operation uses.
    """
    return _Combination(training, evaluation).graph


def evaluation_of(graph: Graph) -> Graph:
    """Returns what a graph of training mode computes in evaluation mode, as far as operators tell: dropout, batch norm and
    other operators that are given the mode, and the counter of batch norm.

    Raises:
        ValueError: if the graph is of evaluation mode, or draws random numbers in another way.
    """
    names = {value: name for name, value in graph.tensors.items()}
    operations = []
    flags = []
    for each in graph.operations:
        first = each.args[0] if each.args else None
        if isinstance(first, Value) and names.get(first, "").endswith("num_batches_tracked"):
            continue
        args, kwargs = list(each.args), dict(each.kwargs)
        arguments = [argument.name for argument in each.declared()]
        modes = [name for name in _MODES if name in arguments]
        if "running_mean" in arguments and each.args[arguments.index("running_mean")] is None:
            operations.append(each)  # uses the statistics of its input in both modes
            continue
        for name in modes:
            at = arguments.index(name)
            if at < len(args):
                flags.append(bool(args[at]))
                args[at] = type(args[at])(0)
            elif name in kwargs:
                flags.append(bool(kwargs[name]))
                kwargs[name] = type(kwargs[name])(0)
        if not modes and torch.Tag.nondeterministic_seeded in getattr(each.function, "tags", ()):
            raise ValueError(
                f"cannot tell what '{each.call.path}' does in evaluation mode, because it calls {each.function}; convert "
                "the module instead of the exported program"
            )
        operations.append(replace(each, args=tuple(args), kwargs=kwargs))
    if flags and not any(flags):
        raise ValueError("the program was exported in evaluation mode; export the module in training mode")
    return replace(graph, operations=operations, outputs=list(graph.outputs))


_MODES = ("train", "training", "use_input_stats", "dropout_p")  # arguments of operators


class _Combination:
    def __init__(self, training: Graph, evaluation: Graph) -> None:
        self.graph = training
        self._same: dict[Value, Value] = {}  # of evaluation: the value in training
        for name, value in evaluation.tensors.items():
            self._same[value] = training.tensors.setdefault(name, value)
        for ours, theirs in zip(training.inputs, evaluation.inputs, strict=True):
            if theirs is not None:
                assert ours is not None
                self._same[theirs] = ours
        self._names = {operation.result.name for operation in training.operations}
        self._aliases: dict[Value, tuple[bool, Value]] = {}  # the mode in which a value equals another
        self._modes: dict[Value, bool | None] = {}  # of an operation's result
        order = []
        for ours_at, theirs_at in _aligned(training.operations, evaluation.operations):
            order.append(self._combined(ours_at, theirs_at))
        self._compare_outputs(training, evaluation)
        self.graph.operations = list(self._with_aliases(order))

    def _combined(self, ours: Operation | None, theirs: Operation | None) -> Operation:
        if theirs is None:
            assert ours is not None
            ours.training = True
            self._modes[ours.result] = True
            return ours
        args, kwargs = theirs.args, theirs.kwargs
        if ours is not None:
            self._same[theirs.result] = ours.result
            self._modes[ours.result] = None
            if tree_structure((ours.args, ours.kwargs)) != tree_structure((args, kwargs)):
                ours.args, ours.kwargs = (), _all_arguments(ours)  # one mode may leave defaults out
                args, kwargs = (), _all_arguments(theirs)
            ours.args, ours.kwargs = self._merged((ours.args, ours.kwargs), (args, kwargs), ours)
            return ours
        theirs.args, theirs.kwargs = map_values((args, kwargs), self._same.__getitem__)
        theirs.training = False
        self._modes[theirs.result] = False
        self._same[theirs.result] = theirs.result
        while theirs.result.name in self._names:
            theirs.result.name += "_eval"
        self._names.add(theirs.result.name)
        return theirs

    def _merged(self, ours: Any, theirs: Any, where: Operation) -> Any:
        """Returns arguments for both modes."""
        leaves, tree = tree_flatten(ours)
        others, other_tree = tree_flatten(map_values(theirs, self._same.__getitem__))
        if tree != other_tree:
            raise _different(where)
        return tree_unflatten([self._leaf(*pair, where) for pair in zip(leaves, others, strict=True)], tree)

    def _leaf(self, ours: Any, theirs: Any, where: Operation) -> Any:
        if isinstance(ours, Value) != isinstance(theirs, Value):
            raise _different(where)
        if not isinstance(ours, Value):
            same = ours is theirs or (type(ours) is type(theirs) and ours == theirs)
            return ours if same else Choice(ours, theirs)
        if ours is theirs:
            return ours
        if self._modes.get(ours) is True:
            return self._alias(ours, False, theirs, where)
        if self._modes.get(theirs) is False:
            return self._alias(theirs, True, ours, where)
        raise _different(where)

    def _alias(self, value: Value, mode: bool, other: Value, where: Operation) -> Value:
        """Makes a value of one mode equal to another value in the other mode."""
        if self._aliases.setdefault(value, (mode, other)) != (mode, other):
            raise _different(where)
        return value

    def _compare_outputs(self, training: Graph, evaluation: Graph) -> None:
        if training.out_spec != evaluation.out_spec:
            raise NotImplementedError(
                "in evaluation mode the model returns another structure than in training mode "
                f"({evaluation.out_spec} instead of {training.out_spec}); convert it with an option that turns such "
                "outputs off"
            )
        where = training.operations[-1]
        self.graph.outputs = self._merged(training.outputs, evaluation.outputs, where)

    def _with_aliases(self, order: list[Operation]) -> Iterator[Operation]:
        """Yields the operations, and one for each alias as soon as both values exist."""
        waiting = dict(self._aliases)
        known = {value for value in [*self.graph.inputs, *self.graph.tensors.values()] if value is not None}
        for operation in order:
            yield operation
            known.add(operation.result)
            for value, (mode, other) in list(waiting.items()):
                if value in known and other in known:
                    del waiting[value]
                    yield Operation(value, itself, (other,), {}, operation.call, mode)
        assert not waiting


def _all_arguments(operation: Operation) -> dict[str, Any]:
    """Returns the arguments of an operator by name, with defaults."""
    if operation.schema is None:
        raise _different(operation)
    defaults = {each.name: each.default_value for each in operation.declared() if each.has_default_value()}
    return {**defaults, **{argument.name: value for argument, value in operation.given()}}


def _aligned(ours: list[Operation], theirs: list[Operation]) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Yields pairs of corresponding operations, and the others alone."""

    def keys(operations: list[Operation]) -> list[tuple[str, str, str]]:
        return [(*each.call, str(each.function)) for each in operations]

    matcher = SequenceMatcher(None, keys(ours), keys(theirs), autojunk=False)
    for tag, first, last, other_first, other_last in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(ours[first:last], theirs[other_first:other_last])
            continue
        yield from ((each, None) for each in ours[first:last])
        yield from ((None, each) for each in theirs[other_first:other_last])


def _different(where: Operation) -> NotImplementedError:
    return NotImplementedError(
        f"'{where.call.path or 'the model itself'}' computes {where.function} from other values in evaluation mode than in "
        "training mode"
    )
