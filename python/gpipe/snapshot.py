"""Saves a training state in a file and restores it, so that training continues as if it had not stopped.

    model, state = snapshot.capture_model(pipe), snapshot.capture_optimizer(optimizer, pipe)
    snapshot.write("latest.snapshot", snapshot.Snapshot(model, state, epoch, random=torch.get_rng_state()))

    saved = snapshot.read("latest.snapshot")
    snapshot.restore_model(pipe, saved.model)
    snapshot.restore_optimizer(optimizer, pipe, saved.optimizer)
    torch.set_rng_state(saved.random)

Over ranks, :func:`gather` joins the snapshots that all capture on rank 0, which writes; each restores its :func:`own_part`.

Parameters have the names of the unpartitioned model, so a snapshot fits the model at any balance. C++ reads and writes the
same files, in the safetensors format: ``safetensors.torch.load_file(path)`` reads the weights. The names of tensors that are
not the model's begin with a dot.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe import _C
from gpipe.checks import check_is, check_numbers, check_whole, shown
from gpipe.convert import refuse_file_of_torch

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


class OptimizerState(TypedDict):
    """An optimizer's options and state, under the names that LibTorch and Python share.

    Attributes:
        type: the class, such as ``'AdamW'``; empty for none.
        param_groups: the options of each group of parameters, with the parameters' names as ``'params'``.
        state: the state of each parameter that has any, by name.
    """

    type: str
    param_groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


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
        raise ValueError(
            "the snapshot has only this rank's part of the model; on all ranks, call whole = snapshot.gather(pipe, mine), then "
            "write the whole on rank 0"
        )
    file = _to_file(check_is(snapshot, "snapshot", Snapshot, "a gpipe.snapshot.Snapshot"))
    _C.write_snapshot(os.fsencode(path), *file)


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot that :func:`write` or a C++ program wrote. Its tensors are on the CPU. Raises OSError if it
    cannot be read, and ValueError if it is not regular, changed, truncated, not a snapshot, or of a newer version."""
    try:
        return _from_file(*_C.read_snapshot(os.fsencode(path)))
    except ValueError:
        refuse_file_of_torch(path)
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
        ours, theirs = (_kind_of(side[name]) if name in side else "missing" for side in (tensors, saved))
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


def _kind_of(value: object) -> str:
    """Describes a tensor so that it can be copied into any other of the same description; another object by its type."""
    if not isinstance(value, Tensor):
        return str(type(value))
    kind = f"{value.dtype} of shape {tuple(value.shape)}"
    kind += "" if value.layout is torch.strided else f" and {value.layout}"
    kind += " without data" if value.is_meta else ""
    return kind + (f" and {value.qscheme()}" if value.is_quantized else "")


# Optimizers.

# Options that say how to compute a step, not its result. The optimizer keeps its own.
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


def capture_optimizer(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Copies an optimizer's options and state to the CPU. The pipeline or unpartitioned model names the parameters. C++
    restores an ``Adagrad``, ``Adam``, ``AdamW``, ``RMSprop`` or ``SGD``. Raises TypeError if the state of a parameter has
    anything but numbers and tensors of its shape, and ValueError if it does not belong to the model."""
    check_is(optimizer, "optimizer", Optimizer, "an optimizer", "give the optimizer first, then the model")
    captured = OptimizerState(type=type(optimizer).__name__, param_groups=[], state={})
    for group, names in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        options = {name: _plain(value) for name, value in group.items() if name not in _HOW}
        captured["param_groups"].append({"params": names, **options})
        for name, parameter in zip(names, group["params"], strict=True):
            fields = optimizer.state.get(parameter, {})
            if state := {field: _saved(value, field, name, parameter) for field, value in fields.items() if value is not None}:
                captured["state"][name] = state
    return captured


def restore_optimizer(optimizer: Optimizer, model: nn.Module, state: OptimizerState) -> None:
    """Restores captured options and state in an optimizer of the same class, with the same groups of parameters, in any order
    within a group. Raises ValueError if the class, groups, names, shapes or types differ. The optimizer is then unchanged."""
    if state["type"] != type(optimizer).__name__:
        _refuse(f"it is of class {state['type'] or 'none'}, but this one is of class {type(optimizer).__name__}")
    groups = _names(optimizer, model)
    if len(groups) != len(state["param_groups"]):
        _refuse(f"it has {len(state['param_groups'])} groups of parameters, but this one has {len(groups)}")
    for index, (ours, group) in enumerate(zip(groups, state["param_groups"])):
        if lacking := set(ours) - set(group["params"]):
            _refuse(f"group {index} lacks '{min(lacking)}'")
        if surplus := set(group["params"]) - set(ours):
            _refuse(f"group {index} also has '{min(surplus)}'")
    # LibTorch's optimizers lack these options.
    defaults = {"maximize": False, "decoupled_weight_decay": state["type"] == "AdamW"}

    restored = optimizer.state_dict()
    restored["state"] = {}
    for index, (names, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        group = restored["param_groups"][index]
        options = {name: value for name, value in defaults.items() if name in group} | saved
        for name, value in group.items():
            if name not in _HOW and name not in options:
                _refuse(f"its '{name}' of group {index} is missing")
            if isinstance(value, Tensor) and name in options:
                options[name] = torch.full_like(value, options[name])
        group.update((name, value) for name, value in options.items() if name != "params")
        parameters = optimizer.param_groups[index]["params"]
        for name, number, parameter in zip(names, group["params"], parameters, strict=True):
            if name in state["state"]:
                fields = state["state"][name]
                restored["state"][number] = {field: _value(value, field, name, parameter) for field, value in fields.items()}
    if surplus := state["state"].keys() - {name for names in groups for name in names}:
        _refuse(f"it has the state of '{min(surplus)}', which is not a parameter of this one")
    optimizer.load_state_dict(restored)


def _plain(option: Any) -> Any:
    return option.item() if isinstance(option, Tensor) and option.dim() == 0 else option


def _saved(value: Any, field: str, name: str, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape and field != "step":
        return value.detach().to("cpu", copy=True)
    number = _plain(value)
    if isinstance(number, (int, float)):
        return int(number) if field == "step" else number
    what = _kind_of(value)
    raise TypeError(f"cannot capture '{field}' of '{name}', which is {what}, neither a number nor of the parameter's shape")


def _value(saved: Any, field: str, name: str, parameter: Tensor) -> Tensor:
    if isinstance(saved, Tensor) and _kind_of(saved) == _kind_of(parameter):
        return saved.detach().to("cpu", copy=True)
    if not isinstance(saved, (int, float)):
        _refuse(f"its '{field}' of '{name}' is {_kind_of(saved)}, not a number or a tensor of {_kind_of(parameter)}")
    # torch.optim uses these dtypes.
    return torch.tensor(float(saved), dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)


def _names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns for each group the names of its parameters."""
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(state.items())}  # the first of several
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {index} in group {number} of the optimizer does not belong to the model; create the "
                    "optimizer with the model's parameters"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")


