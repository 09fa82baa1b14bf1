"""Batch norm that updates its running statistics once per mini-batch, for models that name it.

``GPipe(..., deferred_batch_norm=True)`` does this for all batch norms of a model without changing its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe._C import is_recomputing
from gpipe.checks import checks_arguments

__all__ = ["DeferredBatchNorm"]


class DeferredBatchNorm(_BatchNorm):
    """Normalizes each micro-batch by its own mean and variance. Updates its running statistics once per mini-batch, with the
    mean and the unbiased variance of all of it: of the input of a call of :class:`gpipe.GPipe`, elsewhere of ``chunks``
    consecutive forwards. The other arguments are those of ``nn.BatchNorm2d``. Not thread-safe."""

    @checks_arguments
    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.chunks = chunks
        self.in_pipeline = False  # whether a pipeline calls commit()
        self.reset()

    def reset(self) -> None:
        """Discards the statistics of the micro-batches since the last update."""
        self.tracked = 0  # micro-batches
        # Values per feature, mean and sum of squared differences from the mean, of each micro-batch with values.
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def commit(self) -> None:
        """Updates the running statistics. A mini-batch without values only counts."""
        if self.tracked == 0:
            return
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            if self._parts:
                counts, means, squares = map(torch.stack, zip(*self._parts))
                mean = (counts * means).sum(0) / counts.sum()
                deviations = (squares + counts * (means - mean).square()).sum(0)
                variance = deviations / (counts.sum() - 1)  # batch norm raises for a single value
                factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean.to(self.running_mean), factor)
                self.running_var.lerp_(variance.to(self.running_var), factor)
        self.reset()

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        output = F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)
        if not is_recomputing():
            self.tracked += 1
            if input.numel() > 0:
                features = input.detach().transpose(0, 1).flatten(1).double()
                mean = features.mean(1)
                count = mean.new_tensor([features.shape[1]])
                self._parts.append((count, mean, (features - mean[:, None]).square().sum(1)))
        if not self.in_pipeline and self.tracked >= self.chunks:
            self.commit()
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input must have at least 2 dimensions, but has {input.dim()}")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("sum", "sum_squares"):  # saved by torchgpipe
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Replaces each batch norm with running statistics in a module, in place, by one of this class with the same parameters
        and buffers. Returns the module, or its replacement if it is a batch norm."""
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        converted = module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            converted.train(module.training)
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_deferred_batch_norm(child, chunks))
        return converted


@contextmanager
def one_mini_batch(norms: Iterable[DeferredBatchNorm]) -> Iterator[None]:
    """Treats all forwards in a block as one mini-batch. An error leaves the running statistics unchanged."""
    for norm in norms:
        norm.reset()
        norm.in_pipeline = True
    try:
        yield
        for norm in norms:
            norm.commit()
    finally:
        for norm in norms:
            norm.reset()
            norm.in_pipeline = False
