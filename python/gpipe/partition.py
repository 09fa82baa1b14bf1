"""The stages of a pipeline as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpipe import _C
from gpipe.generators import Draws
from gpipe.meta import materialize
from gpipe.skip.layer import Skippable
from gpipe.skip.namespace import native_keys
from gpipe.skip.verify import skippables_in
from gpipe.tied import check_stand_ins, standing_in

__all__ = ["Partition", "Stages", "layers_of", "split"]


class Partition(nn.Sequential):
    """The layers of one stage. A pipeline calls it on the stage's worker thread."""

    def forward(self, input: Any) -> Any:
        draws: Draws = self.__dict__.setdefault("_draws", Draws())
        if not (borrowed := _C.borrowed(self)):
            return draws(self._run, input)
        with standing_in(self, borrowed):
            return draws(self._run, input)

    def _run(self, input: Any) -> Any:
        for index, layer in enumerate(self):
            _C.begin_layer(self, index)
            input = layer(input)
        return input


class Stages(nn.ModuleList):
    """The stages of a pipeline. torch.distributed.checkpoint leaves their numbers out of parameter names."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {f"stage {index}": str(index) for index in range(len(self))}


def split(
    module: nn.Sequential, balance: list[int], devices: list[torch.device], is_here: list[bool]
) -> list[Partition]:
    """Returns the stages of a model. Those of this rank, as ``is_here`` tells, are moved to their devices. ``balance``,
    ``devices`` and ``is_here`` have an item per stage.

    Raises:
        ValueError: as :func:`gpipe.tied.check_stand_ins` and :func:`gpipe.meta.materialize`.
    """
    layers = iter(module.named_children())
    stages = []
    for count in balance:
        partition = Partition()
        for _ in range(count):
            partition.add_module(*next(layers))
        partition.training = module.training
        stages.append(partition)
    check_stand_ins(stages, devices, is_here)
    materialize(stages, devices, is_here)
    # From last to first, so that a parameter of several stages ends on the device of the first one here.
    for partition, device, here in reversed(list(zip(stages, devices, is_here))):
        if here:
            partition.to(device)
    return stages


def layers_of(module: nn.Sequential) -> list[tuple[str, nn.Module, list[Any]]]:
    """Returns the layers of a model or stage as the extension module takes them: tuples (name, module, skips), where
    ``skips`` has a tuple (module, stashes, pops) for each skippable module that is the layer or nested in it."""
    return [
        (
            layer.name_in_messages(name) if isinstance(layer, Skippable) else name,
            layer,
            [
                (skippable, native_keys(skippable.stashable()), native_keys(skippable.poppable()))
                for _, skippable in skippables_in(layer, name)
            ],
        )
        for name, layer in module.named_children()
    ]
