"""Digits to learn from: MNIST's files, or drawn ones."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from common.options import integer
from common.processes import run_first
from mnist.digits import write_digits
from mnist.idx import read_idx

CLASSES = 10
Labelled = tuple[Tensor, Tensor]  # images, uint8 of shape (N, 1, H, W), and labels, int64 of shape (N,)


class Digits(NamedTuple):
    training: Labelled
    test: Labelled
    drawn: Path | None  # the folder of digits that were drawn


def add_data_options(add: Callable[..., Any]) -> None:
    """The flags of programs that learn from digits. `add` is an argument group's add_argument."""
    add(
        "--data",
        default="synthetic",
        metavar="DIR",
        help="folder with MNIST's four IDX files, uncompressed, or 'synthetic', which draws such files "
        "(default: %(default)s)",
    )
    add(
        "--samples",
        type=integer(60, 600_000),
        default=6000,
        metavar="N",
        help="number of training images that 'synthetic' draws; it draws a sixth as many test images "
        "(default: %(default)s)",
    )


def read_digits(options: Namespace, *, plain: bool = False) -> Digits:
    """Draws the digits if the options say so, then reads them. See draw_digits() for `plain`.

    Raises:
        OSError, ValueError: as read_idx() and write_digits().
    """
    drawn = None
    if options.data == "synthetic":
        drawn = options.output / "digits"
        arguments = (drawn, options.samples, options.samples // 6, options.seed)
        run_first(options.ranks, lambda: write_digits(*arguments, plain=plain))
    folder = drawn or Path(options.data)
    return Digits(read_idx(folder, "train", CLASSES), read_idx(folder, "t10k", CLASSES), drawn)
