"""Values for models that were made on the ``meta`` device: read from files, or drawn."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.exported.pretended import is_on_meta, refuse_loose
from gpipe.randomness import random_scope
from gpipe.wrapper import Shell

Weights = str | os.PathLike[str] | Callable[[str], Tensor]
Sources = dict[str, Callable[[], object]]


class Values(NamedTuple):
    """Where the values of tensors on the ``meta`` device come from: ``weights``, which is a .safetensors file, a folder of them,
    maybe with an index, a file of ``torch.save``, or a function of a name; else ``init``, a function of a module, or each
    module's ``reset_parameters()``."""

    weights: Weights | None = None
    init: Callable[[nn.Module], object] | None = None

    def give(
        self,
        model: nn.Module,
        stages: Sequence[nn.Module],
        devices: Sequence[torch.device],
        is_here: Sequence[bool],
        borrowed: Iterable[Tensor],
    ) -> None:
        """Gives memory and values to the ``meta`` tensors of the stages of this rank. Each layer draws random numbers of its own,
        so the values depend neither on the cut nor on the number of ranks. A tensor of several modules gets the values of the
        first one. One that is ``borrowed`` from another rank gets zeros, until the first call, if it is not read. Raises ValueError
        with names for weights that do not fit, and for tensors that nothing gives values."""
        if not any(map(is_on_meta, stages)):
            if self != Values():
                raise ValueError("weights and init are for a model on the meta device; give this one values by load_state_dict()")
            return
        seed = _C.draw_seed() if self.weights is None else 0
        names, persistent = _names_of(model), model.state_dict(keep_vars=True).keys()
        sources = {} if self.weights is None else _sources(self.weights, persistent)
        if self.weights is not None:
            _check_names(sources, names, persistent)
        memory: dict[Tensor, Tensor] = {}
        for stage, device, here in zip(stages, devices, is_here):
            for tensor in chain(stage.parameters(), stage.buffers()):
                if here and tensor.is_meta and tensor not in memory:
                    empty = torch.full_like(tensor, math.nan if _has_nan(tensor) else 0, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    memory[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        made = set(memory)
        initialized = made.intersection(borrowed)
        for parameter in initialized:
            memory[parameter].data.zero_()
        for tensor, own in names.items():
            known = [name for name in own if name in sources]
            if tensor in made and known:
                memory[tensor].data.copy_(_value(known[0], sources[known[0]], tensor))
                initialized.add(tensor)
        for tensor, filled in memory.items():  # after all reads: if one fails, the model stays on the meta device
            torch.utils.swap_tensors(tensor, filled)  # type: ignore[no-untyped-call]  # so shared tensors stay shared
        layers = [(layer, here) for stage, here in zip(stages, is_here) for layer in stage.named_children()]
        for index, ((name, layer), here) in enumerate(layers):
            if here:
                with random_scope(seed, index, 0), torch.no_grad():
                    _initialize(layer, name, made, initialized, self.init)
                refuse_loose(layer, name)
        for tensor in made - initialized:
            raise ValueError(f"nothing gives '{names.get(tensor, ['a constant'])[0]}' a value; make it on the CPU")


def _names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    names: dict[Tensor, list[str]] = {}
    for name, tensor in chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        names.setdefault(tensor, []).append(name)
    return names


def _check_names(sources: Sources, names: Mapping[Tensor, list[str]], persistent: Iterable[str]) -> None:
    """Raises ValueError for weights that are missing, or are none of the model."""
    for tensor, own in names.items():
        if tensor.is_meta and not set(own).isdisjoint(persistent) and sources.keys().isdisjoint(own):
            raise ValueError(f"the weights have no '{own[0]}'{_near(own[0], sources)}")
    all_names = set(chain.from_iterable(names.values()))
    if surplus := sorted(sources.keys() - all_names):
        raise ValueError(f"the weights have '{surplus[0]}', which the model has not{_near(surplus[0], all_names)}")


def _near(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, names, 3)
    return f"; near are {', '.join(map(repr, near))}" if near else ""


def _value(name: str, read: Callable[[], object], like: Tensor) -> Tensor:
    found = read()
    if not isinstance(found, Tensor):
        raise TypeError(f"weights returned {type(found)} for '{name}'; return a tensor")
    if found.shape != like.shape:
        raise ValueError(f"'{name}' of the weights has the shape {tuple(found.shape)}, but the model's has {tuple(like.shape)}")
    return found.detach()


def _sources(weights: Weights, persistent: Iterable[str]) -> Sources:
    """Returns functions that read the tensors, by name."""
    if callable(weights):
        return {name: functools.partial(weights, name) for name in persistent}
    path = Path(weights)
    if not path.is_dir() and path.suffix != ".safetensors":
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {name: functools.partial(state.get, name) for name in state}
    safetensors: Any = importlib.import_module("safetensors")  # an optional package
    opened = functools.cache(lambda file: safetensors.safe_open(file, "pt"))
    index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None)
    if index is not None:
        files = {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    else:
        listed = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        files = {name: file for file in listed for name in opened(file).keys()}
    if not files:
        raise ValueError(f"{path} has no .safetensors file")
    return {name: functools.partial(lambda file, name: opened(file).get_tensor(name), file, name) for name, file in files.items()}


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _own(module: nn.Module) -> list[Tensor]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _initialize(
    layer: nn.Module, name: str, made: set[Tensor], initialized: set[Tensor], init: Callable[[nn.Module], object] | None
) -> None:
    """Initializes the tensors of a layer that are in ``made``, except those that are in ``initialized``."""

    def initialize(module: nn.Module) -> None:
        module = module.original_of_gpipe if isinstance(module, Shell) else module
        own = [tensor for tensor in _own(module) if not tensor.is_meta]  # a shell's others may belong to another rank
        missing = made.intersection(own) - initialized
        if not missing:
            return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if init is not None:
            reset = functools.partial(init, module)
        if reset is None:
            named = [key for key, each in {**module._parameters, **module._buffers}.items() if each is not None and each in missing]
            raise ValueError(
                f"layer '{name}' has a {type(module).__name__} on the meta device without reset_parameters(), which would "
                f"initialize '{named[0]}'; add that method, give init, or make the module on the CPU"
            )
        kept = [(tensor, tensor.clone()) for tensor in initialized.intersection(own)]
        versions = [tensor._version for tensor in own]
        reset()
        for tensor, value in kept:
            tensor.copy_(value)
        for tensor, version in zip(own, versions):
            written = tensor._version > version or (_has_nan(tensor) and not tensor.isnan().any())
            if tensor in missing and not written and any(tensor is each for each in _own(module)):
                raise ValueError(
                    f"layer '{name}' has a {type(module).__name__} on the meta device whose initialization leaves a tensor "
                    f"of shape {tuple(tensor.shape)} without values; make it initialize all, or make the module on the CPU"
                )
        initialized.update(own)

    layer.apply(initialize)
