"""Parameters, buffers and constants of a model by name, and the modules that hold them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


class Owned(NamedTuple):
    """A tensor of a model."""

    tensor: Tensor
    persistent: bool  # whether it is part of the model's state


def tensors_of_program(program: ExportedProgram) -> dict[str, Owned]:
    """Returns the tensors that an exported program uses, by name."""
    found = {name: Owned(tensor, True) for name, tensor in program.state_dict.items()}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target in program.constants:
            found[spec.target] = Owned(program.constants[spec.target], False)
    return found


def tensors_of_module(module: nn.Module) -> dict[str, Owned]:
    """Returns all parameters and buffers of a module, by name. A tensor can have several names."""
    found = {}
    for path, each in module.named_modules(remove_duplicate=False):
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is not None:
                found[f"{path}.{name}".lstrip(".")] = Owned(tensor, name not in each._non_persistent_buffers_set)
    return found


class Tree:
    """Makes the tree of modules that holds some of a model's tensors, and modules that are kept whole."""

    def __init__(self, modes: dict[str, bool], whole: dict[str, nn.Module]) -> None:
        self._modes = modes
        self._places = dict(whole)
        self.root = self.place("")

    def place(self, path: str) -> nn.Module:
        """Returns the module at a path. Makes it, or puts it there, if the tree has none."""
        if path not in self._places:
            self._places[path] = nn.Module()
            self._places[path].training = self._modes.get(path, True)
        if path:
            outer, _, name = path.rpartition(".")
            self.place(outer)._modules[name] = self._places[path]
        return self._places[path]

    def add(self, name: str, owned: Owned) -> None:
        """Registers a tensor under its name."""
        path, _, own = name.rpartition(".")
        place = self.place(path)
        if isinstance(owned.tensor, nn.Parameter):
            place._parameters[own] = owned.tensor
        else:
            place._buffers[own] = owned.tensor
            if not owned.persistent:
                place._non_persistent_buffers_set.add(own)


def is_inside(name: str, paths: Iterable[str]) -> bool:
    """Returns whether a module or tensor is one of the modules at some paths, or belongs to one."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def nearest(name: str, paths: Iterable[str]) -> int:
    """Returns the index of the path that has most in common with a name."""

    common = [len(os.path.commonprefix([name.split("."), path.split(".")])) for path in paths]
    return common.index(max(common))
