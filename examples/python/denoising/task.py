"""Learns to draw digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gpipe
from common.picture import draw_picture
from common.processes import is_first, join_parts, part_of
from common.random import Random, mini_batches
from common.task import ScoreName, Show, Stops
from denoising.process import STEPS, Input, add_noise, draw
from mnist.data import CLASSES, Labelled

SCORES = (
    ScoreName("explained", "explained/test"),
    ScoreName("recognized", "recognized/samples"),
    ScoreName("test_loss", "loss/test"),
)

_ROWS = 6  # of samples
_TILE = 80  # pixels of a sample
_SAMPLES, _TEST = 0, 1  # streams of random numbers, below those of training


class DiffusionTask:
    """A :class:`common.task.Task` for images in memory. After each epoch it draws samples of each class, always from
    the same noise.

    The scores are the share of the target's variance that the model predicts, the share of the samples whose nearest
    training image is of their class, and the loss.

    Args:
        side: width and height of the model's images. Others are resized.
    """

    scores = SCORES

    def __init__(self, training: Labelled, test: Labelled, side: int, batch_size: int, seed: int, ranks: gpipe.Ranks | None) -> None:
        self._images, self._labels = _resized(training[0], side), training[1]
        self._batch_size = batch_size
        self._seed = seed
        self._ranks = ranks
        self.training_images = len(training[0])
        times = torch.arange(len(test[0])) * STEPS // len(test[0])
        self._test = add_noise(_resized(test[0], side), test[1], times, self._generator(_TEST))

    def training(self, epoch: int, first: int) -> Iterator[tuple[Input, Tensor]]:
        batches = mini_batches(self.training_images, self._batch_size, self._seed, epoch)
        for number, chosen in enumerate(batches[first:], first):
            generator = self._generator((epoch << 32) + number)
            times = torch.randint(STEPS, chosen.shape, generator=generator)
            part = part_of(self._ranks, len(chosen))
            (images, times, labels), velocity = add_noise(self._images[chosen], self._labels[chosen], times, generator)
            yield (images[part], times[part], labels[part]), velocity[part]

    def loss(self, output: Any, velocity: Tensor) -> Tensor:
        return F.mse_loss(output.sample.float(), velocity)

    def validate(self, pipe: gpipe.GPipe, epoch: int, show: Show, stops: Stops) -> list[float]:
        input, velocity = self._test
        loss_sum = 0.0
        batches = [torch.split(tensor, self._batch_size) for tensor in (*input, velocity)]
        for batch in zip(*batches, strict=True):
            if stops():
                return []
            part = part_of(self._ranks, len(batch[0]))
            images, times, labels, expected = (tensor[part] for tensor in batch)
            predicted = pipe((images, times, labels)).sample.float().cpu()
            loss_sum += F.mse_loss(predicted, expected, reduction="sum").item()
        loss = pipe.sum_over_replicas([loss_sum])[0] / velocity.numel()

        noise = torch.randn((_ROWS, *velocity.shape[1:]), generator=self._generator(_SAMPLES))
        labels = torch.arange(CLASSES).repeat_interleave(_ROWS)
        part = part_of(self._ranks, len(labels))
        samples = draw(pipe, noise.repeat(CLASSES, 1, 1, 1)[part], labels[part])
        (recognized,) = pipe.sum_over_replicas([self._count_recognized(samples, labels[part])])
        drawn = join_parts(pipe, samples)
        if is_first(self._ranks):
            tiles = torch.split(drawn.expand(-1, 3, -1, -1), _ROWS)
            picture = draw_picture([(str(label), column) for label, column in enumerate(tiles)], _TILE)
            show(picture, f"epoch_{epoch:03}.png", "samples")
        return [1 - loss / velocity.var().item(), recognized / len(labels), loss]

    def _count_recognized(self, samples: Tensor, labels: Tensor) -> float:
        nearest = torch.cdist((2 * samples - 1).flatten(1), self._images.flatten(1)).argmin(1)
        return (self._labels[nearest] == labels).sum().item()

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(Random(self._seed, stream).next())


def _resized(images: Tensor, side: int) -> Tensor:
    """The images as floats from -1 to 1."""
    return F.interpolate(images / 127.5 - 1, (side, side), mode="bilinear", antialias=True).clamp(-1, 1)