# Learning-rate schedulers.


def capture_scheduler(scheduler: Any) -> str:
    """Returns the state of a learning-rate scheduler as a text for the options of a snapshot. Raises TypeError if the state
    holds anything but numbers, texts and containers of them."""
    return json.dumps(_encoded(scheduler.state_dict()))


def restore_scheduler(scheduler: Any, text: str) -> None:
    """Restores a captured state in a scheduler that was made with the same arguments."""
    scheduler.load_state_dict(json.loads(text, object_hook=_decoded))


def _encoded(value: Any) -> Any:
    """Returns a value as JSON can hold it. A dict with other keys than texts, such as a MultiStepLR has, becomes pairs."""
    if isinstance(value, (list, tuple)):
        return [_encoded(each) for each in value]
    if not isinstance(value, dict):
        return _plain(value)
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

    Returns:
        On rank 0 the snapshot that one process would have captured, with the other fields of its ``mine``; on other ranks
        one without tensors. A parameter that ranks share has its owner's value.

    Raises:
        RuntimeError: on all ranks, if the optimizers differ in their class, groups or options, or a rank has failed.
        TypeError, ValueError: for a snapshot that cannot be written, that is not of this rank's layers, or whose optimizer
            has a parameter that another rank owns; RuntimeError on the other ranks.
    """
    if pipe.ranks is None:
        return mine
    with pipe.refusing():
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

_DICTS = {
    "model": "a dict of tensors, as capture_model() returns",
    "optimizer": "a dict, as capture_optimizer() returns",
    "position": "a dict of integers",
    "options": "a dict of texts",
    "history": "a dict of lists of numbers",
}


def _to_file(snapshot: Snapshot) -> tuple[dict[str, Tensor], str]:
    """Returns the tensors of a snapshot's file by name, and the rest as JSON. See gpipe/snapshot/safetensors.h. Raises
    TypeError or ValueError for fields of a wrong type."""
    _check(snapshot)
    tensors = dict(snapshot.model)
    if snapshot.random is not None:
        tensors[".random"] = snapshot.random
    for name, values in snapshot.history.items():
        tensors[f".history.{name}"] = torch.tensor(values, dtype=torch.float64)
    state: dict[str, dict[str, Any]] = {}
    for parameter, fields in snapshot.optimizer["state"].items():
        state[parameter] = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
        tensors |= {f".optimizer.{name}.{parameter}": value for name, value in fields.items() if isinstance(value, Tensor)}
    training: dict[str, Any] = {"version": 2, "epoch": snapshot.epoch, "position": snapshot.position}
    training |= {"options": snapshot.options, "optimizer": {**snapshot.optimizer, "state": state}}
    return tensors, json.dumps(training, allow_nan=False)


def _check(snapshot: Snapshot) -> None:
    """Raises TypeError or ValueError for fields that a file cannot hold. The extension module checks the tensors."""
    for name, words in _DICTS.items():
        check_is(getattr(snapshot, name), f"{name} of a snapshot", Mapping, words)  # type: ignore[type-abstract]
    if lacking := OptimizerState.__required_keys__ - snapshot.optimizer.keys():
        raise TypeError(f"optimizer of a snapshot has no '{min(lacking)}'; give what capture_optimizer() returns")
    check_whole(snapshot.epoch, "epoch of a snapshot", bits=63)
    for name, number in snapshot.position.items():
        check_whole(number, f"position '{name}' of a snapshot", bits=63)
    for name, text in snapshot.options.items():
        check_is(text, f"option '{name}' of a snapshot", str, "a str", "use str() or json.dumps() of it")
    for name, values in snapshot.history.items():
        check_numbers(values, f"history '{name}' of a snapshot")


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
