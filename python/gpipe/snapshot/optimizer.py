"""Captures and restores the options and state of an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from gpipe.snapshot.model import copied, kind_of


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


class _Layout(NamedTuple):
    """The options and state of an optimizer class."""

    options: dict[str, type]
    # Tensors of a parameter's shape. The value says whether each is required, or names the option that requires it.
    tensors: dict[str, bool | str]
    counts: bool = True  # whether the state of a parameter has the number of steps


_ADAM = _Layout(
    {"lr": float, "betas": tuple, "eps": float, "weight_decay": float, "amsgrad": bool},
    {"exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": "amsgrad"},
)
_LAYOUTS: dict[type[Optimizer], _Layout] = {
    Adagrad: _Layout(
        {"lr": float, "lr_decay": float, "weight_decay": float, "initial_accumulator_value": float, "eps": float},
        {"sum": True},
    ),
    Adam: _ADAM,
    AdamW: _ADAM,
    RMSprop: _Layout(
        {"lr": float, "alpha": float, "eps": float, "weight_decay": float, "momentum": float, "centered": bool},
        {"square_avg": True, "momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    SGD: _Layout(
        {"lr": float, "momentum": float, "dampening": float, "weight_decay": float, "nesterov": bool},
        {"momentum_buffer": False},  # created by the first step
        counts=False,
    ),
}


def capture_optimizer(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Copies an optimizer's options and state to the CPU.

    Options that only Python's classes have and that do not change the result, such as ``foreach`` and ``capturable``,
    are not captured.

    Args:
        optimizer: a ``torch.optim.Adagrad``, ``Adam``, ``AdamW``, ``RMSprop`` or ``SGD``.
        model: a :class:`gpipe.GPipe` or the unpartitioned model, for the names of the parameters.

    Returns:
        The copy.

    Raises:
        TypeError: if the optimizer is of another class.
        ValueError: if a parameter does not belong to the model, or for an option that LibTorch's class does not have.
    """
    layout = _layout_of(optimizer)
    captured: OptimizerState = {"type": type(optimizer).__name__, "param_groups": [], "state": {}}
    for group, names in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        _check_expressible(optimizer, group)
        options = {name: _converted(group[name], kind) for name, kind in layout.options.items()}
        captured["param_groups"].append({"params": names, **options})
        for name, parameter in zip(names, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            copies: dict[str, Any] = {}
            copies.update((key, copied(state[key])) for key in layout.tensors if isinstance(state.get(key), Tensor))
            if layout.counts and "step" in state:
                copies["step"] = int(state["step"])
            if copies:
                captured["state"][name] = copies
    return captured


def restore_optimizer(optimizer: Optimizer, model: nn.Module, state: OptimizerState) -> None:
    """Restores captured options and state. Copies tensors to the devices of their parameters.

    Args:
        optimizer: an optimizer of the captured class, with the same groups of parameters, in any order within a group.
        model: a :class:`gpipe.GPipe` or the unpartitioned model, for the names of the parameters.
        state: the result of :func:`capture_optimizer`.

    Raises:
        TypeError: if the optimizer is of a class that cannot be captured.
        ValueError: if the class, groups, names, shapes or types differ. The optimizer is then unchanged.
    """
    layout = _layout_of(optimizer)
    if state["type"] != type(optimizer).__name__:
        _refuse(f"it is of class {state['type'] or 'none'}, but this one is of class {type(optimizer).__name__}")
    groups = _names(optimizer, model)
    for group in optimizer.param_groups:
        _check_expressible(optimizer, group)
    _check_groups(groups, [group["params"] for group in state["param_groups"]])

    restored = optimizer.state_dict()
    restored["state"] = {}
    for index, (names, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        group = restored["param_groups"][index]
        options = {name: _option(saved, name, kind, f"group {index}") for name, kind in layout.options.items()}
        if isinstance(group["lr"], Tensor):
            options["lr"] = torch.full_like(group["lr"], options["lr"])
        group.update(options)
        parameters = optimizer.param_groups[index]["params"]
        for name, number, parameter in zip(names, group["params"], parameters, strict=True):
            if name in state["state"]:
                restored["state"][number] = _state(state["state"][name], name, parameter, options, layout)
    if surplus := state["state"].keys() - {name for names in groups for name in names}:
        _refuse(f"it has the state of '{min(surplus)}', which is not a parameter of this one")
    optimizer.load_state_dict(restored)


def _layout_of(optimizer: Optimizer) -> _Layout:
    layout = _LAYOUTS.get(type(optimizer))
    if layout is None:
        known = ", ".join(sorted(kind.__name__ for kind in _LAYOUTS))
        raise TypeError(
            f"cannot capture or restore an optimizer of {type(optimizer)}; use one of torch.optim's {known}"
        )
    return layout


def _check_expressible(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Raises ValueError for options that LibTorch's classes lack and that change the result."""
    unknown = ["maximize"] + ["decoupled_weight_decay"] * (type(optimizer) is Adam)
    for option in unknown:
        if group.get(option):
            advice = "negate the loss" if option == "maximize" else "use AdamW"
            raise ValueError(
                f"cannot capture or restore {option}={group[option]}, which LibTorch's optimizers lack; {advice}"
            )


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


def _converted(value: Any, kind: type) -> Any:
    return tuple(float(each) for each in value) if kind is tuple else kind(value)


def _option(saved: dict[str, Any], name: str, kind: type, owner: str) -> Any:
    value = saved.get(name)
    pair = kind is tuple and isinstance(value, (tuple, list)) and len(value) == 2
    if type(value) is not kind and not pair:
        _refuse(f"its '{name}' of {owner} is {value!r}, not a {'pair' if kind is tuple else kind.__name__}")
    return _converted(value, kind)


def _state(
    saved: dict[str, Any], owner: str, parameter: Tensor, options: dict[str, Any], layout: _Layout
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, needed in layout.tensors.items():
        tensor = saved.get(name)
        if isinstance(tensor, Tensor) and kind_of(tensor) == kind_of(parameter):
            state[name] = copied(tensor)
        elif tensor is not None:
            what = kind_of(tensor) if isinstance(tensor, Tensor) else repr(tensor)
            _refuse(f"its '{name}' of '{owner}' is {what}, not a tensor of {kind_of(parameter)}")
        elif options[needed] if isinstance(needed, str) else needed:
            _refuse(f"its '{name}' of '{owner}' is missing")
    if layout.counts:
        if type(saved.get("step")) is not int:
            _refuse(f"its 'step' of '{owner}' is {saved.get('step')!r}, not an int")
        # torch.optim uses these dtypes.
        wide = torch.get_default_dtype() == torch.float64
        state["step"] = torch.tensor(float(saved["step"]), dtype=torch.float64 if wide else torch.float32)
    return state


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")
