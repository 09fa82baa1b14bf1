"""The random numbers of the C++ programs, so that both split, shuffle and augment alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MASK = 2**64 - 1


class Random:
    """A SplitMix64 generator. Different streams of one seed are independent."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._state = seed
        self._state = self.next() ^ (stream * 0xD1342543DE82EF95 & _MASK)

    def next(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + ((self.next() >> 32) * (high - low + 1) >> 32)

    def chance(self, percent: int) -> bool:
        """True in `percent` of 100 cases."""
        return self.between(1, 100) <= percent

    def shuffle(self, items: list[Any]) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = self.between(0, i)
            items[i], items[j] = items[j], items[i]


def mini_batches(count: int, size: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The numbers of `count` images in an epoch's order, cut into mini-batches."""
    order = list(range(count))
    Random(seed, epoch).shuffle(order)
    return torch.split(torch.tensor(order), size)
