"""Trainings in several processes, which torchrun starts. The first one, rank 0, writes the files and prints. The others print
only errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

import torch
from torch import Tensor

import gpipe


@contextmanager
def joined_processes(replicas: int = 1) -> Iterator[gpipe.Ranks | None]:
    """Joins the processes that torchrun has started together with this one, for a block; None if there are no others. In the
    others nothing is printed to standard output.

    Raises:
        RuntimeError, ValueError: as :meth:`gpipe.Ranks.from_environment`, and for replicas without processes.
    """
    # A cluster may set WORLD_SIZE for other reasons. Only torchrun sets the other variable.
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        if replicas > 1:
            raise ValueError(
                f"--replicas is {replicas}, but there is one process; start as many per stage with torchrun"
            )
        yield None
        return
    with ExitStack() as stack:
        ranks = stack.enter_context(gpipe.Ranks.from_environment(replicas=replicas))
        if not is_first(ranks):
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield ranks


def part_of(ranks: gpipe.Ranks | None, images: int) -> slice:
    """This replica's part of a mini-batch."""
    return slice(images) if ranks is None else ranks.part(images)


def part_sizes(ranks: gpipe.Ranks | None, images: int) -> tuple[int, int]:
    """The images of the largest and of the smallest part of a mini-batch."""
    if ranks is None:
        return images, images
    largest, smallest = (len(range(images)[ranks.part(images, replica)]) for replica in (0, ranks.replicas - 1))
    return largest, smallest


def join_parts(pipe: gpipe.GPipe, part: Tensor) -> Tensor:
    """Returns the rows of all replicas' parts as float32, in order, in the first process; no rows in the others. All
    processes call it."""
    part = part.float().cpu()
    is_needed = pipe.ranks is None or pipe.ranks.rank < pipe.ranks.replicas  # the other ranks have what these have
    own = part.contiguous().numpy().tobytes() if is_needed else b""
    whole = bytearray().join(pipe.gather(own, "parts of a mini-batch"))
    return torch.frombuffer(whole, dtype=part.dtype).view(-1, *part.shape[1:]) if whole else part[:0]


def is_first(ranks: gpipe.Ranks | None) -> bool:
    """Whether this process writes and prints."""
    return ranks is None or ranks.rank == 0


def run_first(ranks: gpipe.Ranks | None, work: Callable[[], None]) -> None:
    """Calls `work` in the first process. The others wait for it.

    Raises:
        RuntimeError: in the others, if `work` fails.
    """
    if is_first(ranks):
        work()
    if ranks:
        ranks.share("")
