"""Python's and NumPy's global generators, which a recompute must find as the forward found them.

Draws of PyTorch come from a :class:`gpipe.RandomScope`. ``random`` and ``numpy.random`` have one global generator each,
which all stages draw from. A stage that draws from them runs its forwards and recomputes alone, under a lock: so a
recompute repeats the draws of its forward.
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

_lock = threading.Lock()
_thread = threading.local()


def _state() -> tuple[Any, Any]:
    """The states of both generators, comparable; None for NumPy's while it is not imported."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate(), None
    name, key, *rest = numpy.get_state()
    return random.getstate(), (name, key.tobytes(), *rest)


def _set_state(state: tuple[Any, Any]) -> None:
    python, of_numpy = state
    random.setstate(python)
    if of_numpy is not None:
        import numpy

        name, key, *rest = of_numpy
        numpy.random.set_state((name, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


@contextmanager
def _alone() -> Iterator[None]:
    with _lock:
        _thread.alone = True
        try:
            yield
        finally:
            _thread.alone = False


@contextmanager
def shared() -> Iterator[None]:
    """Lets other stages draw while this one waits, as for a pipeline inside one of its layers."""
    if not getattr(_thread, "alone", False):
        yield
        return
    _thread.alone = False
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()
        _thread.alone = True


class Draws:
    """Repeats a stage's draws from the global generators in its recomputes. Used by one thread at a time."""

    def __init__(self) -> None:
        self._draws = False
        self._first = True  # whether the next forward is the first of a mini-batch, which shows if the stage draws

    def __call__(self, run: Callable[[Any], Any], input: Any) -> Any:
        """Calls ``run(input)``, the layers of the stage.

        Raises:
            RuntimeError: when a recompute drew other numbers than its forward.
        """
        if is_checkpointing():
            return self._forward(run, input)
        return self._recompute(run, input) if is_recomputing() else run(input)

    def _forward(self, run: Callable[[Any], Any], input: Any) -> Any:
        if not (self._draws or self._first):
            return run(input)
        with _alone():
            before = _state()
            output = run(input)
            after = _state()
        self._first = False
        self._draws = after != before
        if self._draws:
            _C.keep_for_recompute((before, after))
        return output

    def _recompute(self, run: Callable[[Any], Any], input: Any) -> Any:
        self._first = True
        kept = _C.kept_for_recompute()
        if kept is None:
            return run(input)
        before, after = kept
        with _alone():
            now = _state()
            _set_state(before)
            try:
                output = run(input)
                end = _state()
            finally:
                _set_state(now)
        if end not in (before, after):  # where the stage draws nothing, another thread drew during its forward
            raise RuntimeError(
                "a recompute drew other numbers from Python's or NumPy's global generator than its forward, because "
                "other threads draw from it too: draw with torch instead, or use checkpoint='never'"
            )
        return output
