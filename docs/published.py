"""A profile of the U-Net whose speed on Tesla P40 GPUs the torchgpipe paper published, and these speeds."""

from __future__ import annotations

import json
from typing import NamedTuple

from gpipe.balance import Profile, predict

# As the maker of the P40 describes it.
FLOPS = 11.76e12  # per second, single precision
BYTES = 346e9  # of memory, read or written per second
PCIE = 12e9  # bytes per second that a PCIe 3.0 link of 16 lanes carries in practice

# Bytes that are not known, and times of split backwards, which the runs do not have.
ZEROS = dict.fromkeys(
    "input_gradient weight_gradient parameters gradients late_gradients optimizer buffers saved forward_extra stored_extra "
    "backward_extra input_gradient_extra last_backward_extra last_input_gradient_extra".split(),
    0,
)


class Layer(NamedTuple):
    """Seconds and bytes of one sample."""

    name: str
    forward: float
    backward: float
    output: int


class Run(NamedTuple):
    speed: float  # samples/s
    samples: int
    chunks: int
    balance: list[int]


RUNS = [  # the first calibrates the times
    Run(24.456, 80, 2, [241]),
    Run(35.502, 512, 32, [104, 137]),
    Run(67.042, 512, 16, [30, 66, 84, 61]),
    Run(88.497, 640, 40, [16, 27, 31, 44, 22, 57, 27, 17]),
]


class UNet:
    """torchgpipe's U-Net (5, 64): five levels of five convolutions, 64 channels at 192 x 192 pixels, 241 layers. A
    convolution takes the longer of its arithmetic and its memory traffic; other layers take their memory traffic."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.skips: list[tuple[str, int, int, int]] = []  # name, layers that stash and pop it, bytes of one sample
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

    def _profile(self, samples: float, scale: float) -> Profile:
        """Returns a profile of micro-batches of `samples`, whose times are `scale` times those of the layers."""
        layers = []
        for i, layer in enumerate(self.layers):
            times = dict.fromkeys(("forward", "stored", "recompute"), samples * scale * layer.forward)
            size = {"output": int(samples * layer.output), "changes_input": False, "shares_with": i}
            layers.append(ZEROS | times | size | {"name": layer.name, "backward": samples * scale * layer.backward})
        flags = {"changed": False, "wants_gradient": True}
        skips = [
            {"name": name, "from": first, "readers": [last], "bytes": int(samples * size)} | flags
            for name, first, last, size in self.skips
        ]
        about = {"version": 5, "samples": 1, "device": "simulated", "workers": 1, "intraop_threads": 1}
        content = {"input_requires_grad": True, "blocks": [], "ties": [], "layers": layers, "skips": skips}
        return Profile.from_json(json.dumps(about | content))

    def predict(self) -> list[tuple[Run, float]]:
        """Returns the predicted speed of each run."""
        scale = self._speed_of(RUNS[0], 1) / RUNS[0].speed
        return [(run, self._speed_of(run, scale)) for run in RUNS]

    def _speed_of(self, run: Run, scale: float) -> float:
        profile = self._profile(run.samples / run.chunks, scale)
        prediction = predict(profile, run.balance, run.chunks, "except_last", bandwidth=PCIE, copies=True)
        return run.samples / prediction.seconds
