"""Keeps a pipeline's layers on the devices of their stages."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

__all__ = ["FixedPlacement"]

Self = TypeVar("Self", bound="FixedPlacement")


class FixedPlacement(nn.Module):
    """A module whose parameters and buffers cannot be moved to other devices.

    Attributes:
        devices: the device of each worker.
    """

    devices: list[torch.device]

    def cuda(self: Self, device: Any = None) -> Self:
        return self._stay(torch.device("cuda" if device is None else device))

    def cpu(self: Self) -> Self:
        return self._stay(torch.device("cpu"))

    def xpu(self: Self, device: Any = None) -> Self:
        return self._stay(torch.device("xpu" if device is None else device))

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        raise _denied()

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Changes the dtype of parameters and buffers. Arguments as for ``nn.Module.to``.

        Raises:
            TypeError: for a device, unless all parameters and buffers are on it already.
        """
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self._stay(device)
        super().to(*args, **kwargs)
        return self

    def _stay(self: Self, device: torch.device) -> Self:
        """Returns the module if it is on the device already. Otherwise raises TypeError."""
        wanted = _with_index(device)
        current = [*self.devices, *(tensor.device for tensor in [*self.parameters(), *self.buffers()])]
        if any(_with_index(place) != wanted for place in current):
            raise _denied()
        return self


def _with_index(device: torch.device) -> torch.device:
    """Returns a device as its tensors report it. An accelerator without an index is the current device."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and torch.accelerator.is_available():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _denied() -> TypeError:
    return TypeError(
        "denied to move parameters and buffers: a pipeline keeps them on the devices of its workers; pass "
        "GPipe(..., devices=[...]) instead"
    )
