"""Parameters that stages on different devices or ranks share.

The first stage that has such a parameter owns it. A stage on another device gets a stand-in with each micro-batch: a tensor
on its device. Its modules keep the parameter registered, so that names and optimizers see one parameter. Another rank has a
copy of the parameter, which the core gives the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["borrowed_across_ranks", "check_stand_ins", "standing_in"]


def borrowed_across_ranks(stages: Sequence[nn.Module], is_here: Sequence[bool]) -> list[nn.Parameter]:
    """Returns the parameters of stages of this rank that belong to a stage of another rank. ``is_here`` has an item per
    stage."""
    owned_here: dict[nn.Parameter, bool] = {}
    borrowed: dict[nn.Parameter, None] = {}
    for stage, here in zip(stages, is_here):
        for parameter in stage.parameters():
            if not owned_here.setdefault(parameter, here) and here:
                borrowed[parameter] = None
    return list(borrowed)


def _places(stage: nn.Module, parameters: Sequence[Tensor]) -> Iterator[tuple[nn.Module, str, int]]:
    """Yields the places of parameters in the modules of a stage: module, name, and the parameter's index."""
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if (index := indices.get(id(parameter))) is not None:
                yield module, name, index


@contextmanager
def standing_in(stage: nn.Module, borrowed: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Makes the modules of a stage find stand-ins instead of parameters, for a block. ``borrowed`` has a tuple
    (parameter, stand-in) for each."""
    places = list(_places(stage, [parameter for parameter, _ in borrowed]))
    for module, name, index in places:
        module.__dict__[name] = borrowed[index][1]  # Python looks here before it asks the module
    try:
        yield
    finally:
        for module, name, _ in places:
            del module.__dict__[name]


def check_stand_ins(stages: Sequence[nn.Module], devices: Sequence[torch.device], is_here: Sequence[bool]) -> None:
    """Checks that each module of this rank which has a parameter of another device can use a stand-in. All arguments have an
    item per stage.

    Raises:
        ValueError: if such a module is in two stages, or compiled by TorchScript.
    """
    home: dict[int, torch.device] = {}  # of parameters, by id
    earlier: set[int] = set()  # ids of the modules of earlier stages
    for stage, device, here in zip(stages, devices, is_here):
        if not here:
            continue
        borrowed = [each for each in stage.parameters() if home.setdefault(id(each), device) != device]
        for module, name, _ in _places(stage, borrowed):
            scripted = isinstance(module, torch.jit.ScriptModule)
            if scripted or id(module) in earlier:
                raise ValueError(
                    f"'{name}' of a {type(module).__name__} belongs to stages on different devices, but the module "
                    + ("is compiled by TorchScript" if scripted else "itself stands in both stages")
                    + "; put the layers that share it into one stage, place the stages on one device, or tie the "
                    "parameters of two modules"
                )
        earlier.update(map(id, stage.modules()))
