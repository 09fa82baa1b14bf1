"""Checks of arguments. Each function returns the value in its expected type, or raises."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe import _C

__all__ = [
    "BalanceError",
    "Workers",
    "arrange_workers",
    "check_balance",
    "check_checkpoint",
    "check_chunks",
    "check_devices",
    "check_flag",
    "check_function",
    "check_is_on",
    "check_number",
    "check_scheduling",
    "check_text",
    "check_whole",
    "place_stages",
    "shown",
]

_ADVICE = """

gpipe.balance finds a balance for a model that still changes:

  import gpipe
  from gpipe.balance import balance_by_time

  balance = balance_by_time(stages, model, sample)
  pipe = gpipe.GPipe(model, balance, ...)
"""


class BalanceError(ValueError):
    """A balance that does not cut the model into stages."""


def shown(value: object) -> str:
    """Returns a value as messages show it: a tensor by its shape, another object by the start of its ``repr``."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


# The public functions check their arguments with these, because the errors of the extension module do not name an
# argument.


def check_whole(value: object, name: str, bits: int = 31) -> int:
    """Returns an integer of any integer type as ``int``. Raises TypeError for other values, and ValueError for an absolute
    value from ``2**bits``. ``name`` is for their messages."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            if abs(number) >= 2**bits:
                raise ValueError(f"{name} must be below 2**{bits}, but is {shown(number)}")
            return number
    raise TypeError(f"{name} must be an integer, but is {shown(value)}")


def check_number(value: object, name: str) -> float:
    """Returns a number as ``float``. Raises TypeError for other values; ``name`` is for its message."""
    if not isinstance(value, (bool, str)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the last
            pass
    raise TypeError(f"{name} must be a number, but is {shown(value)}")


def check_flag(value: object, name: str) -> bool:
    """Returns a ``bool``. Raises TypeError for other values; ``name`` is for its message."""
    if isinstance(value, bool):
        return value
    raise TypeError(f"{name} must be True or False, but is {shown(value)}")


def check_text(value: object, name: str) -> str:
    """Returns a ``str``. Raises TypeError for other values; ``name`` is for its message."""
    if isinstance(value, str):
        return value
    raise TypeError(f"{name} must be a str, but is {shown(value)}")


def check_function(value: object, name: str, of: str) -> Callable[..., Any]:
    """Returns a callable. Raises TypeError for other values, and for classes of modules. ``name``, and ``of``, which tells its
    arguments, are for its message."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise TypeError(f"{name} is the class {value.__name__}; pass an object of it, such as {value.__name__}()")
    if callable(value):
        return value
    raise TypeError(f"{name} must be a function of {of}, but is {shown(value)}")


def check_chunks(chunks: object) -> int:
    """Returns a number of chunks. Accepts 2.0 for 2, as torchgpipe does. Raises TypeError for other values, and ValueError
    for a number that is not positive."""
    if isinstance(chunks, float) and chunks.is_integer():
        chunks = int(chunks)
    number = check_whole(chunks, "chunks")
    _C.check_chunks(number)
    return number


def check_checkpoint(checkpoint: object) -> str:
    """Returns the name of a checkpoint mode. Raises TypeError or ValueError for other values."""
    return _C.check_checkpoint(checkpoint)


def check_balance(balance: object, layers: int) -> list[int]:
    """Returns the balance of a model of ``layers`` layers, ``[]`` for an empty model. Raises TypeError for anything but
    integers, and BalanceError for a balance that does not cut the model."""
    if balance is not None and not isinstance(balance, Iterable):
        raise TypeError(
            f"balance must be a list of the number of layers of each stage, but is {shown(balance)}{_ADVICE}"
        )
    numbers = [] if balance is None else list(balance)
    checked = [check_whole(number, "each number of a balance") for number in numbers]
    if balance is None or checked or layers > 0:
        try:
            _C.check_balance(checked, layers)
        except ValueError as error:
            raise BalanceError(f"{error}{_ADVICE}") from None
    return checked


