"""Parameters that stages on different devices share.

The first stage that has such a parameter owns it. The other stages get a stand-in with each micro-batch: a tensor on
their device. Their modules keep the parameter registered, so that names and optimizers see one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["move", "standing_in"]


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


def move(stage: nn.Module, device: torch.device, earlier: set[int]) -> None:
    """Moves a stage to its device, except parameters of earlier stages.

    Args:
        stage: the stage.
        device: its device.
        earlier: the ids of the modules and parameters of earlier stages. Those of this stage are added.

    Raises:
        ValueError: if a module cannot use a stand-in, because earlier stages have it too, or because it is compiled by
            TorchScript.
    """
    borrowed = [each for each in stage.parameters() if id(each) in earlier and each.device != device]
    for module, name, _ in _places(stage, borrowed):
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or id(module) in earlier:
            raise ValueError(
                f"'{name}' of a {type(module).__name__} belongs to stages on different devices, but the module "
                + ("is a TorchScript module" if scripted else "itself stands in both stages")
                + "; put the layers that share it into one stage, place the stages on one device, or tie the parameters "
                "of two modules"
            )
    if borrowed:
        stay = {id(tensor) for parameter in borrowed for tensor in (parameter, parameter.grad)}
        stage._apply(lambda tensor: tensor if id(tensor) in stay else tensor.to(device))  # type: ignore[no-untyped-call]
    else:
        stage.to(device)
    earlier.update(map(id, stage.modules()), map(id, stage.parameters()))
