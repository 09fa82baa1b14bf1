"""The parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def capture_model(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and buffers to the CPU, by the names that ``state_dict()`` gives them.

    Raises:
        TypeError: for a model that keeps something else in its state, as by ``get_extra_state``.
    """
    return {name: copied(tensor) for name, tensor in _tensors_of(model).items()}


def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copies tensors into a model's own, wherever those are.

    Raises:
        ValueError: for a name that only one of them has, or whose shape or dtype differs; the model is then as it was.
    """
    tensors = {name: _kind(tensor) for name, tensor in _tensors_of(model).items()}
    for name in [*tensors, *saved]:
        here, there = tensors.get(name, "not there"), _kind(saved[name]) if name in saved else "not there"
        if here != there:
            raise ValueError(
                f"the snapshot is of another model: '{name}' is {there} in the snapshot and {here} in this model"
            )
    model.load_state_dict(saved)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' of the model's state is {type(value)}; a snapshot keeps tensors")
    return state


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
