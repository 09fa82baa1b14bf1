"""Learns to classify images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import gpipe
from common.processes import part_of
from common.random import mini_batches
from common.task import ScoreName, Show, Stops
from mnist.confusion import draw_confusion
from mnist.data import Labelled

SCORES = (ScoreName("accuracy", "accuracy/test"), ScoreName("test_loss", "loss/test"))


class ClassificationTask:
    """A :class:`common.task.Task` for images in memory. Draws the confusion matrix of each epoch."""

    scores = SCORES

    def __init__(self, training: Labelled, test: Labelled, classes: int, batch_size: int, seed: int, ranks: gpipe.Ranks | None) -> None:
        self._training = training[0].float() / 255, training[1]
        self._test = test[0].float() / 255, test[1]
        self._classes = classes
        self._batch_size = batch_size
        self._seed = seed
        self._ranks = ranks
        self.training_images = len(training[0])

    def training(self, epoch: int, first: int) -> Iterator[Labelled]:
        images, labels = self._training
        for chosen in mini_batches(self.training_images, self._batch_size, self._seed, epoch)[first:]:
            part = chosen[part_of(self._ranks, len(chosen))]
            yield images[part], labels[part]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    def validate(self, pipe: gpipe.GPipe, epoch: int, show: Show, stops: Stops) -> list[float]:
        counts = torch.zeros(self._classes, self._classes, dtype=torch.long)
        loss_sum = 0.0
        for images, labels in zip(*(torch.split(tensor, self._batch_size) for tensor in self._test), strict=True):
            if stops():
                return []
            part = part_of(self._ranks, len(images))
            images, labels = images[part], labels[part]
            logits = pipe(images).cpu()
            if len(images) == 0:
                continue  # the mean of no losses is not a number
            loss_sum += self.loss(logits, labels).item() * len(images)
            pairs = labels * self._classes + logits.argmax(1)
            counts += torch.bincount(pairs, minlength=self._classes**2).view_as(counts)
        sums = pipe.sum_over_replicas(counts.flatten().tolist())
        counts = torch.tensor(sums, dtype=torch.double).long().view_as(counts)
        show(draw_confusion(counts), f"confusion_{epoch:03}.png", "confusion/test")
        (loss_sum,) = pipe.sum_over_replicas([loss_sum])
        count = len(self._test[0])
        return [counts.trace().item() / count, loss_sum / count]
