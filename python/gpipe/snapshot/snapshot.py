"""Snapshots of a training state, and their files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpipe import _C
from gpipe.snapshot.optimizer import OptimizerState

_VERSION = 2


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

    Tensors may be on any device and may require gradients. A view is saved without the rest of its storage.

    Args:
        path: the file to create or replace.
        snapshot: the snapshot.

    Raises:
        OSError: with the path and the reason. The path then names the previous file, or the new one if only the folder
            could not be flushed.
        BlockingIOError: if another writer is writing the same path.
        TypeError, ValueError: if the snapshot cannot be saved.
    """
    _C.write_snapshot(os.fsencode(path), *to_file(snapshot))


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot that :func:`write` or a C++ program wrote. Time and memory are proportional to the size of the
    file.

    Args:
        path: the file.

    Returns:
        The snapshot, with its tensors on the CPU.

    Raises:
        OSError: if the file is missing or cannot be read.
        ValueError: if the file is not a regular file, is changed or truncated, is not a snapshot, or has a newer
            version.
    """
    return from_file(*_C.read_snapshot(os.fsencode(path)))


def to_file(snapshot: Snapshot) -> tuple[dict[str, Tensor], str]:
    """Returns the tensors of a snapshot's file by name, and the rest as JSON. See gpipe/snapshot/safetensors.h."""
    tensors = dict(snapshot.model)
    if snapshot.random is not None:
        tensors[".random"] = snapshot.random
    for name, values in snapshot.history.items():
        tensors[f".history.{name}"] = torch.tensor(values, dtype=torch.float64)
    state: dict[str, dict[str, Any]] = {}
    for parameter, fields in snapshot.optimizer["state"].items():
        state[parameter] = {}
        for name, value in fields.items():
            if isinstance(value, Tensor):
                tensors[f".optimizer.{name}.{parameter}"] = value
            else:
                state[parameter][name] = value
    training = {
        "version": _VERSION,
        "epoch": snapshot.epoch,
        "position": snapshot.position,
        "options": snapshot.options,
        "optimizer": {**snapshot.optimizer, "state": state},
    }
    return tensors, json.dumps(training, allow_nan=False)


def from_file(tensors: dict[str, Tensor], training: str) -> Snapshot:
    """Returns the snapshot of a file's tensors and JSON."""
    content = json.loads(training)
    optimizer = content["optimizer"]
    for group in optimizer["param_groups"]:
        group.update((name, tuple(value)) for name, value in group.items() if isinstance(value, list) and name != "params")
    snapshot = Snapshot({}, optimizer, content["epoch"], content["position"], None, content["options"])
    model: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("."):
            model[name] = tensor
        elif name == ".random":
            snapshot.random = tensor
        elif name.startswith(".history."):
            snapshot.history[name.removeprefix(".history.")] = tensor.tolist()
        else:
            _, _, field_name, parameter = name.split(".", 3)
            optimizer["state"].setdefault(parameter, {})[field_name] = tensor
    snapshot.model = model
    return snapshot
