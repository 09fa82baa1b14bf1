"""Models that can be cut between any two layers, with skip connections.

    model = gpipe.models.unet(out_channels=1)
    pipe = gpipe.GPipe(model, gpipe.balance.balance_by_time(2, model, sample), chunks=4)

The C++ models have the same layers, so their states have the same keys and shapes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.checks import checks_arguments, shown
from gpipe.skip import Namespace, Skippable, pop, skippable, stash

__all__ = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "unet"]

_STEM_CHANNELS = 64


@skippable(stash=["skip"])
class _Stash(Skippable):
    """Stashes its input, or a projection of it, and returns the input."""

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        stash("skip", x if self.downsample is None else self.downsample(x))
        return x


@skippable(pop=["skip"])
class _Concatenate(Skippable):
    """Concatenates the skip with the input, cropped to the size of the skip."""

    def forward(self, x: Tensor) -> Tensor:
        skip = pop("skip")
        return torch.cat([skip, x[tuple(map(slice, (*x.shape[:2], *skip.shape[2:])))]], 1)


@skippable(pop=["skip"])
class _Add(Skippable):
    """Adds the skip, or a projection of it, to the input."""

    def __init__(self, projection: nn.Module | None) -> None:
        super().__init__()
        self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        skip = pop("skip")
        return x + (skip if self.downsample is None else self.downsample(skip))


class _Conv(nn.Conv2d):
    """A convolution of a ResNet. Has no bias, because batch norm subtracts it with the mean."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


@checks_arguments
def unet(
    in_channels: int = 3,
    out_channels: int = 1,
    *,
    depth: int = 4,
    base_channels: int = 64,
    convolutions: int = 2,
    dropout: float = 0.0,
    dims: int = 2,
    upsampling: str = "transposed",
) -> nn.Sequential:
    """A U-Net (Ronneberger et al., arXiv:1505.04597) with batch norm, which returns logits, one channel per class; 31 million
    parameters by default.

    Args:
        depth: number of times that the resolution is halved; also the number of skips.
        base_channels: channels at full resolution; they double at each halving.
        convolutions: number of convolutions (3x3, batch norm, ReLU) per block.
        dropout: probability of dropping a channel at the end of each block.
        dims: 2 for inputs (N, C, H, W), 3 for (N, C, D, H, W), of any size.
        upsampling: ``'transposed'`` for transposed convolutions, ``'linear'`` for interpolation.

    Raises ValueError if an option is out of range.
    """
    _check_positive(in_channels=in_channels, out_channels=out_channels, depth=depth)
    _check_positive(base_channels=base_channels, convolutions=convolutions)
    _check(depth <= 16, "depth", depth, "at most 16")
    _check(0 <= dropout < 1, "dropout", dropout, "at least 0 and below 1")
    _check(dims in (2, 3), "dims", dims, "2 or 3")
    _check(upsampling in ("transposed", "linear"), "upsampling", upsampling, "'transposed' or 'linear'")
    kinds = ("Conv", "BatchNorm", "MaxPool", "ConvTranspose", "Dropout")
    conv, norm, pool, conv_transposed, drop = (getattr(nn, f"{kind}{dims}d") for kind in kinds)
    layers: dict[str, nn.Module] = {}

    def block(name: str, inputs: int, outputs: int) -> None:
        for number in range(1, convolutions + 1):
            # No bias, because batch norm subtracts it with the mean.
            layers[f"{name}_conv{number}"] = conv(inputs, outputs, 3, padding=1, bias=False)
            layers[f"{name}_norm{number}"] = norm(outputs)
            # In place is safe: batch norm's backward does not need the output, and the output is never stashed.
            layers[f"{name}_relu{number}"] = nn.ReLU(inplace=True)
            inputs = outputs
        if dropout > 0:
            layers[f"{name}_dropout"] = drop(dropout)

    skips = [Namespace() for _ in range(depth)]
    channels = in_channels
    for level in range(1, depth + 1):
        block(f"down{level}", channels, base_channels << (level - 1))
        channels = base_channels << (level - 1)
        layers[f"down{level}_stash"] = _Stash().isolate(skips[level - 1])
        # Rounding up keeps at least one pixel. Doubling then gives at least the size of the skip.
        layers[f"down{level}_pool"] = pool(2, ceil_mode=True)
    block("bottom", channels, 2 * channels)
    for level in range(depth, 0, -1):
        channels = base_channels << (level - 1)
        if upsampling == "transposed":
            layers[f"up{level}_upsample"] = conv_transposed(2 * channels, channels, 2, stride=2)
        else:
            # A 1x1 convolution commutes with interpolation. Done first, it costs a quarter (2D) or an eighth (3D).
            layers[f"up{level}_reduce"] = conv(2 * channels, channels, 1)
            layers[f"up{level}_upsample"] = nn.Upsample(scale_factor=2, mode="bilinear" if dims == 2 else "trilinear")
        layers[f"up{level}_join"] = _Concatenate().isolate(skips[level - 1])
        block(f"up{level}", 2 * channels, channels)
    layers["head"] = conv(channels, out_channels, 1)
    return nn.Sequential(OrderedDict(layers))


