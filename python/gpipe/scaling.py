"""Loss scaling over ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as _GradScaler

from gpipe.pipeline import GPipe

__all__ = ["GradScaler"]


class GradScaler(_GradScaler):
    """``torch.amp.GradScaler`` for a pipeline over ranks: if a gradient of any rank is not finite, all ranks skip the
    optimizer's step and lower the scale. In one process it is the same as PyTorch's.

        scaler = gpipe.GradScaler(pipe)
        with torch.autocast("cuda", torch.float16):
            loss = pipe.step(x, y, criterion, scale=scaler)
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    All ranks call its methods in the same order, with an optimizer of the pipeline's ``parameters()``.

    Args:
        pipe: the pipeline.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for ``torch.amp.GradScaler``. The same on all
            ranks.
    """

    def __init__(
        self,
        pipe: GPipe,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
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
