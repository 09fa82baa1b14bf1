"""The state of an optimizer, by the names of the unpartitioned model's parameters. Part of :mod:`gpipe.snapshot`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpipe.own_state import OwnState
from gpipe.packing import packed, unpacked


def optimizer_to_json(optimizer: Optimizer, own: OwnState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the state of an optimizer as JSON can hold it. Its tensors become their names in ``tensors``."""
    state = optimizer.state_dict()
    names, groups = own.names_in(optimizer), state.pop("param_groups")
    numbered = {number: name for of, group in zip(names, groups) for name, number in zip(of, group["params"])}
    saved: dict[str, Any] = {"type": type(optimizer).__name__, "param_groups": [], "state": {}}
    for index, (of, group) in enumerate(zip(names, groups)):
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        saved["param_groups"].append(packed(options, f".optimizer/group {index}", tensors) | {"params": of})
    fields_of = state.pop("state")
    for number, name in numbered.items():
        if number in fields_of:
            saved["state"][name] = packed(fields_of.pop(number), f".optimizer/{name}", tensors)
    return saved | {"rest": packed(state | {"state": fields_of}, ".optimizer/rest", tensors)}


def optimizer_from_json(
    optimizer: Optimizer, saved: dict[str, Any], own: OwnState, read: Callable[[str], Tensor]
) -> dict[str, Any]:
    """Returns what the optimizer's ``load_state_dict()`` takes. Options that only this optimizer has stay."""
    if saved["type"] != type(optimizer).__name__:
        _refuse(f"it is of class {saved['type']}, but this one is of class {type(optimizer).__name__}")
    names, groups = own.names_in(optimizer), optimizer.state_dict()["param_groups"]
    if len(names) != len(saved["param_groups"]):
        _refuse(f"it has {len(saved['param_groups'])} groups of parameters, but this one has {len(names)}")
    state = unpacked(saved.get("rest", {"state": {}}), read) | {"param_groups": groups}
    for index, (of, group, options) in enumerate(zip(names, groups, saved["param_groups"])):
        if lacking := set(of) - set(options["params"]):
            _refuse(f"group {index} lacks '{min(lacking)}'")
        if surplus := set(options["params"]) - set(of) - own.elsewhere:
            _refuse(f"group {index} also has '{min(surplus)}'")
        group |= {name: unpacked(value, read) for name, value in options.items() if name != "params"}
        group.pop("param_names", None)  # the optimizer keeps its own
        for name, number in zip(of, group["params"]):
            if name in saved["state"]:
                state["state"][number] = _mapped(unpacked(saved["state"][name], read), _Text, str)
        if isinstance(optimizer, torch.optim.LBFGS):
            holders = [number for number in group["params"] if state["state"].get(number, {}).get("d") is not None]
            numbers = sum(each.numel() for each in optimizer.param_groups[index]["params"])
            if holders and (holders != group["params"][:1] or state["state"][holders[0]]["d"].numel() != numbers):
                _refuse("an LBFGS has one state for all its parameters, which over ranks fits the same cut only")
    return cast(dict[str, Any], state)


class _Text:
    """Stands for a text in a parameter's state, which ``Optimizer.load_state_dict()`` would take for a container."""

    def __init__(self, text: str) -> None:
        self.text = text


def restore_texts(optimizer: Optimizer) -> None:
    """To call after ``load_state_dict()``."""
    for parameter, fields in optimizer.state.items():
        optimizer.state[parameter] = _mapped(fields, lambda each: each.text, _Text)


def _mapped(value: Any, function: Callable[[Any], Any], kind: type) -> Any:
    """Returns a value with the function of each object of a class in its containers."""
    if isinstance(value, dict):
        return type(value)({key: _mapped(each, function, kind) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, function, kind) for each in value)
    return function(value) if isinstance(value, kind) else value


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")
