"""Checks of arguments. Each function returns the value in its expected type, or raises TypeError."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gpipe import _C

P = ParamSpec("P")
R = TypeVar("R")

Checkpoint = Literal["always", "except_last", "never"]
Checkpoints = Checkpoint | int | Sequence[Checkpoint | int]  # of a pipeline's stages
Memory = int | str | Sequence[int | str]  # of a device, or of each: bytes, or a text such as "6GiB"
Reduction = Literal["mean", "sum"]

_ADVICE = "; gpipe.balance.balance_by_time(stages, model, sample) finds one"


class BalanceError(ValueError):
    """A balance that does not cut the model into stages."""


def shown(value: object) -> str:
    """Returns a value as messages show it: a tensor by its shape, another object by the start of its ``repr``."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


# The errors of the extension module do not name an argument, so public functions check theirs first. `name` is for messages.


def check_whole(value: object, name: str, bits: int = 31) -> int:
    """Returns an integer of any integer type as ``int``. Raises ValueError for an absolute value from ``2**bits``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, but is {shown(value)}")
    if abs(number) >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}, but is {shown(number)}")
    return number


def check_number(value: object, name: str) -> float:
    if not isinstance(value, (bool, str)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the last
            pass
    raise TypeError(f"{name} must be a number, but is {shown(value)}")


def check_is(value: Any, name: str, kind: type[R], words: str, advice: str = "") -> R:
    """Returns an object of a class, which messages describe by ``words``."""
    if isinstance(value, kind):
        return value
    raise TypeError(f"{name} must be {words}, but is {shown(value)}" + (f"; {advice}" if advice else ""))


def check_list(value: object, name: str, of: str = "values to try") -> list[Any]:
    """Returns an iterable as a list. ``of`` describes its items."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {of}, but is {shown(value)}")
    return list(value)


def check_numbers(value: object, name: str) -> list[float]:
    return [check_number(each, f"each of {name}") for each in check_list(value, name, "numbers")]


def check_function(value: object, name: str, of: str) -> Callable[..., Any]:
    """Returns a callable other than a class of modules. ``of`` describes its arguments."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise TypeError(f"{name} is the class {value.__name__}; pass an object of it, such as {value.__name__}()")
    if callable(value):
        return value
    raise TypeError(f"{name} must be a function of {of}, but is {shown(value)}")


def check_chunks(chunks: object, name: str = "chunks") -> int:
    """Returns a number of chunks. Accepts 2.0 for 2, as torchgpipe does. Raises ValueError unless it is positive."""
    number = check_whole(int(chunks) if isinstance(chunks, float) and chunks.is_integer() else chunks, name)
    _C.check_chunks(number)
    return number


_OF_TYPES: dict[str, Callable[[Any, str], Any]] = {
    "int": check_whole,
    "float": check_number,
    "bool": functools.partial(check_is, kind=bool, words="True or False"),
    "str": functools.partial(check_is, kind=str, words="a str"),
    "Checkpoint": lambda mode, name: _C.check_checkpoint(mode),
    "Checkpoints": lambda modes, name: _C.check_checkpoints(modes),
}
check_flag, check_text = _OF_TYPES["bool"], _OF_TYPES["str"]  # the extension module calls them
_OF_NAMES: dict[str, Callable[[Any, str], Any]] = {
    "chunks": check_chunks,
    "schedule": lambda value, name: value,  # check_scheduling() does it
}


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function check its arguments of the types int, float, bool, str and Checkpoints, which may be optional. REQUIRES:
    annotations are texts."""
    signature = inspect.signature(function)
    kinds = {name: str(each.annotation).removesuffix(" | None") for name, each in signature.parameters.items()}
    checks = {name: _OF_NAMES.get(name, _OF_TYPES[kind]) for name, kind in kinds.items() if kind in _OF_TYPES}
    optional = {name for name, each in signature.parameters.items() if str(each.annotation).endswith("| None")}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises it with the function's name
        for name, value in given.arguments.items():
            if name in checks and not (value is None and name in optional):
                given.arguments[name] = checks[name](value, name)
        return function(*given.args, **given.kwargs)

    return checked


