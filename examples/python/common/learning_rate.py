"""Schedules of the learning rate, by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PATIENCE = 5
_PLATEAU_FACTOR = 0.1


def factor(schedule: str, epoch: int, epochs: int, scores: Sequence[float]) -> float:
    """What to multiply the learning rate with in an epoch, from 1 on, after epochs with such scores. It depends on
    nothing else, so that a snapshot needs to say nothing about it."""
    if schedule == "plateau":
        return _PLATEAU_FACTOR ** _drops(scores)
    return (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2


def _drops(scores: Sequence[float]) -> int:
    """How often a tenth has been taken: whenever the score had not risen for so many epochs."""
    count, waited, best = 0, 0, -math.inf
    for score in scores:
        waited = 0 if score > best else waited + 1
        best = max(best, score)
        if waited == _PATIENCE:
            count, waited = count + 1, 0
    return count
