"""Snapshots of a pipeline over ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpipe.pipeline import GPipe
from gpipe.snapshot.archive import dump, plain
from gpipe.snapshot.optimizer import OptimizerState
from gpipe.snapshot.snapshot import Snapshot


def gather(pipe: GPipe, mine: Snapshot) -> Snapshot:
    """Joins the snapshots that all ranks capture from a pipeline and their optimizers. All ranks call it, as ``forward``.

        whole = snapshot.gather(pipe, mine)
        if ranks.rank == 0:
            snapshot.write("latest.snapshot", whole)

    Args:
        pipe: the pipeline.
        mine: the model and the optimizer of this rank. Its other fields count on rank 0 only.

    Returns:
        On rank 0 the snapshot that one process would have captured; on other ranks one without tensors. In one process
        ``mine``. An optimizer's group lists its parameters in the order of the model. A parameter that ranks share has its
        owner's value.

    Raises:
        RuntimeError: on all ranks, if the optimizers differ in their class, groups or options, or a rank has failed.
        TypeError, ValueError: for a snapshot that cannot be written, as :func:`write`, that is not of this rank's layers, or
            whose optimizer has a parameter that another rank owns; RuntimeError on the other ranks.
    """
    if pipe.ranks is None:
        return mine
    ranks = pipe.ranks
    is_first = ranks.rank == 0
    with pipe.refusing():
        state = {"model": plain(mine.model, "model"), "optimizer": plain(mine.optimizer, "optimizer")}
        _check_own(pipe, mine)
        part = b"" if is_first or ranks.replica != 0 else dump(state).getvalue()
    parts = pipe.gather(part, f"the state of {_description(mine.optimizer)}")
    if not is_first:
        return Snapshot()
    states = [state, *(torch.load(io.BytesIO(part), weights_only=True) for part in parts[ranks.replicas :: ranks.replicas])]
    places = {name: place for place, name in enumerate(pipe.whole_state)}
    model: dict[str, Tensor] = {name: tensor for each in states for name, tensor in each["model"].items()}
    owners = {name: rank for rank, each in enumerate(states) for name in each["model"]}

    def value_of(name: str) -> Tensor:
        first = pipe.whole_state.get(name, name)
        is_borrowed = owners.get(first, owners[name]) != owners[name]
        return model[first].clone() if is_borrowed else model[name]

    optimizers: list[OptimizerState] = [each["optimizer"] for each in states]
    groups = [
        {**group, "params": _ordered((name for each in optimizers for name in each["param_groups"][index]["params"]), places)}
        for index, group in enumerate(optimizers[0]["param_groups"])
    ]
    of_parameters = {name: fields for each in optimizers for name, fields in each["state"].items()}
    listed = [name for group in groups for name in group["params"] if name in of_parameters]
    return replace(
        mine,
        model={name: value_of(name) for name in _ordered(model, places)},
        optimizer={
            "type": optimizers[0]["type"],
            "param_groups": groups,
            "state": {name: of_parameters[name] for name in listed},
        },
    )


def own_part(pipe: GPipe, whole: Snapshot) -> Snapshot:
    """Returns the part of a whole model's snapshot that :func:`restore_model` and :func:`restore_optimizer` accept on this
    rank. Leaves out only the state of layers on other ranks. In one process returns ``whole``.

    Each rank restores its part: an error on one rank leaves the others restored.
    """
    if pipe.ranks is None:
        return whole
    elsewhere = pipe.whole_state.keys() - pipe.state_dict().keys()
    optimizer = whole.optimizer
    return replace(
        whole,
        model={name: tensor for name, tensor in whole.model.items() if name not in elsewhere},
        optimizer={
            "type": optimizer["type"],
            "param_groups": [
                {**group, "params": [name for name in group["params"] if name not in elsewhere]}
                for group in optimizer["param_groups"]
            ],
            "state": {name: fields for name, fields in optimizer["state"].items() if name not in elsewhere},
        },
    )


def _check_own(pipe: GPipe, mine: Snapshot) -> None:
    """Refuses a snapshot that is not of this rank's layers, or whose optimizer trains what another rank owns."""
    own = pipe.state_dict().keys()
    for name in own:
        if name not in mine.model:
            raise ValueError(f"the snapshot lacks '{name}' of this rank's layers")
    trained = [*(name for group in mine.optimizer["param_groups"] for name in group["params"]), *mine.optimizer["state"]]
    for name in (*mine.model, *trained):
        if name not in own:
            raise ValueError(f"the snapshot has '{name}', which is not of this rank's layers")
    for name in trained:
        if (first := pipe.whole_state.get(name, name)) not in own:
            raise ValueError(
                f"the optimizer has '{name}', which another rank trains as '{first}'; make the optimizer of the pipeline's "
                "parameters()"
            )


def _ordered(names: Iterable[str], places: dict[str, int]) -> list[str]:
    """Sorts names by their places in the model's state. Names that were added later come last."""
    return sorted(names, key=lambda name: places.get(name, len(places)))


def _description(optimizer: OptimizerState) -> str:
    """What the optimizers of all ranks must have in common."""
    groups: list[dict[str, Any]] = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer["param_groups"]
    ]
    return f"the optimizer '{optimizer['type']}' with groups {groups}"
