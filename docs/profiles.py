"""Profiles of made-up models, and of the models whose speed the torchgpipe paper published."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gpipe.balance import Profile

# A Tesla P40, as its maker describes it.
FLOPS = 11.76e12  # per second, single precision
BYTES = 346e9  # of memory, read or written per second
PCIE = 12e9  # bytes per second that a PCIe 3.0 link of 16 lanes carries in practice

# No bytes are known except those that cross cuts.
NO_BYTES = dict.fromkeys(
    "parameters gradients late_gradients optimizer buffers saved forward_extra stored_extra backward_extra "
    "input_gradient_extra last_backward_extra last_input_gradient_extra".split(),
    0,
)


class Layer(NamedTuple):
    """Seconds and bytes of one sample."""

    name: str
    forward: float
    backward: float
    output: int
    input_gradient: float = 0
    weight_gradient: float = 0


Skip = tuple[str, int, int, int]  # name, layers that stash and pop it, bytes of one sample


def make_profile(layers: list[Layer], skips: list[Skip], samples: float = 1, scale: float = 1) -> Profile:
    """Returns a profile of micro-batches of `samples`, whose times are `scale` times those of the layers."""
    profile: dict[str, Any] = {
        "version": 4,
        "samples": 1,
        "device": "simulated",
        "workers": 1,
        "intraop_threads": 1,
        "input_requires_grad": True,  # so that the first stage splits its backwards too
        "blocks": [],
        "ties": [],
        "layers": [],
    }
    for i, layer in enumerate(layers):
        size = {"output": int(samples * layer.output), "changes_input": False, "shares_with": i}
        times = {name: samples * scale * seconds for name, seconds in layer._asdict().items() if name not in ("name", "output")}
        times |= {"stored": times["forward"], "recompute": times["forward"]}
        profile["layers"].append({"name": layer.name, **times, **NO_BYTES, **size})
    profile["skips"] = [
        {"name": name, "from": first, "to": last, "bytes": int(samples * size), "changed": False}
        for name, first, last, size in skips
    ]
    return Profile.from_json(json.dumps(profile))


class UNet:
    """torchgpipe's U-Net (5, 64): five levels of five convolutions, 64 channels at 192 x 192 pixels, 241 layers. A
    convolution takes the longer of its arithmetic and its memory traffic; other layers take their memory traffic."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.skips: list[Skip] = []
        stashed: list[tuple[int, int]] = []  # layer and bytes
        levels, channels, size = 5, 64, 192
        for level in range(levels):
            width = channels << level
            self._convolutions(width // 2 if level else 3, width, width, size)
            stashed.append((len(self.layers), 4 * width * size**2))
            self.layers.append(Layer("stash", 0, 0, stashed[-1][1]))
            self._traffic("down", 1.25, 1.25, width, size, out=width * size**2)
            size //= 2
        self._convolutions(channels << levels - 1, channels << levels, channels << levels - 1, size)
        for level in reversed(range(levels)):
            size *= 2
            width = channels << level
            self._traffic("up", 1.25, 1.25, width, size)
            self.skips.append((f"skip{level}", stashed[level][0], len(self.layers), stashed[level][1]))
            self._traffic("concatenate", 4, 4, width, size, out=8 * width * size**2)
            self._convolutions(2 * width, width // 2, width // 2, size)
        self._convolution(channels // 2, 1, size, kernel=1)

    def _convolutions(self, inputs: int, middle: int, outputs: int, size: int) -> None:
        for width in (middle, middle, middle, middle, outputs):
            self._convolution(inputs, width, size, kernel=3)
            self._traffic("dropout", 2, 2, width, size)
            self._traffic("norm", 3, 5, width, size)
            self._traffic("relu", 2, 3, width, size)
            inputs = width

    def _convolution(self, inputs: int, outputs: int, size: int, kernel: int) -> None:
        arithmetic = 2 * kernel**2 * inputs * outputs * size**2 / FLOPS
        seconds = max(arithmetic, 4 * (inputs + outputs) * size**2 / BYTES)
        self.layers.append(Layer("conv", seconds, 2 * seconds, 4 * outputs * size**2))

    def _traffic(self, name: str, forward: float, backward: float, width: int, size: int, out: int = 0) -> None:
        """Adds a layer that reads and writes this many times its activation of `width` channels."""
        activation = 4 * width * size**2
        self.layers.append(Layer(name, forward * activation / BYTES, backward * activation / BYTES, out or activation))


class AmoebaNetD:
    """torchgpipe's AmoebaNet-D (18, 256) as 24 equal layers, whose backward takes twice as long as the forward. Transfers
    take no time."""

    layers = [Layer("cell", 1, 2, 0)] * 24
    skips: list[Skip] = []
