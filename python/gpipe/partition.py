"""The stages of a pipeline as modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.checkpoint import is_checkpointing
from gpipe.generators import Draws
from gpipe.meta import materialize
from gpipe.skip import Skippable, skippables_in
from gpipe.tied import check_stand_ins, standing_in

__all__ = ["Partition", "Stages", "layers_of", "split"]


def _has_graph(value: object) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "a backward reached a tensor that a layer keeps as an attribute, but the layer's forward is recomputed later; "
            "return the tensor from the layer or stash it, and use it in the loss"
        )


class Partition(nn.Sequential):
    """The layers of one stage. A pipeline calls it on the stage's worker thread."""

    _kept: list[tuple[nn.Module, str]] = []  # attributes that hold a differentiable tensor after a forward

    def forward(self, input: Any) -> Any:
        if (draws := self.__dict__.get("_draws")) is None:
            draws = self.__dict__["_draws"] = Draws(self)
        borrowed = _C.borrowed(self)
        with standing_in(self, borrowed) if borrowed else nullcontext():
            output = draws(self._run, input)
        if is_checkpointing():
            self._mark_kept()
        return output

    def _mark_kept(self) -> None:
        """Makes a backward through a tensor that a layer keeps as an attribute an error. The tensor has no graph, because
        the forward will be recomputed."""
        if torch.is_grad_enabled():  # the first such forward builds its graph, which shows what is differentiable
            named = ((module, name, value) for module in self.modules() for name, value in vars(module).items())
            self._kept = [(module, name) for module, name, value in named if _has_graph(value)]
            return
        for module, name in self._kept:
            if isinstance(tensor := vars(module).get(name), Tensor):
                with torch.enable_grad():
                    source = torch.empty(0, requires_grad=True)
                    vars(module)[name] = _Kept.apply(source, tensor.detach())  # type: ignore[no-untyped-call]

    def _run(self, input: Any) -> Any:
        for index, layer in enumerate(self):
            _C.begin_layer(self, index)
            try:
                input = layer(input)
            except ValueError as error:
                if "Expected more than 1 value per channel" in str(error) and hasattr(error, "add_note"):
                    error.add_note(
                        "[gpipe] a batch norm cannot train on a micro-batch of one sample; use fewer chunks for this "
                        "mini-batch, or leave it out: DataLoader(..., drop_last=True)"
                    )
                raise
        return input


class Stages(nn.ModuleList):
    """The stages of a pipeline. torch.distributed.checkpoint leaves their numbers out of parameter names."""

    def __iter__(self) -> Iterator[Partition]:
        return super().__iter__()  # type: ignore[return-value]

    def layers(self) -> dict[str, nn.Module]:
        """Returns the layers of all stages by their paths, ``<stage>.<layer>``."""
        named = ((f"{index}.", zip(stage._modules, stage)) for index, stage in enumerate(self))
        return {path + name: layer for path, layers in named for name, layer in layers}

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
            [(skip, skip.stashes(), skip.pops()) for _, skip in skippables_in(layer, name)],
        )
        for name, layer in module.named_children()
    ]
