"""The calls that the ranks of a pipeline make together, besides its training."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TypeVar, cast

import torch

from gpipe import _C
from gpipe.checks import check_is, check_numbers, check_text, check_whole
from gpipe.core import StagedModel

_Result = TypeVar("_Result")


class Team:
    """The calls that the ranks of a pipeline make together, in the same order, as they call its ``forward``: ``pipe.team``.
    An error of one is an error of all. In one process the calls return at once."""

    def __init__(self, pipe: StagedModel) -> None:
        self._pipe = pipe

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes the other ranks' call raise an exception if a ``with`` block, which prepares the same call, does."""
        try:
            yield
        except Exception as error:
            if self._pipe.ranks is not None and self._pipe._made is not None:
                self._pipe._made.withdraw(f"{type(error).__name__}: {error}")
            raise

    def gather(self, data: bytes, what: str = "bytes") -> list[bytes]:
        """Returns the bytes that each rank gives, in order, on rank 0; an empty list on the others. ``what`` they are
        must be the same on all ranks."""
        with self.refusing():
            pipeline = self._pipe._pipeline()
            checked = check_is(data, "data", bytes, "bytes"), check_text(what, "what")
        return pipeline.gather(*checked)

    def of_last_stage(self, work: Callable[[], _Result]) -> _Result:
        """Returns what ``work`` returns on the rank of the last stage, on all ranks of its replica: tensors, which are on the
        CPU there, and plain Python types. ``pipe.evaluate`` calls it."""
        if self._pipe.ranks is None or not self._pipe.balance:
            return work()
        written = BytesIO()
        is_here = self._pipe._is_here[-1]
        with self.refusing():
            if is_here:
                torch.save(result := work(), written)
        shared = self._pipe._pipeline().share(written.getvalue())
        return result if is_here else cast(_Result, torch.load(BytesIO(shared), map_location="cpu", weights_only=True))

    def gather_timeline(self, timeline: _C.Timeline) -> _C.Timeline:
        """Returns the actions of all ranks on one axis of time, on rank 0; an empty timeline on the others. All trace
        the same calls."""
        with self.refusing():
            pipeline = self._pipe._pipeline()
            checked = check_is(timeline, "timeline", _C.Timeline, "a gpipe.Timeline")
        return pipeline.gather_timeline(checked)

    def largest(self, number: int) -> int:
        """Returns the largest of the numbers, from 0 to 2**64 - 1, that the ranks give. So ranks stop at the same step:
        ``if pipe.team.largest(stop): break``."""
        with self.refusing():
            pipeline = self._pipe._pipeline()
            if (checked := check_whole(number, "number", bits=64)) < 0:
                raise ValueError(f"number must be from 0 to 2**64 - 1, but is {checked}")
        return pipeline.largest(checked)

    def sum_over_replicas(self, numbers: Iterable[float]) -> list[float]:
        """Returns the sums of the numbers that the first rank of each replica gives, such as scores of its part. All
        ranks give as many numbers and get the same bits."""
        with self.refusing():
            pipeline = self._pipe._pipeline()
            checked = check_numbers(numbers, "the numbers")
        return pipeline.sum_over_replicas(checked)

    def spread_overflow(self) -> None:
        """Makes the gradients of all ranks infinite if one of any rank is not finite, so that the ``GradScaler`` of each
        skips the optimizer's step and lowers its scale. ``step(..., scale=scaler)`` calls it. After a ``backward()`` over
        ranks, call it before the scaler's ``step``."""
        gradients = [each.grad for each in self._pipe.parameters() if each.grad is not None]
        dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        norm = torch.nn.utils.get_total_norm(dense, math.inf) if dense else torch.zeros(())
        if self.largest(int(not norm.isfinite())):
            for each in gradients:
                (each._values() if each.is_sparse else each).detach().fill_(math.inf)

    def common_scale(self, scale: float) -> float:
        """Returns the scale of the ranks' GradScalers. That of a rank without parameters to train is never updated, so it
        does not count. Raises ValueError if the others have different scales."""
        trains = any(each.requires_grad for each in self._pipe.parameters())
        (bits,) = struct.unpack("<Q", struct.pack("<d", scale if trains else 0.0))  # in the order of the numbers
        (largest,) = struct.unpack("<d", struct.pack("<Q", self.largest(bits)))
        with self.refusing():  # the other ranks go on
            if trains and largest != scale:
                raise ValueError(f"scale is {scale:g}, but {largest:g} on another rank; make equal GradScalers on all ranks")
        return float(largest) or scale
