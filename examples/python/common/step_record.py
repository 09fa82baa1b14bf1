"""The cost of training steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gpipe
from common.files import writing
from common.processes import is_first
from common.units import bytes_to_text, seconds_to_text
from gpipe.balance import Prediction

_WARM_STEPS = 2


class StepRecord:
    """Measures steps, forward and backward, and traces one of them. The first two steps are not measured, because they warm
    up memory and caches. Over ranks, rank 0 records the traced step of all.

    Args:
        trace: file for the timeline of the traced step.
    """

    def __init__(self, trace: Path | None) -> None:
        self._trace = trace
        self._count = 0
        self._traced = False
        self._seconds: list[float] = []
        self._bytes: list[int] = []  # per worker, the most of the traced step

    @contextmanager
    def step(self, pipe: gpipe.GPipe, whole: bool, last: bool) -> Iterator[None]:
        """Measures the block as a step. Only steps of `whole` mini-batches are measured. The `last` step is traced if no
        other was."""
        timed = whole and self._count >= _WARM_STEPS
        timeline = gpipe.Timeline() if not self._traced and (timed or last) else None
        pipe.trace(timeline)
        start = time.perf_counter()
        yield
        self._count += 1
        if timeline is None:
            self._seconds += [time.perf_counter() - start] * timed
            return
        self._traced = True
        timeline = pipe.gather_timeline(timeline)
        if not is_first(pipe.ranks):
            return
        if whole:
            self._bytes = timeline.peak_bytes()
        if self._trace:
            with writing(self._trace):
                self._trace.write_text(timeline.to_chrome_json())

    @property
    def wrote_trace(self) -> bool:
        return self._traced and self._trace is not None

    def print(self, prediction: Prediction | None) -> None:
        """Prints what a step took, next to the prediction."""
        if self._seconds:
            took = f"{seconds_to_text(statistics.median(self._seconds))} (median of {len(self._seconds)})"
            predicted = f"; predicted: {seconds_to_text(prediction.seconds)}" if prediction else ""
            print(f"measured step, forward and backward: {took}{predicted}", flush=True)
        if self._bytes:
            used = ", ".join(map(bytes_to_text, self._bytes))
            predicted = ""
            if prediction:
                predicted = f"; predicted: {', '.join(map(bytes_to_text, prediction.timeline.peak_bytes()))}"
            print(f"peak memory per worker, without model and optimizer: {used}{predicted}", flush=True)
