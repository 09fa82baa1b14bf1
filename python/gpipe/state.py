"""What a snapshot holds of values, models and optimizers. Part of :mod:`gpipe.snapshot`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gpipe import _C

_MOST_LEVELS = 100
# Containers that JSON lacks. A dict is a list of pairs.
_CONTAINERS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "counter": Counter, "dict": dict}


def packed(value: Any, path: str, tensors: dict[str, Tensor], level: int = 0) -> Any:
    """Returns a value as JSON can hold it: see gpipe/snapshot/folder.h. Its tensors become their names in ``tensors``, which
    begin with the path. Raises TypeError for what is no number, text, tensor or container of them."""
    if level > _MOST_LEVELS:
        raise ValueError(f"cannot save '{path[1:100]}...': it has more than {_MOST_LEVELS} levels")
    if isinstance(value, Tensor):
        while path in tensors:
            path += "'"
        tensors[path] = value
        return {"$": "tensor", "of": path}
    if value is None or isinstance(value, (bool, str)):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    if isinstance(value, Integral):
        return int(value) if abs(int(value)) < 2**63 else {"$": "int", "of": str(int(value))}
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else {"$": "float", "of": str(float(value))}

    def inner(each: Any, name: object) -> Any:
        return packed(each, f"{path}/{name}", tensors, level + 1)

    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        if kind == "dict" and "$" not in value and all(isinstance(key, str) for key in value):
            return {key: inner(each, key) for key, each in value.items()}
        return {"$": kind, "of": [[inner(key, "key"), inner(each, key)] for key, each in value.items()]}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [inner(each, index) for index, each in enumerate(value)]
        tag = next((name for name, kind in _CONTAINERS.items() if isinstance(value, kind)), None)
        return items if tag is None else {"$": tag, "of": items}
    what = "a snapshot holds numbers, texts, tensors and containers of them"
    raise TypeError(f"cannot save '{path[1:]}', which is {type(value)}: {what}")


def unpacked(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Returns the value that :func:`packed` got. ``read`` returns its tensors by their names."""
    if isinstance(value, list):
        return [unpacked(each, read) for each in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: unpacked(each, read) for key, each in value.items()}
    tag, of = value["$"], value["of"]
    if tag == "tensor":
        return read(of)
    if tag in ("int", "float"):
        return int(of) if tag == "int" else float(of)
    items = unpacked(of, read)
    return _CONTAINERS[tag](dict(items) if tag in ("counter", "dict") else items)


class OwnState:
    """The state of a model, as far as it is on this rank. Of a parameter with several names, optimizers have the first
    one in the whole model."""

    def __init__(self, model: Any) -> None:
        ranks = getattr(model, "ranks", None)
        self.rank: int = 0 if ranks is None else ranks.rank
        self.ranks: int = 1 if ranks is None else ranks.size
        self._state: dict[str, Any] = model.state_dict(keep_vars=True)
        self._firsts: dict[str, str] = {} if ranks is None else model._first_names
        if ranks is not None:  # an extra state belongs to the rank of its module
            here = {id(each) for each in model.partitions.modules()}
            extra = [name for name, value in self._state.items() if not isinstance(value, Tensor)]
            for name in [name for name in extra if id(model.module.get_submodule(name.rpartition(".")[0])) not in here]:
                del self._state[name]
        self.elsewhere = self._firsts.keys() - self._state.keys()
        borrowed = () if ranks is None else {id(each) for each in model._borrowed}
        self._owned = {name: value for name, value in self._state.items() if id(value) not in borrowed}
        self._names: dict[int, str] = {}
        for name, value in self._owned.items():
            self._names.setdefault(id(value), self._firsts.get(name, name))

    def saved(self) -> dict[str, Any]:
        """Returns what this rank saves. A tensor that ranks share is saved by its owner, under all of its names."""
        tensors = {name: value for name, value in self._owned.items() if isinstance(value, Tensor)}
        shared = {self._firsts.get(name, name): value for name, value in tensors.items()}
        return self._owned | {name: shared[first] for name, first in self._firsts.items() if first in shared}

    def loaded(self, reader: _C.SnapshotReader, others: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state in a snapshot, whose values other than tensors are ``others``, of all ranks. Raises ValueError
        if names or kinds of tensors are not the model's."""
        loaded = {name: unpacked(value, reader.read) for name, value in others.items()}
        theirs = {*reader.weights(), *others}
        for name in [*self._state, *sorted(theirs - self._state.keys() - self.elsewhere)]:
            if name in theirs and name not in others:
                loaded[name] = reader.read(name)
            ours, saved = (_kind(side[name]) if name in side else "missing" for side in (self._state, loaded))
            if ours != saved:
                what = f"'{name}' is {saved} in the snapshot and {ours} in this model"
                raise ValueError(f"the snapshot is of another model: {what}")
            if not isinstance(tensor := self._state[name], Tensor):
                continue
            if any(stride == 0 < size - 1 for size, stride in zip(tensor.shape, tensor.stride())):
                raise ValueError(f"cannot load '{name}' of this model: its elements share memory; clone it first")
            if tensor.is_inference() and not torch.is_inference_mode_enabled():
                raise ValueError(f"cannot load '{name}' of this model: it was made in inference mode; clone it first")
        return loaded

    def names_in(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns for each group the names of its parameters."""
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in self._names:
                    what = f"parameter {index} in group {number} of the optimizer does not belong to the model, or"
                    advice = "create the optimizer with the pipeline's parameters()"
                    raise ValueError(f"{what} another rank trains it; {advice}")
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def devices(self) -> list[torch.device]:
        """Returns the accelerators of this rank."""
        devices = {value.device for value in self._state.values() if isinstance(value, Tensor)}
        return sorted(devices - {torch.device("cpu")}, key=str)


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"


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
                state["state"][number] = tree_map_only(str, _Text, unpacked(saved["state"][name], read))
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
        optimizer.state[parameter] = tree_map_only(_Text, lambda each: each.text, fields)


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")
