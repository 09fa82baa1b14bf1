"""Saves a training state in a file and restores it, so that training continues as if it had not stopped.

    model, state = snapshot.capture_model(pipe), snapshot.capture_optimizer(optimizer, pipe)
    snapshot.write("latest.snapshot", snapshot.Snapshot(model, state, epoch, random=torch.get_rng_state()))

    saved = snapshot.read("latest.snapshot")
    snapshot.restore_model(pipe, saved.model)
    snapshot.restore_optimizer(optimizer, pipe, saved.optimizer)
    torch.set_rng_state(saved.random)

Over ranks, :func:`gather` joins the snapshots that all capture on rank 0, which writes; each restores its :func:`own_part`.

Parameters have the names of the unpartitioned model, so a snapshot fits the model at any balance. C++ reads and writes the
same files, in the safetensors format. The names of tensors that are not the model's begin with a dot.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.checks import check_is, check_numbers
from gpipe.optimizer_state import OptimizerState, capture_optimizer, kind_of, plain, restore_optimizer

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

__all__ = [
    "OptimizerState",
    "Snapshot",
    "capture_model",
    "capture_optimizer",
    "capture_scheduler",
    "gather",
    "own_part",
    "read",
    "restore_model",
    "restore_optimizer",
    "restore_scheduler",
    "write",
]


@dataclass
class Snapshot:
    """A training state.

    Attributes:
        model: parameters and buffers by name: the result of :func:`capture_model` or ``state_dict()``.
        optimizer: the result of :func:`capture_optimizer`.
        epoch: number of completed epochs.
        position: of the data loader in the epoch, with keys of the loader's choice.
        random: the result of ``torch.get_rng_state()``.
        options: texts of the program's choice, such as its command-line options, or ``json.dumps`` of other values.
        history: losses and scores so far.
    """

    model: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=lambda: OptimizerState(type="", param_groups=[], state={}))
    epoch: int = 0
    position: dict[str, int] = field(default_factory=dict)
    random: Tensor | None = None
    options: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)


def write(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Writes a snapshot to a file, atomically: the path names the previous file until the new one is on the disk.
    Tensors may be on any device and require gradients. Of a view, only its own elements are saved.

    Raises:
        OSError: with the path and the reason; BlockingIOError if another writer is writing the same path.
        TypeError, ValueError: if the snapshot cannot be saved, or is a rank's, which :func:`gather` did not join.
    """
    if isinstance(getattr(snapshot, "model", None), _Part):
        advice = "on all ranks, call whole = snapshot.gather(pipe, mine), then write the whole on rank 0"
        raise ValueError(f"the snapshot has only this rank's part of the model; {advice}")
    check_is(snapshot, "snapshot", Snapshot, "a gpipe.snapshot.Snapshot")
    _C.write_snapshot(os.fsencode(path), *_to_file(snapshot))


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot that :func:`write` or a C++ program wrote. Its tensors are on the CPU. Raises OSError if it
    cannot be read, and ValueError if it is not regular, changed, truncated, not a snapshot, or of a newer version."""
    try:
        return _from_file(*_C.read_snapshot(os.fsencode(path)))
    except ValueError:
        with open(path, "rb") as file:
            if file.read(4) in (b"PK\3\4", b"\x80\2\x8a\n"):  # as torch writes it now, and wrote it once
                what = f"'{os.fsdecode(path)}' is not a snapshot, but a file of torch.save()"
                raise ValueError(f"{what}; read it with torch.load(..., weights_only=True)") from None
        raise


# Models.


class _Part(dict[str, Tensor]):
    """The state of one rank's layers."""


def capture_model(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and buffers to the CPU. Returns the copies by their names in ``state_dict()``. Raises
    TypeError if the model's state holds anything but tensors, for example from ``get_extra_state``."""
    captured = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors_of(model).items()}
    return _Part(captured) if set(getattr(model, "whole_state", ())) - captured.keys() else captured


