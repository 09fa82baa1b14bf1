"""The calls that the ranks of a pipeline make together, besides its training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gpipe import _C
from gpipe.checks import check_is, check_number, check_numbers, check_text, check_whole
from gpipe.core import StagedModel


class TeamCalls(StagedModel):
    """The calls of :class:`gpipe.GPipe` that the ranks of a pipeline make together, in the same order, as they call
    ``forward``. An error of one is an error of all. In one process the calls return at once."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes the other ranks' call raise an exception if a ``with`` block, which prepares the same call, does."""
        try:
            yield
        except Exception as error:
            if self.ranks is not None and self._made is not None:
                self._made.withdraw(f"{type(error).__name__}: {error}")
            raise

    def gather(self, data: bytes, what: str = "bytes") -> list[bytes]:
        """Returns the bytes that each rank gives, in order, on rank 0; an empty list on the others. ``what`` they are
        must be the same on all ranks."""
        with self.refusing():
            pipeline = self._pipeline()
            checked = check_is(data, "data", bytes, "bytes"), check_text(what, "what")
        return pipeline.gather(*checked)

    def gather_timeline(self, timeline: _C.Timeline) -> _C.Timeline:
        """Returns the actions of all ranks on one axis of time, on rank 0; an empty timeline on the others. All trace
        the same calls."""
        with self.refusing():
            pipeline = self._pipeline()
            checked = check_is(timeline, "timeline", _C.Timeline, "a gpipe.Timeline")
        return pipeline.gather_timeline(checked)

    def largest(self, number: int) -> int:
        """Returns the largest of the numbers, from 0 to 2**64 - 1, that the ranks give. So ranks stop at the same step:
        ``if pipe.largest(stop): break``."""
        with self.refusing():
            pipeline = self._pipeline()
            if (checked := check_whole(number, "number", bits=64)) < 0:
                raise ValueError(f"number must be from 0 to 2**64 - 1, but is {checked}")
        return pipeline.largest(checked)

    def sum_over_replicas(self, numbers: Iterable[float]) -> list[float]:
        """Returns the sums of the numbers that the first rank of each replica gives, such as scores of its part. All
        ranks give as many numbers and get the same bits."""
        with self.refusing():
            pipeline = self._pipeline()
            checked = check_numbers(numbers, "the numbers")
        return pipeline.sum_over_replicas(checked)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of the whole model as ``torch.nn.utils.clip_grad_norm_`` does in one process, with the same
        bits. Over ranks, ``max_norm`` and ``norm_type`` are positive. Returns the total norm before clipping. With
        ``error_if_nonfinite``, raises RuntimeError, and changes nothing, if it is not finite."""
        with self.refusing():
            checked = check_number(max_norm, "max_norm"), check_number(norm_type, "norm_type")
            if self.ranks is None:
                return torch.nn.utils.clip_grad_norm_(self.parameters(), *checked, error_if_nonfinite)
            pipeline = self._pipeline()
        return pipeline.clip_grad_norm_(*checked, error_if_nonfinite)


class PipelineGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for a pipeline over ranks: if a gradient of any rank is not finite, all ranks skip the
    optimizer's step and lower the scale.

        scaler = gpipe.PipelineGradScaler(pipe)
        with torch.autocast("cuda", torch.float16):
            loss = pipe.step(x, y, criterion, scale=scaler)
        scaler.step(optimizer)
        scaler.update()

    All ranks call its methods in the same order, with an optimizer of the pipeline's parameters. The other arguments are
    those of ``torch.amp.GradScaler``, the same on all ranks.
    """

    def __init__(
        self,
        pipe: TeamCalls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_is(pipe, "pipe", TeamCalls, "a gpipe.GPipe", "torch.amp.GradScaler is for other models")
        device = next((device.type for device in pipe.devices if device.type != "cpu"), "cpu")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._pipe = pipe

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with self._pipe.refusing():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            of_rank = any(bool(each) for each in found.values())
        # A rank without gradients has checked none.
        found.setdefault(found_inf.device, found_inf)
        of_all = float(self._pipe.largest(int(of_rank)))
        for each in found.values():
            each.fill_(of_all)
        return found