def check_devices(devices: object) -> list[torch.device]:
    """Returns a list of devices. Raises TypeError for anything else, and PyTorch's RuntimeError for an unknown name."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list with one device per worker, but is {shown(devices)}")
    listed = list(devices)
    for device in listed:
        if isinstance(device, bool):
            raise TypeError(f"a device must be a torch.device, a name or a number, but is {shown(device)}")
    return [torch.device(device) for device in listed]


class Workers(NamedTuple):
    """Where the stages of a pipeline run."""

    devices: list[torch.device]
    """The device of each worker; the CPU for those of other ranks."""
    placement: list[int]
    """The worker of each stage."""
    ranks: list[int]
    """The rank of each worker."""


def arrange_workers(
    devices: object | None,
    stages: int,
    schedule: object = "gpipe",
    stages_per_worker: object = 1,
    placement: object = "looped",
    ranks: _C.Ranks | None = None,
) -> Workers:
    """Arranges the workers of a pipeline.

    Args:
        devices: the user's devices, or ``None`` for the default: the GPUs, or the CPU for each worker if there are none.
        stages: the number of stages.
        schedule, stages_per_worker, placement: as for :class:`gpipe.GPipe`.
        ranks: the processes that run the pipeline together.

    Raises:
        TypeError, RuntimeError: as :func:`check_devices` and :func:`check_scheduling`.
        ValueError: for a schedule that does not exist or does not fit, arguments that contradict each other, or more ranks
            than workers.
        IndexError: for fewer devices than workers, or a device that this process does not have.
    """
    given = [] if devices is None else [str(device) for device in check_devices(devices)]
    name, per_worker, workers = check_scheduling(schedule, stages_per_worker, placement, stages)
    if devices is not None and not given and stages > 0:
        raise IndexError("devices is empty; give one device per worker, or None for the default")
    if stages == 0:
        if not name.startswith("@"):
            _C.place_stages(name, 2, 1, [])  # refuses an unknown name
        if ranks is not None:
            raise ValueError("the model has no layers, so it cannot run over ranks")
        return Workers([], [], [])
    names, placed, of_workers = _C.arrange_workers(given, stages, name, per_worker, workers, ranks)
    return Workers([torch.device(name) for name in names], placed, of_workers)


def place_stages(
    schedule: object, stages: int, stages_per_worker: object = 1, placement: object = "looped"
) -> list[int]:
    """Returns the worker of each stage. Arguments and errors as for :func:`arrange_workers`."""
    name, per_worker, workers = check_scheduling(schedule, stages_per_worker, placement, stages)
    return _C.place_stages(name, stages, per_worker, workers)


def check_scheduling(
    schedule: object, stages_per_worker: object, placement: object, stages: int
) -> tuple[str, int, list[int]]:
    """Returns the name or file of a schedule, the stages per worker, and the worker of each stage (``[]`` for
    ``'looped'``). Raises TypeError for values of a wrong type, and ValueError for a placement that does not exist."""
    if not isinstance(schedule, str):
        raise TypeError(f"schedule must be a name or '@' and the path of a file, but is {shown(schedule)}")
    return schedule, check_whole(stages_per_worker, "stages_per_worker"), _placement(placement, stages)


def _placement(placement: object, stages: int) -> list[int]:
    """Returns the worker of each stage; an empty list for ``'looped'``."""
    message = f"placement must be 'looped', 'v' or a list of workers, but is {shown(placement)}"
    if isinstance(placement, str):
        if placement == "looped":
            return []
        if placement == "v":
            return _C.v_placement(stages)
        raise ValueError(message)
    if not isinstance(placement, Iterable) or isinstance(placement, (bytes, Set, Mapping)):
        raise TypeError(message)
    workers = [check_whole(worker, "each worker of a placement") for worker in placement]
    if not workers and stages > 0:
        raise ValueError(message)
    return workers


def check_is_on(device: torch.device | None, current: Iterable[torch.device]) -> None:
    """Raises TypeError unless all of the current devices of a pipeline are the given one; always for ``None``."""
    wanted = device and _with_index(device)
    if any(_with_index(each) != wanted for each in current):
        raise TypeError(
            "denied to move parameters and buffers: a pipeline keeps them on the devices of its workers; pass "
            "GPipe(..., devices=[...]) instead"
        )


def _with_index(device: torch.device) -> torch.device:
    """Returns a device as its tensors report it. An accelerator without an index is the current device."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and torch.accelerator.is_available():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device
