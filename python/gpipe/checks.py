"""What callers give, checked: the right value, or an error in words."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

__all__ = [
    "BalanceError",
    "check_balance",
    "check_checkpoint",
    "check_chunks",
    "check_devices",
    "check_number",
    "check_whole",
    "place",
]

_CHECKPOINTS = ("always", "except_last", "never")

_ADVICE = """

If your model is still under development, its optimal balance would change frequently. In this case, let
gpipe.balance find one:

  import gpipe
  from gpipe.balance import balance_by_time

  balance = balance_by_time(stages, model, sample)
  pipe = gpipe.GPipe(model, balance, ...)
"""


class BalanceError(ValueError):
    """A balance that does not cut the model."""


def check_whole(value: object, name: str) -> int:
    """An integer, of any type that is one. Raises TypeError."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, but is {value!r}")


def check_number(value: object, name: str) -> float:
    """A number. Raises TypeError."""
    if not isinstance(value, (bool, str)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name} must be a number, but is {value!r}")


def check_chunks(chunks: object) -> int:
    """A number of chunks; 2.0 is 2, as in torchgpipe. Raises TypeError, or ValueError unless it is positive."""
    if isinstance(chunks, float) and chunks.is_integer():
        chunks = int(chunks)
    whole = check_whole(chunks, "number of chunks")
    if whole <= 0:
        raise ValueError(f"number of chunks must be positive integer, but is {whole}")
    return whole


def check_checkpoint(checkpoint: object) -> str:
    """A checkpoint mode. Raises TypeError, or ValueError."""
    names = "'always', 'except_last', or 'never'"
    if not isinstance(checkpoint, str):
        raise TypeError(f"checkpoint must be one of {names}, but is {checkpoint!r}")
    if checkpoint not in _CHECKPOINTS:
        raise ValueError(f"checkpoint is not one of {names}, but {checkpoint!r}")
    return str(checkpoint)


def check_balance(balance: object, layers: int) -> list[int]:
    """A balance that cuts so many layers. Raises TypeError, ValueError."""
    if balance is None:
        raise ValueError("balance is required: the number of layers of each stage" + _ADVICE)
    if not isinstance(balance, Iterable):
        raise TypeError(f"balance must be a list of the number of layers of each stage, but is {balance!r}" + _ADVICE)
    checked = [check_whole(number, "each number of a balance") for number in balance]
    if sum(checked) != layers:
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {layers}, sum of balance: {sum(checked)})" + _ADVICE
        )
    if any(number <= 0 for number in checked):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {checked})" + _ADVICE)
    return checked


def check_devices(devices: object) -> list[torch.device]:
    """A list of devices. Raises TypeError, or RuntimeError for a name that PyTorch does not know."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list, with a device for each stage, but is {devices!r}")
    listed = list(devices)
    for device in listed:
        if isinstance(device, bool):
            raise TypeError(f"a device must be a torch.device, a name or a number, but is {device!r}")
    return [torch.device(device) for device in listed]


def place(devices: object | None, stages: int) -> list[torch.device]:
    """A device for each stage. Raises as :func:`check_devices`; IndexError for too few, or one that is not there."""
    if devices is None:
        gpus = torch.cuda.device_count()
        devices = range(gpus) if gpus else ["cpu"] * stages
    placed = check_devices(devices)
    if len(placed) < stages:
        raise IndexError(f"too few devices to hold given partitions (devices: {len(placed)}, partitions: {stages})")
    placed = placed[:stages]
    for device in placed:  # before any layer is moved
        accelerator = torch.accelerator.current_accelerator()
        ours = accelerator is not None and device.type == accelerator.type
        count = 1 if device.type == "cpu" else torch.accelerator.device_count() if ours else 0
        if device.type != "cpu" and (device.index or 0) >= count:
            raise IndexError(f"device {device} is not there; this process sees {count} of its kind")
    return placed
