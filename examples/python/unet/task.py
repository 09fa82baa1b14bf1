"""Learns to segment images."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

import gpipe
from common.picture import draw_picture
from common.processes import is_first, join_parts, part_of
from common.random import Random
from common.task import ScoreName, Show, Stops
from gpipe.data import PartSampler, collate_part
from unet.augment import augment
from unet.carvana import Sample, read_image
from unet.classes import read_labels
from unet.segmentation import Metrics, one_hot, paint, segmentation_loss, to_labels, to_probabilities

_PICTURE_ROWS = 6


class Loading(NamedTuple):
    size: tuple[int, int]  # width, height
    batch_size: int
    workers: int
    classes: int
    augment: bool
    seed: int


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images, float of shape (3, H, W) with values 0 to 1, each with the classes of its pixels, uint8 of shape (1, H, W).

    Args:
        epoch: the epoch to augment for; 0: do not augment.
    """

    def __init__(self, samples: Sequence[Sample], loading: Loading, epoch: int = 0) -> None:
        self.samples = samples
        self.loading = loading
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = read_image(self.samples[index].image, self.loading.size)
        mask = read_labels(self.samples[index].mask, self.loading.classes, self.loading.size)
        if self.epoch:
            image, mask = augment(image, mask, Random(self.loading.seed, (self.epoch << 32) + index + 1))
        return torch.tensor(image).permute(2, 0, 1).float() / 255, torch.tensor(mask)[None]


def segmentation_scores(classes: int) -> list[ScoreName]:
    """The scores of a validation: Dice, IoU and loss; with more than two classes also the Dice of each."""
    scores = [ScoreName("val_dice", "dice/val"), ScoreName("val_iou", "iou/val"), ScoreName("val_loss", "loss/val")]
    if classes > 2:
        scores += [ScoreName(f"val_dice_{label}", f"dice/val_{label}") for label in range(1, classes)]
    return scores


class SegmentationTask:
    """A :class:`common.task.Task` for image files. Each epoch it draws a picture of the first validation images."""

    def __init__(self, training: Sequence[Sample], validation: Sequence[Sample], loading: Loading, ranks: gpipe.Ranks | None) -> None:
        self._training = training
        self._validation = validation
        self._loading = loading
        self._ranks = ranks
        self.training_images = len(training)
        self.scores = segmentation_scores(loading.classes)

    def training(self, epoch: int, first: int) -> Iterable[tuple[Tensor, Tensor]]:
        samples = list(self._training)
        Random(self._loading.seed, epoch).shuffle(samples)
        pictures = Pictures(samples, self._loading, epoch if self._loading.augment else 0)
        return self._load(pictures, first * self._loading.batch_size)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return segmentation_loss(logits, labels)

    def validate(self, pipe: gpipe.GPipe, epoch: int, show: Show, stops: Stops) -> list[float]:
        metrics = Metrics(self._loading.classes)
        loss_sum = 0.0
        for number, (images, labels) in enumerate(self._load(Pictures(self._validation, self._loading))):
            if stops():
                return []
            logits = pipe(images).cpu()
            probabilities = to_probabilities(logits)
            if number == 0:
                picture = self._draw(pipe, images, labels, probabilities)
                if picture:
                    show(picture, f"epoch_{epoch:03}.png", "predictions/val")
            if len(images) == 0:
                continue  # the mean of no losses is not a number
            loss_sum += segmentation_loss(logits, labels).item() * len(images)
            metrics.add(to_labels(probabilities), labels)
        sums = pipe.sum_over_replicas(metrics.pairs.flatten().tolist())
        metrics.pairs = torch.tensor(sums, dtype=torch.double).long().view_as(metrics.pairs)
        (loss_sum,) = pipe.sum_over_replicas([loss_sum])
        dice, iou = metrics.dice_and_iou()
        scores = [statistics.fmean(dice), statistics.fmean(iou), loss_sum / len(self._validation)]
        return scores + dice if self._loading.classes > 2 else scores

    def _draw(self, pipe: gpipe.GPipe, images: Tensor, labels: Tensor, probabilities: Tensor) -> Image.Image | None:
        """Draws the first images of the first mini-batch, in the first process. The arguments are this replica's part."""
        begin = part_of(self._ranks, min(self._loading.batch_size, len(self._validation))).start or 0
        rows = slice(max(0, _PICTURE_ROWS - begin))
        masks = paint(one_hot(labels[rows], self._loading.classes))
        columns = [("image", images[rows]), ("mask", masks), ("prediction", paint(probabilities[rows]))]
        whole = [(title, join_parts(pipe, tiles)) for title, tiles in columns]
        return draw_picture(whole) if is_first(self._ranks) else None

    def _load(self, pictures: Pictures, first: int = 0) -> Iterable[tuple[Tensor, Tensor]]:
        """The mini-batches from image `first` on, or this replica's parts of them."""
        batches = BatchSampler(range(first, len(pictures)), self._loading.batch_size, drop_last=False)
        return DataLoader(
            pictures,
            batch_sampler=PartSampler(batches, self._ranks) if self._ranks else batches,
            collate_fn=collate_part(pictures),
            num_workers=self._loading.workers,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # the loader draws a seed, which must not change the training's random numbers
        )


def _ignore_signals(worker: int) -> None:
    """A terminal and a machine that stops send signals to all processes. The trainer decides how to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
