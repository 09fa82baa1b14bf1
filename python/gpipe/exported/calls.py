"""Functions that the code of layers calls instead of operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ModeError", "batch_norm", "check_modes"]


class ModeError(RuntimeError):
    """Tells that two modules are in different modes."""


def batch_norm(input: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *more: Any) -> Tensor:
    """Computes ``aten.batch_norm``.

    Raises:
        ValueError: in training mode, for one value per channel, whose variance is not a number.
    """
    if training and input.numel() == input.shape[1]:
        raise ValueError(
            f"batch norm needs more than one value per channel in training mode, but a micro-batch has the shape "
            f"{tuple(input.shape)}; give it more samples by fewer chunks"
        )
    output: Tensor = torch.ops.aten.batch_norm.default(input, weight, bias, mean, variance, training, *more)
    return output


def check_modes(path: str, training: bool, other: str, other_training: bool) -> None:
    """Raises ModeError unless two modules are in the same mode."""
    if training != other_training:
        names = (f"'{each}'" if each else "the model" for each in (path, other))
        raise ModeError(
            f"{' and '.join(names)} are in different modes, but one uses what the other computes in one mode only; "
            "call train() or eval() on both"
        )
