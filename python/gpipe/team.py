"""The calls that the ranks of a pipeline make together, besides its training."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.checks import check_number, check_whole, shown
from gpipe.core import Core

__all__ = ["TeamCalls"]


class TeamCalls(nn.Module):
    """The calls of :class:`gpipe.GPipe` that the ranks of a pipeline make together, in the same order, as they call
    ``forward``. An error of one is an error of all. In one process the calls return at once."""

    _core: Core

    def gather(self, data: bytes, what: str = "bytes") -> list[bytes]:
        """Returns the bytes that each rank gives, in order, on rank 0; an empty list on the others. ``what`` they are
        must be the same on all ranks."""
        with self._core.refusing():
            pipeline = self._core.pipeline()
            if not isinstance(data, bytes) or not isinstance(what, str):
                raise TypeError(f"gather takes bytes and what they are, a str, but got {type(data)} and {type(what)}")
        return pipeline.gather(data, what)

    def gather_timeline(self, timeline: _C.Timeline) -> _C.Timeline:
        """Returns the actions of all ranks on one axis of time, on rank 0; an empty timeline on the others. All trace
        the same calls."""
        with self._core.refusing():
            pipeline = self._core.pipeline()
            if not isinstance(timeline, _C.Timeline):
                raise TypeError(f"timeline must be a gpipe.Timeline, but is {shown(timeline)}")
        return pipeline.gather_timeline(timeline)

    def largest(self, number: int) -> int:
        """Returns the largest of the numbers, from 0 to 2**64 - 1, that the ranks give. So ranks stop at the same step:
        ``if pipe.largest(stop): break``."""
        with self._core.refusing():
            pipeline = self._core.pipeline()
            number = check_whole(number, "number", bits=64)
            if number < 0:
                raise ValueError(f"number must be from 0 to 2**64 - 1, but is {number}")
        return pipeline.largest(number)

    def sum_over_replicas(self, numbers: Iterable[float]) -> list[float]:
        """Returns the sums of the numbers that the first rank of each replica gives, such as scores of its part. All
        ranks give as many numbers and get the same bits."""
        with self._core.refusing():
            pipeline = self._core.pipeline()
            own = [check_number(number, "each of the numbers") for number in numbers]
        return pipeline.sum_over_replicas(own)

    def refusing(self) -> AbstractContextManager[None]:
        """Makes the other ranks' call raise an exception if a ``with`` block, which prepares the same call, does."""
        return self._core.refusing()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of the whole model by their total norm, as ``torch.nn.utils.clip_grad_norm_`` does in one
        process, with the same bits.

        Args:
            max_norm: the largest norm. Positive over ranks.
            norm_type: the type of the norm; ``inf`` for the largest absolute value. Positive over ranks.
            error_if_nonfinite: whether a total norm that is not finite is an error.

        Returns:
            The total norm before clipping.

        Raises:
            RuntimeError: for a total norm that is not finite, if asked for. The gradients are then unchanged.
        """
        with self._core.refusing():
            max_norm, norm_type = check_number(max_norm, "max_norm"), check_number(norm_type, "norm_type")
            if self._core.ranks is None:
                return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
            pipeline = self._core.pipeline()
        total: Tensor = pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return total
