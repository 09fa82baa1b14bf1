"""The parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def capture_model(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and buffers to the CPU, by the names that ``state_dict()`` gives them.

    Raises:
        TypeError: for a model that keeps something else in its state, as by ``get_extra_state``.
    """
    return {name: copied(tensor) for name, tensor in _tensors_of(model).items()}


def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copies tensors into a model's own, on their devices.

    Raises:
        ValueError: for a name that only one of them has, or whose shape, dtype or layout differs, and for a tensor of
            the model that cannot be written in place; the model is then as it was.
    """
    tensors = _tensors_of(model)
    for name in [*tensors, *saved]:
        here, there = (kind_of(of[name]) if name in of else "not there" for of in (tensors, saved))
        if here != there:
            raise ValueError(
                f"the snapshot is of another model: '{name}' is {there} in the snapshot and {here} in this model"
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
            raise TypeError(f"'{name}' of the model's state is {type(value)}; a snapshot keeps tensors")
    return state


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def kind_of(value: object) -> str:
    """A tensor's dtype and shape, and its layout where that is not the common one. Where two tensors' kinds are equal,
    one can be copied into the other."""
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
