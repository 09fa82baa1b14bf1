"""Ending a program at a place of its choice."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is only noted, in `signal`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> Interrupt:
        # A job that was started to ignore a signal goes on to.
        self._previous = {each: signal.getsignal(each) for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        for each in self._previous:
            signal.signal(each, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each in self._previous:
            signal.signal(each, signal.SIG_DFL)
