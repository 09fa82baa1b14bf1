"""The state of a model, as far as it is on this rank. Part of :mod:`gpipe.snapshot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpipe import _C
from gpipe.packing import unpacked


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
