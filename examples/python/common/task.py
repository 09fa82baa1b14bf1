"""What is to be learnt: the part of a training program that is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from PIL import Image
from torch import Tensor

import gpipe

# Shows a picture: what it is, the file's name, TensorBoard's tag.
Show = Callable[[Image.Image, str, str], None]


class Task(Protocol):
    @property
    def training_images(self) -> int: ...

    @property
    def score_names(self) -> Sequence[str]:
        """What validate() returns; the first tells by its height which epoch is best."""

    def training(self, epoch: int, first: int) -> Iterable[tuple[Tensor, Tensor]]:
        """An epoch's mini-batches, input and target, from number `first` on; the same for the same epoch."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    def validate(self, pipe: gpipe.GPipe, epoch: int, show: Show) -> list[float]:
        """Called in evaluation mode, without gradients."""
