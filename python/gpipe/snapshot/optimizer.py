"""Captures and restores the options and state of an optimizer."""

from __future__ import annotations

from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe.snapshot.model import copied, kind_of

# Options that say how to compute a step, not its result. They stay those of the optimizer.
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


class OptimizerState(TypedDict):
    """An optimizer's options and state. They have the names that LibTorch and Python share.

    Attributes:
        type: the class, such as ``'AdamW'``; empty for no optimizer.
        param_groups: for each group of parameters, its options, and under ``'params'`` the names of its parameters.
        state: the state of each parameter that has any, by name.
    """

    type: str
    param_groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


def capture_optimizer(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Copies an optimizer's options and state to the CPU.

    C++ restores an ``Adagrad``, ``Adam``, ``AdamW``, ``RMSprop`` or ``SGD``.

    Args:
        optimizer: an optimizer whose state is, for each parameter, numbers and tensors of the parameter's shape.
        model: a :class:`gpipe.GPipe` or the unpartitioned model, for the names of the parameters.

    Returns:
        The copy.

    Raises:
        TypeError: if the state has other values, such as the history of an ``LBFGS``.
        ValueError: if a parameter does not belong to the model.
    """
    captured: OptimizerState = {"type": type(optimizer).__name__, "param_groups": [], "state": {}}
    for group, names in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        options = {name: _plain(value) for name, value in group.items() if name not in _HOW}
        captured["param_groups"].append({"params": names, **options})
        for name, parameter in zip(names, group["params"], strict=True):
            fields = optimizer.state.get(parameter, {})
            if state := {field: _saved(value, field, name, parameter) for field, value in fields.items() if value is not None}:
                captured["state"][name] = state
    return captured


def restore_optimizer(optimizer: Optimizer, model: nn.Module, state: OptimizerState) -> None:
    """Restores captured options and state. Copies tensors to the devices of their parameters.

    Args:
        optimizer: an optimizer of the captured class, with the same groups of parameters, in any order within a group.
        model: a :class:`gpipe.GPipe` or the unpartitioned model, for the names of the parameters.
        state: the result of :func:`capture_optimizer`.

    Raises:
        ValueError: if the class, groups, names, shapes or types differ. The optimizer is then unchanged.
    """
    if state["type"] != type(optimizer).__name__:
        _refuse(f"it is of class {state['type'] or 'none'}, but this one is of class {type(optimizer).__name__}")
    groups = _names(optimizer, model)
    _check_groups(groups, [group["params"] for group in state["param_groups"]])
    # LibTorch's optimizers lack these options.
    lacking = {"maximize": False, "decoupled_weight_decay": state["type"] == "AdamW"}

    restored = optimizer.state_dict()
    restored["state"] = {}
    for index, (names, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        group = restored["param_groups"][index]
        options = {**{name: value for name, value in lacking.items() if name in group}, **saved}
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
        return copied(value)
    number = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
    if isinstance(number, (int, float)):
        return int(number) if field == "step" else number
    what = kind_of(value)
    raise TypeError(f"cannot capture '{field}' of '{name}', which is {what}, neither a number nor of the parameter's shape")


def _value(saved: Any, field: str, name: str, parameter: Tensor) -> Tensor:
    if isinstance(saved, Tensor) and kind_of(saved) == kind_of(parameter):
        return copied(saved)
    if not isinstance(saved, (int, float)):
        _refuse(f"its '{field}' of '{name}' is {kind_of(saved)}, not a number or a tensor of {kind_of(parameter)}")
    # torch.optim uses these dtypes.
    return torch.tensor(float(saved), dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)


def _names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns for each group the names of its parameters."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    groups: list[list[str]] = []
    for group in optimizer.param_groups:
        groups.append([])
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {len(groups[-1])} in group {len(groups) - 1} of the optimizer does not belong to the "
                    "model; create the optimizer with the model's parameters"
                )
            groups[-1].append(names[id(parameter)])
    return groups


def _check_groups(ours: list[list[str]], theirs: list[list[str]]) -> None:
    if len(ours) != len(theirs):
        _refuse(f"it has {len(theirs)} groups of parameters, but this one has {len(ours)}")
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if lacking := set(our) - set(their):
            _refuse(f"group {index} lacks '{min(lacking)}'")
        if surplus := set(their) - set(our):
            _refuse(f"group {index} also has '{min(surplus)}'")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")