def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copies captured tensors into a model's parameters and buffers, on their devices. Raises TypeError as
    :func:`capture_model`, and ValueError if names, shapes, dtypes or layouts differ, or a tensor of the model cannot be
    written in place. The model is then unchanged."""
    tensors = _tensors_of(model)
    for name in [*tensors, *saved]:
        ours, theirs = (kind_of(side[name]) if name in side else "missing" for side in (tensors, saved))
        if ours != theirs:
            raise ValueError(
                f"the snapshot is of another model: '{name}' is {theirs} in the snapshot and {ours} in this model"
            )
        tensor = tensors[name]
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides)):
            raise ValueError(f"cannot restore '{name}' of this model: its elements share memory; clone it first")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"cannot restore '{name}' of this model: it was made in inference mode; clone it first")
    model.load_state_dict(saved)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' of the model's state is {type(value)}; a snapshot holds only tensors of a model")
    return state


# Learning-rate schedulers.


def capture_scheduler(scheduler: Any) -> str:
    """Returns the state of a learning-rate scheduler as a text for the options of a snapshot. Raises TypeError if the state
    holds anything but numbers, texts and containers of them."""
    return json.dumps(_encoded(scheduler.state_dict()))


def restore_scheduler(scheduler: Any, text: str) -> None:
    """Restores a captured state in a scheduler that was made with the same arguments."""
    try:
        state = json.loads(text, object_hook=_decoded)
    except RecursionError as error:
        raise ValueError("the text is not a scheduler's state: it has too many levels") from error
    scheduler.load_state_dict(state)


def _encoded(value: Any) -> Any:
    """Returns a value as JSON can hold it. A dict with other keys than texts, such as a MultiStepLR has, becomes pairs."""
    if isinstance(value, (list, tuple)):
        return [_encoded(each) for each in value]
    if not isinstance(value, dict):
        return plain(value)
    pairs = [(key, _encoded(each)) for key, each in value.items()]
    return dict(pairs) if all(isinstance(key, str) for key in value) else {"": pairs}


def _decoded(found: dict[str, Any]) -> dict[Any, Any]:
    return Counter(dict(found[""])) if found.keys() == {""} else found


# Ranks.


def gather(pipe: GPipe, mine: Snapshot) -> Snapshot:
    """Joins the snapshots that all ranks capture from a pipeline and their optimizers. All ranks call it, as ``forward``.

        whole = snapshot.gather(pipe, mine)
        if ranks.rank == 0:
            snapshot.write("latest.snapshot", whole)

    Returns on rank 0 the snapshot that one process would have captured, with the other fields of its ``mine``; on the others
    one without tensors. A parameter that ranks share has its owner's value.

    Raises RuntimeError on all ranks if the optimizers differ in their class, groups or options, or a rank has failed;
    TypeError or ValueError for a snapshot that cannot be written, that is not of this rank's layers, or whose optimizer has
    a parameter that another rank owns, and RuntimeError on the other ranks.
    """
    if pipe.ranks is None:
        return mine
    with pipe.team.refusing():
        file, core, names = _to_file(mine), pipe._pipeline(), _state_names(pipe)
    whole = _from_file(*_C.gather_snapshot(core, *file, *names))
    kind = _Part if pipe.ranks.rank > 0 else dict
    whole.model = kind((name, whole.model[name]) for name in pipe.whole_state if name in whole.model)
    return whole


def own_part(pipe: GPipe, whole: Snapshot) -> Snapshot:
    """Returns a whole model's snapshot without the state of layers on other ranks, for :func:`restore_model` and
    :func:`restore_optimizer`. In one process returns ``whole``. An error on one rank leaves the others restored."""
    return whole if pipe.ranks is None else _from_file(*_C.part_of_snapshot(*_to_file(whole), *_state_names(pipe)))


def _state_names(pipe: GPipe) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the names of the whole state, each with the first name of its tensor, and the names of this rank's state."""
    return list(pipe.whole_state.items()), list(pipe.state_dict())


# Files.

def _to_file(snapshot: Snapshot) -> tuple[dict[str, Tensor], str]:
    """Returns the tensors of a snapshot's file by name, and the rest as JSON. See gpipe/snapshot/safetensors.h. The extension
    module checks both. Raises ValueError for names that the file has for others."""
    tensors = dict(snapshot.model)
    if reserved := [name for name in tensors if name.startswith(".")]:
        raise ValueError(f"the name '{reserved[0]}' in the model of a snapshot begins with a dot, like no state's; rename it")
    if snapshot.random is not None:
        tensors[".random"] = snapshot.random
    for name, values in snapshot.history.items():
        tensors[f".history.{name}"] = torch.tensor(check_numbers(values, f"history '{name}' of a snapshot"), dtype=torch.float64)
    state: dict[str, dict[str, Any]] = {}
    for parameter, fields in snapshot.optimizer["state"].items():
        if dotted := [name for name in fields if "." in name]:
            raise ValueError(f"the name '{dotted[0]}' in the optimizer's state of a snapshot has a dot; rename it")
        state[parameter] = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
        tensors |= {f".optimizer.{name}.{parameter}": value for name, value in fields.items() if isinstance(value, Tensor)}
    training: dict[str, Any] = {"version": 2, "epoch": snapshot.epoch, "position": snapshot.position}
    training |= {"options": snapshot.options, "optimizer": {**snapshot.optimizer, "state": state}}
    return tensors, json.dumps(training, allow_nan=False)


def _from_file(tensors: dict[str, Tensor], training: str) -> Snapshot:
    """Returns the snapshot of a file's tensors and JSON."""
    content = json.loads(training)
    optimizer = content["optimizer"]
    for group in optimizer["param_groups"]:
        group.update((name, tuple(value)) for name, value in group.items() if isinstance(value, list) and name != "params")
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(".")}
    random = tensors.get(".random")
    snapshot = Snapshot(model, optimizer, content["epoch"], content["position"], random, content["options"])
    for name, tensor in tensors.items():
        if name.startswith(".history."):
            snapshot.history[name.removeprefix(".history.")] = tensor.tolist()
        elif name.startswith(".optimizer."):
            _, _, field_name, parameter = name.split(".", 3)
            optimizer["state"].setdefault(parameter, {})[field_name] = tensor
    return snapshot
