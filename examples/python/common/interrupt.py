"""Stopping a program where it chooses."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Inside the context, the first SIGINT or SIGTERM is only recorded in `signal`.

    Args:
        second_ends: whether a second one ends the process at once; otherwise it does nothing. A launcher passes on a signal
            that the terminal has sent already, and ends by force a program that takes too long.
    """

    def __init__(self, second_ends: bool) -> None:
        self.signal = 0
        self._second_ends = second_ends

    def __enter__(self) -> Interrupt:
        # A job that was started with a signal ignored continues to ignore it.
        self._previous = {each: signal.getsignal(each) for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        for each in self._previous:
            signal.signal(each, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.signal and not self._second_ends:
            return  # the program is about to end
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        for each in self._previous if self._second_ends else ():
            signal.signal(each, signal.SIG_DFL)
