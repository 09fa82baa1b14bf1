"""A U-Net as a flat sequence with skip connections. The C++ model has the same layers, keys and shapes."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from gpipe.skip import Namespace, Skippable, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(Skippable):
    def forward(self, x: Tensor) -> Tensor:
        stash("skip", x)
        return x


@skippable(pop=["skip"])
class Concatenate(Skippable):
    """Concatenates the skip with the input, cropped to the size of the skip."""

    def forward(self, x: Tensor) -> Tensor:
        skip = pop("skip")
        return torch.cat([skip, x[:, :, : skip.shape[2], : skip.shape[3]]], 1)


def unet(in_channels: int = 3, out_channels: int = 1, depth: int = 4, base_channels: int = 64) -> nn.Sequential:
    """A U-Net (Ronneberger et al., arXiv:1505.04597) with batch norm for images of any size. Returns logits, one channel
    per class. The resolution is halved `depth` times; the `base_channels` of full resolution double each time. By
    default, it has 31 million parameters."""
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
        layers[f"up{level}_upsample"] = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        layers[f"up{level}_join"] = Concatenate().isolate(skips[level - 1])
        block(f"up{level}", 2 * channels, channels)
    layers["head"] = nn.Conv2d(channels, out_channels, 1)
    return nn.Sequential(OrderedDict(layers))
