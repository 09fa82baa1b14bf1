"""What training steps take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gpipe
from common.files import writing
from gpipe.balance import Prediction

_WARM = 2  # the first steps still warm memory and caches


class StepRecord:
    """Measures the steps of a process, forward and backward, and traces one of them."""

    def __init__(self, trace: Path | None) -> None:
        self.count = 0
        self.traced = False
        self._trace = trace
        self._seconds: list[float] = []  # of whole mini-batches
        self._bytes: list[int] = []  # by stage, the most of such a step

    @contextmanager
    def step(self, pipe: gpipe.GPipe, whole: bool, last: bool) -> Iterator[None]:
        """Measures what is done within: `whole` mini-batches count; the `last` step is traced if none was."""
        timed = whole and self.count >= _WARM
        timeline = gpipe.Timeline() if not self.traced and (timed or last) else None
        pipe.trace(timeline)
        start = time.perf_counter()
        yield
        self.count += 1
        if timeline is None:
            self._seconds += [time.perf_counter() - start] * timed
            return
        self.traced = True
        if whole:
            self._bytes = timeline.peak_bytes()
        if self._trace:
            with writing(self._trace):
                self._trace.write_text(timeline.to_chrome_json())

    def print_beside(self, prediction: Prediction | None) -> None:
        """What a step took, and what was predicted."""
        if self._seconds:
            took = f"{statistics.median(self._seconds) * 1e3:.3g} ms (median of {len(self._seconds)})"
            predicted = f"; predicted were {prediction.seconds * 1e3:.3g} ms" if prediction else ""
            print(f"a step, forward and backward, took {took}{predicted}", flush=True)
        if self._bytes:
            predicted = f"; predicted were {_mebibytes(prediction.timeline.peak_bytes())}" if prediction else ""
            used = _mebibytes(self._bytes)
            print(f"most in use by its stages, beside model and optimizer: {used}{predicted}", flush=True)


def _mebibytes(counts: Sequence[int]) -> str:
    return ", ".join(f"{count / 2**20:.3g} MiB" for count in counts)