@checks_arguments
def _resnet(blocks: list[int], num_classes: int, in_channels: int, small_images: bool, *, deep: bool) -> nn.Sequential:
    """A ResNet of four groups of blocks. Blocks of ``deep`` ResNets have three convolutions, others two."""
    _check_positive(num_classes=num_classes, in_channels=in_channels)
    channels = _STEM_CHANNELS
    layers: dict[str, nn.Module] = {"conv1": _Conv(in_channels, channels, *((3, 1) if small_images else (7, 2)))}
    layers |= {"bn1": nn.BatchNorm2d(channels), "relu": nn.ReLU(inplace=True)}
    if not small_images:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for group, count in enumerate(blocks):
        for index in range(count):
            prefix, skip = f"layer{group + 1}_{index}", Namespace()
            width, stride, inputs = _STEM_CHANNELS << group, 2 if group > 0 and index == 0 else 1, channels
            channels = 4 * width if deep else width
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
            if deep:
                shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, channels, 1, 1)]
            projects, grows = inputs != channels or stride != 1, channels > inputs * stride**2
            # The projection of the shortcut is on the side of the skip where the tensor to store and send is smaller.
            projection = _projection(inputs, channels, stride) if projects and not grows else None
            layers[f"{prefix}_stash"] = _Stash(projection).isolate(skip)
            for number, shape in enumerate(shapes, 1):
                layers[f"{prefix}_conv{number}"] = _Conv(*shape)
                layers[f"{prefix}_bn{number}"] = nn.BatchNorm2d(shape[1])
                if number == len(shapes):
                    projection = _projection(inputs, channels, stride) if grows else None
                    layers[f"{prefix}_join"] = _Add(projection).isolate(skip)
                # In place is safe: no backward needs the input, and the input is never stashed.
                layers[f"{prefix}_relu{number}"] = nn.ReLU(inplace=True)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, num_classes)}
    return nn.Sequential(OrderedDict(layers))


def resnet18(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-18 (He et al., arXiv:1512.03385) with the architecture of torchvision's, for images (N, C, H, W) of any size.
    Returns logits. With ``small_images``, such as MNIST's and CIFAR's, the stem keeps the resolution. Raises ValueError if
    an option is out of range."""
    return _resnet([2, 2, 2, 2], num_classes, in_channels, small_images, deep=False)


def resnet34(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-34; see :func:`resnet18`."""
    return _resnet([3, 4, 6, 3], num_classes, in_channels, small_images, deep=False)


def resnet50(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-50; see :func:`resnet18`."""
    return _resnet([3, 4, 6, 3], num_classes, in_channels, small_images, deep=True)


def resnet101(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-101; see :func:`resnet18`."""
    return _resnet([3, 4, 23, 3], num_classes, in_channels, small_images, deep=True)


def resnet152(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-152; see :func:`resnet18`."""
    return _resnet([3, 8, 36, 3], num_classes, in_channels, small_images, deep=True)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_Conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _check(is_met: bool, name: str, value: Any, requirement: str) -> None:
    if not is_met:
        raise ValueError(f"{name} must be {requirement}, but is {shown(value)}")


def _check_positive(**options: int) -> None:
    for name, value in options.items():
        _check(value >= 1, name, value, "at least 1")
