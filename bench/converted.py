"""Times a step of torchvision's ResNet-50 as gpipe.to_sequential makes it, relative to the one written by hand.

    taskset -c 0,1 python converted.py

Both are cut at the same layer into two stages, each with one thread. Prints a JSON line: the median ratio of interleaved
steps, their minimum and their maximum.
"""

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import nn

import gpipe

sys.path.append(str(Path(__file__).parents[1] / "examples/python"))

import networks  # noqa: E402

CHUNKS = 4
REPEATS = 11
CUT = 103  # layers of the hand-written model, which has separate layers for its skips


def parameters_of(layers: list[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def make_pipe(model: nn.Sequential, first: int) -> gpipe.GPipe:
    return gpipe.GPipe(model, [first, len(model) - first], devices=["cpu"] * 2, chunks=CHUNKS, checkpoint="never")


def seconds(pipe: gpipe.GPipe, images: torch.Tensor) -> float:
    start = time.perf_counter()
    pipe.zero_grad()
    pipe(images).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    images = torch.rand(16 * CHUNKS, 3, 64, 64)
    by_hand = networks.resnet50(1000)
    converted = gpipe.to_sequential(torchvision.models.resnet50(), images)
    in_first = parameters_of(list(by_hand)[:CUT])
    cut = next(n for n in itertools.count(1) if parameters_of(list(converted)[:n]) == in_first)
    pipes = make_pipe(by_hand, CUT), make_pipe(converted, cut)
    for pipe in pipes:
        seconds(pipe, images)
    ratios = []
    for _ in range(REPEATS):
        plain, ours = (seconds(pipe, images) for pipe in pipes)
        ratios.append(ours / plain)
    value = {"value": statistics.median(ratios), "unit": "times the hand-written model"}
    print(json.dumps({"bench": "converted", **value, "min": min(ratios), "max": max(ratios), "repeats": REPEATS}))


if __name__ == "__main__":
    main()
