"""Models on the ``meta`` device, whose layers get memory only where they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from gpipe.randomness import RandomScope


def borrowed_across_ranks(stages: Sequence[nn.Module], is_here: Sequence[bool]) -> list[nn.Parameter]:
    """Returns the parameters of stages of this rank that belong to a stage of another rank. ``is_here`` has an item per
    stage."""
    owned_here: dict[nn.Parameter, bool] = {}
    found = [
        parameter
        for stage, here in zip(stages, is_here)
        for parameter in stage.parameters()
        if not owned_here.setdefault(parameter, here) and here
    ]
    return list(dict.fromkeys(found))


def materialize(stages: Sequence[nn.Sequential], devices: Sequence[torch.device], is_here: Sequence[bool]) -> None:
    """Gives memory and initial values to the ``meta`` tensors of the stages of this rank, by ``reset_parameters()`` of their
    modules, submodules first, each layer with random numbers of its own. So the values depend neither on the cut nor on the
    number of ranks. A tensor of several modules gets the values of the first one. If that is on another rank, it is zero
    here until the first call. All arguments have an item per stage. Raises ValueError for a ``reset_parameters()`` that is
    missing or does not initialize all."""
    if not any(tensor.is_meta for stage in stages for tensor in chain(stage.parameters(), stage.buffers())):
        return
    seed = RandomScope.draw_seed()
    made: set[Tensor] = set()
    for stage, device in (each[:2] for each in zip(stages, devices, is_here) if each[2]):
        for tensor in chain(stage.parameters(), stage.buffers()):
            if tensor.is_meta:
                # Keeps the object, so shared tensors stay shared.
                empty = torch.full_like(tensor, math.nan if _has_nan(tensor) else 0, device=device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
                made.add(tensor)
    initialized = made.intersection(borrowed_across_ranks(stages, is_here))
    for parameter in initialized:
        parameter.data.zero_()
    layers = [(layer, here) for stage, here in zip(stages, is_here) for layer in stage.named_children()]
    for index, ((name, layer), here) in enumerate(layers):
        if here:
            with RandomScope(seed, index, 0), torch.no_grad():
                _initialize(layer, name, made, initialized)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _own(module: nn.Module) -> list[Tensor]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _initialize(layer: nn.Module, name: str, made: set[Tensor], initialized: set[Tensor]) -> None:
    """Initializes the tensors of a layer that are in ``made``, except those that are in ``initialized``."""

    def initialize(module: nn.Module) -> None:
        own = _own(module)
        if not made.intersection(own) - initialized:
            return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"layer '{name}' has a {type(module).__name__} on the meta device without reset_parameters(), which would "
                "initialize it; add that method, or make the model on the CPU"
            )
        kept = [(tensor, tensor.clone()) for tensor in initialized.intersection(own)]
        versions = [tensor._version for tensor in own]
        reset()
        for tensor, value in kept:
            tensor.copy_(value)
        for tensor, version in zip(own, versions):
            written = tensor._version > version or (_has_nan(tensor) and not tensor.isnan().any())
            if tensor in made and not written and any(tensor is each for each in _own(module)):
                raise ValueError(
                    f"layer '{name}' has a {type(module).__name__} on the meta device whose reset_parameters() leaves a tensor "
                    f"of shape {tuple(tensor.shape)} without values; make it initialize all, or make the model on the CPU"
                )
        initialized.update(own)

    layer.apply(initialize)
