"""The progress of work, shown on standard output."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_BAR_WIDTH = 24
_BAR_PERIOD = 0.1  # seconds
_LINE_PERIOD = 10.0


class Progress:
    """Shows the progress of one pass over images: on a terminal as a bar that is redrawn in place, at most ten times a
    second; elsewhere as a line every ten seconds. Both end with a line."""

    def __init__(self, label: str, images: int) -> None:
        self._label = label
        self._images = images
        self._done = 0
        self.images_per_second = 0.0
        self._start = self._shown = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and 0 < self._done < self._images:
            print(flush=True)  # so that the next output starts on a new line

    def add(self, images: int, loss: float) -> None:
        self._done += images
        now = time.monotonic()
        self.images_per_second = self._done / max(now - self._start, 1e-9)
        finished = self._done >= self._images
        if not finished and now - self._shown < (_BAR_PERIOD if self._terminal else _LINE_PERIOD):
            return
        self._shown = now
        text = self._text(loss, finished)
        if self._terminal:
            print(f"\r{text}\033[K", end="\n" if finished else "", flush=True)
        else:
            print(text, flush=True)

    def _text(self, loss: float, finished: bool) -> str:
        bar = ""
        if self._terminal:
            filled = self._done * _BAR_WIDTH // self._images
            bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]  "
        rate = self.images_per_second
        seconds = time.monotonic() - self._start if finished else (self._images - self._done) / rate
        rest = f"{'in' if finished else 'ETA'} {int(seconds) // 60}:{int(seconds) % 60:02}"
        return f"{self._label}  {bar}{self._done}/{self._images}  loss {loss:.4f}  {rate:.1f} images/s  {rest}"


def show_percent(part: float) -> None:
    """Shows on a terminal how much of the measuring is done, from 0 to 1, in a line that is erased at the end."""
    if sys.stdout.isatty():
        print(f"\rmeasuring {part:4.0%}" if part < 1 else "\r\033[K", end="", flush=True)
