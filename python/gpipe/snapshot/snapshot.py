"""Snapshots of a training state, and their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

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
    """A training state.

    Attributes:
        model: parameters and buffers by name: the result of :func:`capture_model` or ``state_dict()``.
        optimizer: the result of :func:`capture_optimizer`.
        epoch: number of completed epochs.
        position: position of the data loader in the epoch, with keys of the loader's choice.
        random: state of PyTorch's default CPU generator: the result of ``torch.get_rng_state()``, a ByteTensor.
        options: the program's command-line options.
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
    """Writes a snapshot to a file, atomically: the path names the previous file until the new one is on the disk.

    Tensors may be on any device and may require gradients. They are saved as CPU tensors without gradients. A view is
    saved without the rest of its storage.

    Args:
        path: the file to create or replace.
        snapshot: the snapshot.

    Raises:
        OSError: with the path and the reason. The path then names the previous file, or the new one if only the folder
            could not be flushed.
        BlockingIOError: if another writer is writing the same path.
        TypeError, ValueError: if the snapshot could not be read again in Python and C++.
    """
    content = {"format": _FORMAT, "version": _VERSION}
    content |= {each.name: plain(getattr(snapshot, each.name), each.name) for each in fields(Snapshot)}
    try:
        _C.check_snapshot(content)  # as reading the file would
    except RuntimeError as error:
        raise TypeError(f"cannot write this snapshot: {error}") from None
    with dump(content).getbuffer() as archive, replacing(os.fspath(path)) as file:
        file.write(archive)


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot that :func:`write` or a C++ program wrote. Never executes code from the file. Time and memory
    are proportional to the size of the file.

    Args:
        path: the file.

    Returns:
        The snapshot, with its tensors on the CPU.

    Raises:
        OSError: if the file is missing or cannot be read.
        ValueError: if the file is not a regular file, is damaged or truncated, is not a snapshot, or has a newer
            version.
    """
    content = _C.read_snapshot(path)
    return Snapshot(**{each.name: content[each.name] for each in fields(Snapshot)})
