"""What a snapshot holds, and its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from gpipe import _C
from gpipe.snapshot.archive import dump, plain
from gpipe.snapshot.atomic_file import replacing
from gpipe.snapshot.optimizer import OptimizerState

_FORMAT = "gpipe snapshot"
_VERSION = 1


def _no_optimizer() -> OptimizerState:
    return {"type": "", "param_groups": [], "state": {}}


@dataclass
class Snapshot:
    """The state of a training.

    Attributes:
        model: parameters and buffers: what :func:`capture_model` returns, or ``state_dict()``.
        optimizer: what :func:`capture_optimizer` returns.
        epoch: epochs completed.
        position: where in the epoch the loader is, in its own terms.
        random: of PyTorch's default CPU generator: ``torch.get_rng_state()``, a ByteTensor.
        options: the program's, as given.
        history: losses and scores so far.
    """

    model: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=_no_optimizer)
    epoch: int = 0
    position: dict[str, int] = field(default_factory=dict)
    random: Tensor | None = None
    options: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)


def write(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Replaces a file at once or not at all: whatever happens, the path names a whole snapshot, the previous one until
    this one is on the disk.

    Tensors may be on any device and require gradients; they are saved as plain ones on the CPU, each with no more of
    its storage than it shows.

    Raises:
        OSError: with the path and the reason; the path then names the previous file or, where only its folder could
            not be flushed, the new one. ``BlockingIOError`` while another writer is writing the same one.
        TypeError, ValueError: for a snapshot that could not be read again, in Python or in C++; the message names what
            is wrong with it.
    """
    content = {"format": _FORMAT, "version": _VERSION}
    content |= {each.name: plain(getattr(snapshot, each.name), each.name) for each in fields(Snapshot)}
    if fault := _fault(content):
        raise TypeError(f"cannot write this snapshot: {fault}")
    with dump(content).getbuffer() as archive, replacing(os.fspath(path)) as file:
        file.write(archive)


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads what :func:`write` or a C++ program wrote. Executes nothing, whatever is in the file. Time and memory are
    proportional to the file's size.

    Returns:
        The snapshot, its tensors on the CPU.

    Raises:
        OSError: for a file that is missing or cannot be read.
        ValueError: for one that is not a regular file, damaged, cut short, not a snapshot, or of a newer version.
    """
    content = _C.read_snapshot(path)
    return Snapshot(**{each.name: content[each.name] for each in fields(Snapshot)})


def _fault(content: dict[str, Any]) -> str:
    """What keeps a dict of plain values from being a snapshot, or nothing. C++ says the same of a file that is read."""
    kinds: dict[str, tuple[type, ...]] = {
        "model": (dict,),
        "optimizer": (dict,),
        "epoch": (int,),
        "position": (dict,),
        "random": (Tensor, type(None)),
        "options": (dict,),
        "history": (dict,),
    }
    for name, of in kinds.items():
        if name not in content:
            return f"it has no '{name}'"
        if not _is(content[name], of):
            return f"'{name}' is {type(content[name])}, not {of[0].__name__}"
    for name, item in {"model": Tensor, "position": int, "options": str, "history": list}.items():
        for key, value in content[name].items():
            if not _is(value, item):
                return f"'{name}' has {type(value)} for {key!r}, not {item.__name__}"
    for key, values in content["history"].items():
        for value in values:
            if not _is(value, (float, int)):
                return f"'history' has {type(value)} among its {key!r}, not float"
    return _fault_of_optimizer(content["optimizer"])


def _fault_of_optimizer(optimizer: dict[str, Any]) -> str:
    for name, kind in {"type": str, "param_groups": list, "state": dict}.items():
        if not _is(optimizer.get(name), kind):
            return f"'optimizer' has no {kind.__name__} '{name}'"
    for group in optimizer["param_groups"]:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            return "'optimizer' has a group without a list of names, 'params'"
    for name, state in optimizer["state"].items():
        if not isinstance(state, dict):
            return f"'optimizer' has {type(state)} as the state of '{name}', not dict"
    for options in [*optimizer["param_groups"], *optimizer["state"].values()]:
        for name, value in options.items():
            if _holds_dict(value):
                return f"'optimizer' has a dict in '{name}'"
    return ""


def _holds_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, (list, tuple)) and any(map(_holds_dict, value)))


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Where C++ reads a number, it refuses a bool."""
    return isinstance(value, kinds) and not isinstance(value, bool)
