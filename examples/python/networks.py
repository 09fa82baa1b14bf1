"""A U-Net and ResNets as flat sequences, which can be cut between any two layers, with skip connections.

The C++ models have the same layers, so their states have the same keys and shapes.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from gpipe.skip import Namespace, Skippable, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(Skippable):
    """Stashes its input, or a projection of it, and returns the input."""

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        stash("skip", x if self.downsample is None else self.downsample(x))
        return x


@skippable(pop=["skip"])
class Concatenate(Skippable):
    """Concatenates the skip with the input, cropped to the size of the skip."""

    def forward(self, x: Tensor) -> Tensor:
        skip = pop("skip")
        return torch.cat([skip, x[:, :, : skip.shape[2], : skip.shape[3]]], 1)


@skippable(pop=["skip"])
class Add(Skippable):
    """Adds the skip, or a projection of it, to the input."""

    def __init__(self, projection: nn.Module | None) -> None:
        super().__init__()
        self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        skip = pop("skip")
        return x + (skip if self.downsample is None else self.downsample(skip))


def unet(
    in_channels: int = 3, out_channels: int = 1, depth: int = 4, base_channels: int = 64, bilinear: bool = False
) -> nn.Sequential:
    """A U-Net (Ronneberger et al., arXiv:1505.04597) with batch norm for images of any size. Returns logits, one channel
    per class. Has 31 million parameters by default.

    Args:
        depth: number of times that the resolution is halved; also the number of skips.
        base_channels: channels at full resolution; they double at each halving.
        bilinear: whether to interpolate instead of transposed convolutions.
    """
    layers: dict[str, nn.Module] = {}

    def block(name: str, inputs: int, outputs: int) -> None:
        for number in (1, 2):
            # No bias, because batch norm subtracts it with the mean.
            layers[f"{name}_conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layers[f"{name}_norm{number}"] = nn.BatchNorm2d(outputs)
            # In place is safe: batch norm's backward does not need the output, and the output is never stashed.
            layers[f"{name}_relu{number}"] = nn.ReLU(inplace=True)
            inputs = outputs

    skips = [Namespace() for _ in range(depth)]
    channels = in_channels
    for level in range(1, depth + 1):
        block(f"down{level}", channels, base_channels << (level - 1))
        channels = base_channels << (level - 1)
        layers[f"down{level}_stash"] = Stash().isolate(skips[level - 1])
        # Rounding up keeps at least one pixel. Doubling then gives at least the size of the skip.
        layers[f"down{level}_pool"] = nn.MaxPool2d(2, ceil_mode=True)
    block("bottom", channels, 2 * channels)
    for level in range(depth, 0, -1):
        channels = base_channels << (level - 1)
        if bilinear:
            # A 1x1 convolution commutes with interpolation. Done first, it costs a quarter.
            layers[f"up{level}_reduce"] = nn.Conv2d(2 * channels, channels, 1)
            layers[f"up{level}_upsample"] = nn.Upsample(scale_factor=2, mode="bilinear")
        else:
            layers[f"up{level}_upsample"] = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        layers[f"up{level}_join"] = Concatenate().isolate(skips[level - 1])
        block(f"up{level}", 2 * channels, channels)
    layers["head"] = nn.Conv2d(channels, out_channels, 1)
    return nn.Sequential(OrderedDict(layers))


class _Conv(nn.Conv2d):
    """A convolution of a ResNet. Has no bias, because batch norm subtracts it with the mean."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


def resnet(blocks: list[int], classes: int, in_channels: int, small_images: bool, deep: bool) -> nn.Sequential:
    """A ResNet (He et al., arXiv:1512.03385) of four groups of blocks, with the architecture of torchvision's, for images
    (N, C, H, W) of any size. Returns logits. Blocks of ``deep`` ResNets have three convolutions, others two. With
    ``small_images``, such as MNIST's and CIFAR's, the stem keeps the resolution."""
    channels = 64
    layers: dict[str, nn.Module] = {"conv1": _Conv(in_channels, channels, *((3, 1) if small_images else (7, 2)))}
    layers |= {"bn1": nn.BatchNorm2d(channels), "relu": nn.ReLU(inplace=True)}
    if not small_images:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for group, count in enumerate(blocks):
        for index in range(count):
            prefix, skip = f"layer{group + 1}_{index}", Namespace()
            width, stride, inputs = 64 << group, 2 if group > 0 and index == 0 else 1, channels
            channels = 4 * width if deep else width
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
            if deep:
                shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, channels, 1, 1)]
            projects, grows = inputs != channels or stride != 1, channels > inputs * stride**2
            # The projection of the shortcut is on the side of the skip where the tensor to store and send is smaller.
            projection = _projection(inputs, channels, stride) if projects and not grows else None
            layers[f"{prefix}_stash"] = Stash(projection).isolate(skip)
            for number, shape in enumerate(shapes, 1):
                layers[f"{prefix}_conv{number}"] = _Conv(*shape)
                layers[f"{prefix}_bn{number}"] = nn.BatchNorm2d(shape[1])
                if number == len(shapes):
                    projection = _projection(inputs, channels, stride) if grows else None
                    layers[f"{prefix}_join"] = Add(projection).isolate(skip)
                # In place is safe: no backward needs the input, and the input is never stashed.
                layers[f"{prefix}_relu{number}"] = nn.ReLU(inplace=True)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, classes)}
    return nn.Sequential(OrderedDict(layers))


def resnet18(classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    return resnet([2, 2, 2, 2], classes, in_channels, small_images, deep=False)


def resnet50(classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    return resnet([3, 4, 6, 3], classes, in_channels, small_images, deep=True)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_Conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
