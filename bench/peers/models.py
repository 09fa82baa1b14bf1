"""The models and mini-batches of bench/measure.h, with the same layers.

A model is a flat list of layers that can be cut between any two. `Stage` runs a slice of it.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples/python"))

import networks  # noqa: E402

Layers = list[nn.Module]


class Stash(nn.Module):
    """Stashes its output for the Join of the same name. Passes the activation on."""

    def __init__(self, name: str, projection: nn.Module | None):
        super().__init__()
        self.name = name
        self.projection = projection or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


class Join(Stash):
    """Combines the activation with the skip of the Stash of the same name: adds it, or concatenates it in a U-Net."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if self.name.startswith("layer"):
            return x.add_(self.projection(skip))
        return torch.cat([skip, x[:, :, : skip.size(2), : skip.size(3)]], 1)


def with_contiguous_gradient(skip: Tensor) -> Tensor:
    """Gloo sends only contiguous tensors, and the gradient of a part of a concatenation is not one."""
    if skip.requires_grad:
        skip = skip.view_as(skip)
        skip.register_hook(Tensor.contiguous)
    return skip


class Stage(nn.Module):
    """A slice of a model.

    Skips from earlier stages, named `arriving`, are inputs after the activation. Skips to later stages, named
    `leaving`, are outputs after it.
    """

    def __init__(self, layers: Layers, arriving: Sequence[str] = ()):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.arriving = tuple(arriving)
        stashed = [layer.name for layer in layers if type(layer) is Stash]
        joined = {layer.name for layer in layers if isinstance(layer, Join)}
        self.leaving = tuple(name for name in [*arriving, *stashed] if name not in joined)

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        held = dict(zip(self.arriving, map(with_contiguous_gradient, skips), strict=True))
        for layer in self.layers:
            if isinstance(layer, Join):
                x = layer(x, held.pop(layer.name))
            elif isinstance(layer, Stash):
                held[layer.name] = layer(x)
            else:
                x = layer(x)
        x = x.contiguous()  # for Gloo
        return (x, *(held[name] for name in self.leaving)) if self.leaving else x


def cut(layers: Layers, balance: Iterable[int]) -> list[Stage]:
    """Cuts the model into stages with these numbers of layers."""
    stages: list[Stage] = []
    for count in balance:
        stages.append(Stage(layers[:count], stages[-1].leaving if stages else ()))
        layers = layers[count:]
    return stages


def flat(model: nn.Sequential) -> Layers:
    """Returns the layers of a U-Net of networks.py, with a Stash and a Join for each skip."""
    layers: Layers = []
    for name, layer in model.named_children():
        skip, _, kind = name.rpartition("_")
        if kind in ("stash", "join"):
            layer = (Stash if kind == "stash" else Join)(re.sub("^(down|up)", "level", skip), None)
        layers.append(layer)
    return layers


def resnet(model: torchvision.models.ResNet) -> Layers:
    """Returns the layers of a ResNet, with a Stash and a Join for each skip. The projection of the shortcut is on the side
    of the skip where the tensor to store and send is smaller."""
    layers: Layers = [model.conv1, model.bn1, model.relu, model.maxpool]
    for group in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in group:
            projection = block.downsample
            conv = None if projection is None else projection[0]
            grows = conv is not None and conv.out_channels > conv.in_channels * conv.stride[0] ** 2
            name = f"layer{len(layers)}"
            layers += [Stash(name, None if grows else projection), block.conv1, block.bn1]
            for number in range(2, 4 if hasattr(block, "conv3") else 3):
                parts = getattr(block, f"conv{number}"), getattr(block, f"bn{number}")
                layers += [nn.ReLU(inplace=True), *parts]
            layers += [Join(name, projection if grows else None), nn.ReLU(inplace=True)]
    return [*layers, model.avgpool, nn.Flatten(1), model.fc]


MODELS = ("tiny", "mlp", "unet", "resnet18", "resnet50")


def subject(model: str, chunks: int) -> tuple[Layers, Tensor]:
    """Makes the model with fresh weights, and one mini-batch for it."""
    torch.manual_seed(0)
    if model == "tiny":
        return [nn.Linear(8, 8) for _ in range(16)], torch.randn(8 * chunks, 8)
    if model == "mlp":
        return [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16)], torch.randn(1024, 1024)
    if model == "unet":
        return flat(networks.unet(base_channels=16)), torch.randn(16, 3, 96, 96)
    return resnet(getattr(torchvision.models, model)()), torch.randn(16 * chunks, 3, 64, 64)
