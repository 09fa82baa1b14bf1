"""Losses of :meth:`gpipe.GPipe.step`: arguments, and a check that a loss can be computed in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gpipe import _C
from gpipe.checks import check_chunks, check_flag, check_function, check_number, shown

__all__ = ["check_loss", "check_scale", "checked", "step_options"]


def check_loss(
    loss: Callable[[Any, Any], Tensor],
    output: Any,
    target: Any,
    chunks: int,
    *,
    count: Callable[[Any], float] | None = None,
    reduction: str = "mean",
) -> tuple[float, float]:
    """Computes the loss of a whole mini-batch, and the loss that :meth:`gpipe.GPipe.step` would join from its
    micro-batches. They differ for a loss that does not decompose over samples, such as Dice over the batch or a contrastive
    loss. Do not use ``step`` with such a loss.

        whole, joined = gpipe.check_loss(criterion, pipe(input), target, chunks=3)

    Args:
        loss: as for :meth:`gpipe.GPipe.step`. Called without grad mode, on copies of the output.
        target, count, reduction: as for :meth:`gpipe.GPipe.step`.
        output: the model's output for the mini-batch, or any tensors like it.
        chunks: the most micro-batches. Choose one that makes the last micro-batch smaller, because an even cut can hide
            a wrong weight.

    Returns:
        A tuple: the loss of the whole mini-batch, and the joined loss.

    Raises:
        TypeError, ValueError: as :meth:`gpipe.GPipe.step`.
    """
    options = step_options(loss, count, reduction, 1.0, False, check_chunks(chunks), "never")
    return _C.check_loss(checked(loss), output, target, options)


def check_scale(scale: object, device: torch.device) -> float:
    """Returns the factor of the gradients. A GradScaler's scale is made on ``device`` at its first use."""
    if isinstance(scale, GradScaler):
        return float(scale.scale(torch.ones((), device=device)))
    return check_number(scale, "scale")


def checked(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Returns a function that calls ``loss`` and raises TypeError unless it returns a tensor."""

    def call(output: Any, target: Any) -> Tensor:
        value = loss(output, target)
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss function returned {shown(value)}; return a tensor, a floating-point scalar")
        return value

    return call


def step_options(
    loss: object,
    count: object,
    reduction: object,
    scale: float,
    return_output: object,
    chunks: int,
    checkpoint: str,
) -> _C.StepOptions:
    """Checks a loss function and its options."""
    check_function(loss, "loss", "output and target")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise ValueError(
            "the loss has parameters, which get no gradient from step(); make it the last layer of the model, and pass a "
            "loss without parameters"
        )
    counted = None if count is None else _counted(check_function(count, "count", "a target"))
    return_output = check_flag(return_output, "return_output")
    return _C.StepOptions(counted, reduction, scale, return_output, chunks, checkpoint)


def _counted(count: Callable[[Any], object]) -> Callable[[Any], float]:
    """Returns a function that calls ``count`` and raises TypeError unless it returns a number."""
    return lambda target: check_number(count(target), "the result of count")
