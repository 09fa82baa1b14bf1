"""The state of an optimizer, under the names of the unpartitioned model's parameters. Part of :mod:`gpipe.snapshot`."""

from __future__ import annotations

from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe.checks import check_is

# Options that say how to compute a step, not its result. The optimizer keeps its own.
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


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


def capture_optimizer(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Copies an optimizer's options and state to the CPU. The pipeline or unpartitioned model names the parameters. C++
    restores an ``Adagrad``, ``Adam``, ``AdamW``, ``RMSprop`` or ``SGD``. Raises TypeError if the state of a parameter has
    anything but numbers and tensors of its shape or of no dimension, and ValueError if it does not belong to the model."""
    check_is(optimizer, "optimizer", Optimizer, "an optimizer", "give the optimizer first, then the model")
    captured = OptimizerState(type=type(optimizer).__name__, param_groups=[], state={})
    for group, names in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        options = {name: plain(value) for name, value in group.items() if name not in _HOW}
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
    # LibTorch's optimizers lack these options.
    defaults = {"maximize": False, "decoupled_weight_decay": state["type"] == "AdamW"}
    restored = optimizer.state_dict()
    restored["state"] = {}
    for index, (names, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        if lacking := set(names) - set(saved["params"]):
            _refuse(f"group {index} lacks '{min(lacking)}'")
        if surplus := set(saved["params"]) - set(names):
            _refuse(f"group {index} also has '{min(surplus)}'")
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


def plain(option: Any) -> Any:
    return option.item() if isinstance(option, Tensor) and option.dim() == 0 else option


def _saved(value: Any, field: str, name: str, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and value.shape in (parameter.shape, ()):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (int, float)):
        return value
    what = kind_of(value)
    raise TypeError(f"cannot capture '{field}' of '{name}', which is {what}, neither a number nor of the parameter's shape")


def _value(saved: Any, field: str, name: str, parameter: Tensor) -> Any:
    if isinstance(saved, Tensor) and (saved.dim() == 0 or kind_of(saved) == kind_of(parameter)):
        return saved.detach().to("cpu", copy=True)
    if not isinstance(saved, (int, float)):
        _refuse(f"its '{field}' of '{name}' is {kind_of(saved)}, not a number or a tensor of {kind_of(parameter)}")
    return saved  # also for a tensor, from C++; load_state_dict() of torch's optimizers makes it


def _names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns for each group the names of its parameters."""
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(state.items())}  # the first of several
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                what = f"parameter {index} in group {number} of the optimizer does not belong to the model"
                raise ValueError(f"{what}; create the optimizer with the model's parameters")
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")


def kind_of(value: object) -> str:
    """Describes a tensor so that it can be copied into any other of the same description; another object by its type."""
    if not isinstance(value, Tensor):
        return str(type(value))
    kind = f"{value.dtype} of shape {tuple(value.shape)}"
    kind += "" if value.layout is torch.strided else f" and {value.layout}"
    kind += " without data" if value.is_meta else ""
    return kind + (f" and {value.qscheme()}" if value.is_quantized else "")
