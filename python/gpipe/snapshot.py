"""Saves a training state in a folder and loads it, so that training continues as if it had not stopped.

    snapshot.save("run/latest", pipe, optimizer=optimizer, scheduler=scheduler, extra={"epoch": epoch})

    saved = snapshot.load("run/latest", pipe, optimizer=optimizer, scheduler=scheduler)
    epoch = saved.extra["epoch"]

Each rank writes its tensors to two safetensors files, under the names of the unpartitioned model, with Hugging Face's
index of them: ``from_pretrained`` opens the folder. A snapshot fits the model at any balance and number of ranks, each
of which reads only what it needs. ``snapshot.json`` is renamed last, so the folder has the newest snapshot or the one
before, whenever a process is killed. C++ reads and writes the same.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gpipe import _C
from gpipe.checks import check_is, check_whole
from gpipe.planning import Plan
from gpipe.state import OwnState, optimizer_from_json, optimizer_to_json, packed, restore_texts, unpacked

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

__all__ = ["Snapshot", "load", "save"]


@dataclass
class Snapshot:
    """What a snapshot has besides the states that :func:`load` restores.

    Attributes:
        step: the number that :func:`save` got.
        plan: the pipeline's :attr:`gpipe.GPipe.plan`; empty for another model.
        extra: what :func:`save` got.
    """

    step: int
    plan: Plan
    extra: Any


def save(
    folder: str | os.PathLike[str],
    pipe: GPipe | nn.Module,
    *,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: GradScaler | None = None,
    step: int = 0,
    extra: Any = None,
) -> None:
    """Saves the state of a pipeline, or of another module, and of the random generators. Over ranks all call it with
    the same folder, as they call ``forward``; no tensor goes to another rank. It returns when the snapshot is whole on
    the disk, and the one before is removed.

    Args:
        folder: where the snapshot is or will be. Other files in it stay.
        optimizer: any of torch's, or another whose ``state_dict()`` has the same form, of the pipeline's
            ``parameters()``. A rank that trains none may give ``None``.
        scheduler, scaler: have a ``state_dict()``.
        step: a number of your choice.
        extra: numbers, texts, tensors and containers of them. Over ranks, rank 0's counts.

    Raises:
        OSError: with the path and the reason; BlockingIOError if another writer is writing to the folder.
        TypeError, ValueError: for a state or extra that cannot be saved, and an optimizer of another model.
        RuntimeError: if the ranks' optimizers differ in their class, groups or options, or another rank has failed.
    """
    ranks = getattr(pipe, "ranks", None)
    own = OwnState(check_is(pipe, "pipe", nn.Module, "a pipeline or another module"))
    with nullcontext() if ranks is None else cast("GPipe", pipe).team.refusing():
        core = None if ranks is None else cast("GPipe", pipe)._pipeline()
        manifest: dict[str, Any] = {"step": check_whole(step, "step", bits=63), "plan": getattr(pipe, "plan", {})}
        weights, state, others = own.saved(), dict[str, Tensor](), dict[str, Any]()
        for name in [name for name, value in weights.items() if not isinstance(value, Tensor)]:
            others[name] = packed(weights.pop(name), f".model/{name}", state)
        if optimizer is not None:
            check_is(optimizer, "optimizer", Optimizer, "an optimizer")
            manifest["optimizer"] = optimizer_to_json(optimizer, own, state)
        for name, each in (("scheduler", scheduler), ("scaler", scaler)):
            if each is not None:
                manifest[name] = packed(each.state_dict(), f".{name}", state)
        if own.rank == 0:
            manifest["extra"] = packed(extra, ".extra", state)
        text = json.dumps(manifest | {"model": others, "random": _generators(own)}, ensure_ascii=False).encode()
    _C.save_snapshot(os.fsencode(folder), core, weights, state, text)


def load(
    folder: str | os.PathLike[str],
    pipe: GPipe | nn.Module | None = None,
    *,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: GradScaler | None = None,
) -> Snapshot:
    """Loads a snapshot into a pipeline, or another module, and into what else is given, by its ``load_state_dict()``.
    Each rank gets its own random generators back; with another number of ranks, all get the first one's. Without a
    pipeline, only reads what the snapshot says, such as its plan.

    Raises:
        OSError: with the path and the reason; FileNotFoundError if the folder has no whole snapshot.
        ValueError: for a snapshot that is damaged, of a newer version, or of another model or optimizer. Nothing has
            changed then. An error on one rank leaves the others loaded.
    """
    reader = _C.SnapshotReader(os.fsencode(folder))
    manifest = json.loads(reader.manifest)
    states: list[tuple[Any, Any]] = []
    for name, each in (("optimizer", optimizer), ("scheduler", scheduler), ("scaler", scaler)):
        if each is not None and name not in manifest:
            raise ValueError(f"the snapshot has no {name}, because save() got none; load without it")
        if each is not None and pipe is None:
            raise TypeError(f"load() got a {name}, but not its pipeline: give both, load(folder, pipe, {name}={name})")
    if pipe is not None:
        own = OwnState(check_is(pipe, "pipe", nn.Module, "a pipeline or another module"))
        states = [(pipe, own.loaded(reader, manifest.get("model", {})))]
        if optimizer is not None:
            states.append((optimizer, optimizer_from_json(optimizer, manifest["optimizer"], own, reader.read)))
        for name, each in (("scheduler", scheduler), ("scaler", scaler)):
            if each is not None:
                states.append((each, unpacked(manifest[name], reader.read)))
        for each, state in states:
            each.load_state_dict(state)
        if optimizer is not None:
            restore_texts(optimizer)
        if generators := manifest.get("random"):
            _set_generators(generators[own.rank if len(generators) == own.ranks else 0], own, reader.read)
    return Snapshot(manifest.get("step", 0), manifest.get("plan", {}), unpacked(manifest.get("extra"), reader.read))


def _generators(own: OwnState) -> dict[str, Any]:
    def text(state: Tensor) -> str:
        return base64.b64encode(bytes(state.tolist())).decode()

    devices = [text(torch.get_device_module(device).get_rng_state(device)) for device in own.devices()]
    states = {"torch": text(torch.get_rng_state()), "devices": devices, "python": packed(random.getstate(), "", {})}
    if numpy := sys.modules.get("numpy.random"):
        name, keys, *rest = numpy.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def _set_generators(states: dict[str, Any], own: OwnState, read: Callable[[str], Tensor]) -> None:
    def state(text: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    torch.set_rng_state(state(states["torch"]))
    for device, text in zip(own.devices(), states.get("devices", [])):
        torch.get_device_module(device).set_rng_state(state(text), device)
    if "python" in states:
        random.setstate(unpacked(states["python"], read))
    if "numpy" in states and (numpy := sys.modules.get("numpy.random")):
        numpy.set_state(tuple(states["numpy"]))
