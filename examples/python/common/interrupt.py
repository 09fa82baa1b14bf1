"""Stopping a program where it chooses."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Inside the context, the first SIGINT or SIGTERM is only recorded in `signal`. A second one ends the process at
    once."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> Interrupt:
        # A job that was started with a signal ignored continues to ignore it.
        self._previous = {each: signal.getsignal(each) for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        for each in self._previous:
            signal.signal(each, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each in self._previous:
            signal.signal(each, signal.SIG_DFL)
