"""Captures and restores the parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def capture_model(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and buffers to the CPU.

    Returns:
        The copies, by their names in ``state_dict()``.

    Raises:
        TypeError: if the model's state holds anything but tensors, for example from ``get_extra_state``.
    """
    return {name: copied(tensor) for name, tensor in _tensors_of(model).items()}


def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copies captured tensors into a model's parameters and buffers, on their devices.

    Raises:
        TypeError: as :func:`capture_model`.
        ValueError: if the names, shapes, dtypes or layouts differ, or if a tensor of the model cannot be written in
            place. The model is then unchanged.
    """
    tensors = _tensors_of(model)
    for name in [*tensors, *saved]:
        ours, theirs = (kind_of(side[name]) if name in side else "missing" for side in (tensors, saved))
        if ours != theirs:
            raise ValueError(
                f"the snapshot is of another model: '{name}' is {theirs} in the snapshot and {ours} in this model"
            )
        _check_writable(name, tensors[name])
    model.load_state_dict(saved)


def _check_writable(name: str, tensor: Tensor) -> None:
    reason = ""
    if tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        reason = "some of its elements share memory"
    elif tensor.is_inference() and not torch.is_inference_mode_enabled():
        reason = "it was made in inference mode"
    if reason:
        raise ValueError(f"cannot restore '{name}' of this model: {reason}; clone it first")


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' of the model's state is {type(value)}; a snapshot holds only tensors of a model")
    return state


def copied(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def kind_of(value: object) -> str:
    """Describes a tensor by its dtype and shape, and its layout if it is not strided. A tensor can be copied into
    another if their descriptions are equal. Describes any other object by its type."""
    if not isinstance(value, Tensor):
        return str(type(value))
    kind = f"{value.dtype} of shape {tuple(value.shape)}"
    if value.layout is not torch.strided:
        kind += f" and {value.layout}"
    if value.is_meta:
        kind += " without data"
    if value.is_quantized:
        kind += f" and {value.qscheme()}"
    return kind
