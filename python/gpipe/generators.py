"""Makes recomputes repeat the draws of Python's and NumPy's global generators.

``random`` and ``numpy.random`` have one global generator each, which all stages share. A stage that draws from them
runs its forwards and recomputes under a lock, and each recompute starts from the state that its forward started from.
(PyTorch's draws come from a :class:`gpipe.RandomScope` instead.)
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpipe import _C
from gpipe.checkpoint import is_checkpointing, is_recomputing

__all__ = ["Draws", "GeneratorState", "without_turn"]

_lock = threading.Lock()
_thread = threading.local()


@contextmanager
def _turn() -> Iterator[None]:
    """Holds the lock for a block."""
    with _lock:
        _thread.has_turn = True
        try:
            yield
        finally:
            _thread.has_turn = False


@contextmanager
def without_turn() -> Iterator[None]:
    """Releases the lock for a block, if this thread holds it. For a stage that waits for a pipeline inside one of its
    layers, whose stages may need the lock."""
    if not getattr(_thread, "has_turn", False):
        yield
        return
    _thread.has_turn = False
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()
        _thread.has_turn = True


class GeneratorState:
    """The state of both generators."""

    def __init__(self) -> None:
        self.python = random.getstate()
        numpy = sys.modules.get("numpy.random")  # None until something imports NumPy
        self.numpy = None if numpy is None else numpy.get_state()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratorState) and self._comparable() == other._comparable()

    def _comparable(self) -> tuple[Any, Any]:
        if self.numpy is None:
            return self.python, None
        name, key, *rest = self.numpy
        return self.python, (name, key.tobytes(), *rest)

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


class Draws:
    """Repeats a stage's draws in its recomputes. Used by one thread at a time."""

    def __init__(self) -> None:
        self._draws = False  # whether the stage drew in its last forward under the lock
        self._first = True  # whether the next forward is the first of a mini-batch, which always takes the lock

    def __call__(self, run: Callable[[Any], Any], input: Any) -> Any:
        """Calls ``run(input)``, which runs the layers of the stage.

        Raises:
            RuntimeError: if a recompute drew other numbers than its forward.
        """
        if is_checkpointing():
            return self._forward(run, input)
        return self._recompute(run, input) if is_recomputing() else run(input)

    def _forward(self, run: Callable[[Any], Any], input: Any) -> Any:
        if not (self._draws or self._first):
            return run(input)
        with _turn():
            before = GeneratorState()
            output = run(input)
            after = GeneratorState()
        self._first = False
        self._draws = after != before
        if self._draws:
            _C.save_for_recompute((before, after))
        return output

    def _recompute(self, run: Callable[[Any], Any], input: Any) -> Any:
        self._first = True
        saved = _C.saved_for_recompute()
        if saved is None:
            return run(input)
        before, after = saved
        with _turn():
            now = GeneratorState()
            before.restore()
            try:
                output = run(input)
                end = GeneratorState()
            finally:
                now.restore()
        # A stage that draws nothing ends in `before`: then another thread drew during its forward, which is harmless.
        if end not in (before, after):
            raise RuntimeError(
                "a recompute drew other numbers from Python's or NumPy's global generator than its forward, because "
                "other threads draw from it too; draw with torch instead, or use checkpoint='never'"
            )
        return output
