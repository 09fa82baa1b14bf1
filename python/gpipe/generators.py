"""Makes recomputes repeat the draws of the generators of Python and NumPy. PyTorch's have :class:`gpipe.RandomScope`.

A stage that draws from the global generators runs under a lock, because all stages share them. A recompute starts from the
state that its forward started from, also of generators that are attributes of a layer.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe import _C
from gpipe._C import is_checkpointing, is_recomputing

_turn = threading.RLock()


@contextmanager
def without_turn() -> Iterator[None]:
    """Releases the lock for a block, if this thread holds it: inside a layer, another pipeline may need the lock."""
    held = _turn._is_owned()  # type: ignore[attr-defined]
    if held:
        _turn.release()
    try:
        yield
    finally:
        if held:
            _turn.acquire()


class GeneratorState:
    """The state of both global generators, and of others."""

    restores = 0  # the starts and ends of restores; changes under the lock

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self._states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
        if numpy := sys.modules.get("numpy.random"):  # None until something imports NumPy
            self._states.append((numpy.set_state, numpy.get_state()))
        for each in others:
            if isinstance(each, random.Random):
                self._states.append((each.setstate, each.getstate()))
            elif hasattr(each, "bit_generator"):
                self._states.append((partial(setattr, each.bit_generator, "state"), each.bit_generator.state))
            else:
                self._states.append((each.set_state, each.get_state()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratorState) and self._comparable() == other._comparable()

    def _comparable(self) -> list[Any]:
        return [_without_arrays(state) for _, state in self._states]

    def restore(self) -> None:
        GeneratorState.restores += 1
        for restore, state in self._states:
            restore(state)
        GeneratorState.restores += 1


def is_generator(value: object) -> bool:
    """Returns whether a value is a generator of Python, NumPy or PyTorch, whose state :class:`GeneratorState` can hold."""
    numpy = sys.modules.get("numpy.random")
    return isinstance(value, (random.Random, torch.Generator, *((numpy.Generator, numpy.RandomState) if numpy else ())))


def _without_arrays(state: Any) -> Any:
    """Replaces arrays and tensors in a state by their bytes, which can be compared."""
    if isinstance(state, torch.Tensor):
        return bytes(state.tolist())
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple) and isinstance(state[0], str):  # of numpy.random
        return tuple(map(_without_arrays, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


class Draws:
    """Repeats a stage's draws in its recomputes. Used by one thread at a time."""

    def __init__(self, stage: nn.Module) -> None:
        values = (value for each in stage.modules() for value in vars(each).values())
        # Attributes of layers. A RandomScope repeats PyTorch's default generators.
        self._generators = [value for value in values if is_generator(value) and not isinstance(value, torch.Generator)]
        self._draws = False  # whether the stage was seen to draw
        self._may_draw = True  # whether the next forward takes the lock

    def __call__(self, run: Callable[[Any], Any], input: Any) -> Any:
        """Calls ``run(input)``, the stage's layers. Raises RuntimeError if a recompute drew other numbers."""
        if is_checkpointing():
            return self._forward(run, input)
        if is_recomputing():
            return self._recompute(run, input)
        with _turn if self._draws else nullcontext():  # other stages may be in a forward that is recomputed
            return run(input)

    def _forward(self, run: Callable[[Any], Any], input: Any) -> Any:
        with _turn if self._may_draw else nullcontext():
            restores = GeneratorState.restores
            before = GeneratorState(self._generators)
            output = run(input)
            after = GeneratorState(self._generators)
        # Without the lock, another stage may have drawn, and its recompute may have undone draws of this one.
        is_unknown = restores != GeneratorState.restores
        changed = is_unknown or after != before
        self._draws = self._draws or (changed and self._may_draw)
        self._may_draw = changed or self._draws
        if changed:
            _C.save_for_recompute((before, before if is_unknown else after))
        return output

    def _recompute(self, run: Callable[[Any], Any], input: Any) -> Any:
        saved = _C.saved_for_recompute()
        if saved is None:
            return run(input)
        before, after = saved
        with _turn:
            now = GeneratorState(self._generators)
            before.restore()
            try:
                output = run(input)
                end = GeneratorState(self._generators)
            finally:
                now.restore()
        # A stage that draws nothing ends in `before`: then another thread drew during its forward, which is harmless.
        if end not in (before, after):
            raise RuntimeError(
                "a recompute drew other numbers from Python's or NumPy's global generator than its forward, because "
                "another thread drew from it too; repeat the call if this was its first, else draw with torch or use "
                "checkpoint='never'"
            )
        return output
