"""Schedules of the learning rate, by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PATIENCE = 5
_PLATEAU_FACTOR = 0.1


def factor(schedule: str, epoch: int, epochs: int, scores: Sequence[float]) -> float:
    """Returns the factor of the learning rate in an epoch, counted from 1. `scores` are those of the epochs before it.
    `schedule` is "cosine" or "plateau". The factor depends on nothing else, so a snapshot need not store a schedule's
    state."""
    if schedule == "plateau":
        return _PLATEAU_FACTOR ** _plateaus(scores)
    return (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2


def _plateaus(scores: Sequence[float]) -> int:
    """How often the score has failed to rise for _PATIENCE epochs in a row."""
    count, waited, best = 0, 0, -math.inf
    for score in scores:
        waited = 0 if score > best else waited + 1
        best = max(best, score)
        if waited == _PATIENCE:
            count, waited = count + 1, 0
    return count