def check_balance(balance: object, layers: int) -> list[int]:
    """Returns the balance of a model of ``layers`` layers, ``[]`` for an empty model. Raises BalanceError for a balance that
    does not cut the model."""
    if balance is not None and not isinstance(balance, Iterable):
        what = "balance must be a list of the number of layers of each stage"
        raise TypeError(f"{what}, but is {shown(balance)}{_ADVICE}")
    checked = [check_whole(number, "each number of a balance") for number in balance or ()]
    if balance is None or checked or layers > 0:
        try:
            _C.check_balance(checked, layers)
        except ValueError as error:
            raise BalanceError(f"{error}{_ADVICE}") from None
    return checked


def check_devices(devices: object) -> list[torch.device]:
    """Returns a list of devices. Raises PyTorch's RuntimeError for an unknown name."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list with one device per worker, but is {shown(devices)}")
    listed = list(devices)
    for device in listed:
        if isinstance(device, bool):
            raise TypeError(f"a device must be a torch.device, a name or a number, but is {shown(device)}")
    return [torch.device(device) for device in listed]


def check_scheduling(schedule: object, placement: object, stages: int) -> tuple[str, list[int]]:
    """Returns a schedule as it was given, and the worker of each stage (``[]`` for ``'looped'``). Raises ValueError for a
    placement that does not exist."""
    name = check_is(schedule, "schedule", str, "a name, lists of actions, or '@' and the path of a file")
    if isinstance(placement, str) and placement in ("looped", "v"):
        return name, _C.v_placement(stages) if placement == "v" else []
    message = f"placement must be 'looped', 'v' or a list of workers, but is {shown(placement)}"
    if not isinstance(placement, Iterable) or isinstance(placement, (bytes, Set, Mapping)):
        raise TypeError(message)
    if isinstance(placement, str) or (stages > 0 and not (placement := list(placement))):
        raise ValueError(message)
    return name, [check_whole(worker, "each worker of a placement") for worker in placement]


class Workers(NamedTuple):
    """Where the stages of a pipeline run."""

    devices: list[torch.device]  # of each worker; the CPU for those of other ranks
    placement: list[int]  # the worker of each stage
    ranks: list[int]  # of each worker


def arrange_workers(
    devices: object | None,
    stages: int,
    schedule: object = "gpipe",
    placement: object = "looped",
    ranks: _C.Ranks | None = None,
) -> Workers:
    """Arranges the workers of a pipeline. Arguments and errors as for :class:`gpipe.GPipe`."""
    given = [] if devices is None else check_devices(devices)
    name, workers = check_scheduling(schedule, placement, stages)
    if devices is not None and not given and stages > 0:
        raise IndexError("devices is empty; give one device per worker, or None for the default")
    if stages == 0:
        if not _C.has_lists(name) and name != "auto":
            _C.place_stages(name, 2, 1)  # refuses an unknown name
        if ranks is not None:
            raise ValueError("the model has no layers, so it cannot run over ranks")
        return Workers([], [], [])
    return Workers(*_C.arrange_workers(given, stages, name, workers, ranks))


def check_memory(memory: object) -> list[int]:
    """Returns sizes of memory in bytes."""
    if isinstance(memory, (list, tuple)):
        return [size for each in memory for size in check_memory(each)]
    size = memory
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    found = re.fullmatch(r"(\d+\.?\d*) *([KMGT]?I?)B?", size.upper()) if isinstance(size, str) else None
    if found and found[2] in units:
        size = int(float(found[1]) * units[found[2]])
    if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**63:
        return [size]
    raise (TypeError if not isinstance(size, (int, str)) else ValueError)(
        f"memory must be a size, such as '6GB', '6GiB' or a number of bytes, but is {shown(size)}"
    )
