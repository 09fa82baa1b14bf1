"""The models and mini-batches of bench/subject.h and bench/overhead.cpp, with the same layers.

A model is a flat list of layers that can be cut between any two. `Stage` runs a slice of it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Layers = list[nn.Module]


class Stash(nn.Module):
    """Stashes a projection of the activation for the Join of the same name. Passes the activation on."""

    def __init__(self, name: str, projection: nn.Module | None = None):
        super().__init__()
        self.name = name
        self.projection = projection or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


class Join(nn.Module):
    """Base of layers that combine the activation with the skip of the Stash of the same name."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class Concatenate(Join):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([skip, x[:, :, : skip.size(2), : skip.size(3)]], 1)


class Add(Join):
    def __init__(self, name: str, projection: nn.Module | None = None):
        super().__init__(name)
        self.projection = projection or nn.Identity()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x.add_(self.projection(skip))


class Stage(nn.Module):
    """A slice of a model.

    Skips from earlier stages, named `arriving`, are inputs after the activation. Skips to later stages, named
    `leaving`, are outputs after it.
    """

    def __init__(self, layers: Layers, arriving: Sequence[str] = ()):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.arriving = tuple(arriving)
        stashed = [layer.name for layer in layers if isinstance(layer, Stash)]
        joined = {layer.name for layer in layers if isinstance(layer, Join)}
        self.leaving = tuple(name for name in [*arriving, *stashed] if name not in joined)

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        held = dict(zip(self.arriving, skips, strict=True))
        for layer in self.layers:
            if isinstance(layer, Stash):
                held[layer.name] = layer(x)
            elif isinstance(layer, Join):
                x = layer(x, held.pop(layer.name))
            else:
                x = layer(x)
        return (x, *(held[name] for name in self.leaving)) if self.leaving else x


def cut(layers: Layers, balance: Iterable[int]) -> list[Stage]:
    """Cuts the model into stages with these numbers of layers."""
    stages: list[Stage] = []
    for count in balance:
        stages.append(Stage(layers[:count], stages[-1].leaving if stages else ()))
        layers = layers[count:]
    if layers:
        raise ValueError(f"the balance is too short: {len(layers)} layers are left")
    return stages


def tiny() -> Layers:
    return [nn.Linear(8, 8) for _ in range(16)]


def mlp() -> Layers:
    return [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16)]


def unet(depth: int = 4, base_channels: int = 64, convolutions: int = 2) -> Layers:
    layers: Layers = []

    def block(inputs: int, outputs: int) -> None:
        for j in range(convolutions):
            conv = nn.Conv2d(inputs if j == 0 else outputs, outputs, 3, padding=1, bias=False)
            layers.extend([conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)])

    channels = 3
    for level in range(depth):
        block(channels, base_channels << level)
        channels = base_channels << level
        layers.extend([Stash(f"level{level}"), nn.MaxPool2d(2, ceil_mode=True)])
    block(channels, 2 * channels)
    for level in reversed(range(depth)):
        channels = base_channels << level
        layers.append(nn.ConvTranspose2d(2 * channels, channels, 2, stride=2))
        layers.append(Concatenate(f"level{level}"))
        block(2 * channels, channels)
    layers.append(nn.Conv2d(base_channels, 1, 1))
    return layers


def resnet(blocks: Sequence[int], bottleneck: bool) -> Layers:
    layers: Layers = []
    widening = 4 if bottleneck else 1

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return layer

    def projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def block(name: str, inputs: int, width: int, stride: int) -> None:
        outputs = widening * width
        # A shortcut that changes shape is projected at the end of the skip where the tensor is smaller.
        widens = stride == 1 and inputs != outputs
        before = projection(inputs, outputs, stride) if stride > 1 else None
        after = projection(inputs, outputs, stride) if widens else None
        layers.append(Stash(name, before))
        if bottleneck:
            layers.extend([conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)])
            layers.extend([conv(width, width, 3, stride), nn.BatchNorm2d(width)])
        else:
            layers.extend([conv(inputs, width, 3, stride), nn.BatchNorm2d(width)])
        layers.append(nn.ReLU(inplace=True))
        layers.extend([conv(width, outputs, 1 if bottleneck else 3), nn.BatchNorm2d(outputs)])
        layers.extend([Add(name, after), nn.ReLU(inplace=True)])

    channels = 64
    layers.extend([conv(3, channels, 7, 2), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)])
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    for group, count in enumerate(blocks):
        for b in range(count):
            block(f"{group}_{b}", channels, 64 << group, stride=2 if group > 0 and b == 0 else 1)
            channels = (64 << group) * widening
    layers.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)])
    return layers


MODELS = ("tiny", "mlp", "unet", "resnet18", "resnet50")


def subject(model: str, chunks: int) -> tuple[Layers, Tensor]:
    """Makes the model with fresh weights, and one mini-batch for it."""
    torch.manual_seed(0)
    if model == "tiny":
        return tiny(), torch.randn(8 * chunks, 8)
    if model == "mlp":
        return mlp(), torch.randn(1024, 1024)
    if model == "unet":
        return unet(base_channels=16), torch.randn(16, 3, 96, 96)
    if model == "resnet18":
        return resnet([2, 2, 2, 2], bottleneck=False), torch.randn(16 * chunks, 3, 64, 64)
    if model == "resnet50":
        return resnet([3, 4, 6, 3], bottleneck=True), torch.randn(16 * chunks, 3, 64, 64)
    raise ValueError(f"unknown model '{model}'; give one of {', '.join(MODELS)}")
