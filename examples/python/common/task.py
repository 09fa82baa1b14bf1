"""What is learnt: the part of a training program that is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from PIL import Image
from torch import Tensor

import gpipe

# Writes a picture: the picture, the file's name, TensorBoard's tag.
Show = Callable[[Image.Image, str, str], None]

# Asked before each mini-batch of a validation: whether the program should stop.
Stops = Callable[[], bool]


class ScoreName(NamedTuple):
    """A validation score: its column in history.csv and its tag in TensorBoard."""

    column: str
    tag: str


class Task(Protocol):
    @property
    def training_images(self) -> int: ...

    @property
    def scores(self) -> Sequence[ScoreName]:
        """The scores that validate() returns. The epoch with the highest first score is the best."""

    def training(self, epoch: int, first: int) -> Iterable[tuple[Any, Tensor]]:
        """An epoch's mini-batches, input and target, from number `first` on, or this replica's parts of them. They depend on
        the epoch alone. An input is a tensor, or tensors in tuples, lists and dicts."""

    def loss(self, output: Any, target: Tensor) -> Tensor: ...

    def validate(self, pipe: gpipe.GPipe, epoch: int, show: Show, stops: Stops) -> list[float]:
        """Called in evaluation mode, without gradients. Each replica reads and runs its part of each mini-batch. All
        processes get the same scores. Hands its pictures to ``show``, at least in the first process. Returns no scores if
        it was stopped."""


def history_columns(scores: Sequence[ScoreName]) -> list[str]:
    """The columns of history.csv for a task with these scores."""
    return ["epoch", "train_loss", *(score.column for score in scores), "learning_rate", "images_per_second"]
