"""Drawn digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from common.files import make_directory
from common.random import Random
from mnist.idx import write_idx

_SIDE = 28


def write_digits(directory: Path, training_count: int, test_count: int, seed: int, *, plain: bool = False) -> None:
    """Writes both parts as MNIST's files. The digits are simpler than those of the C++ program: printed, in one font.
    See draw_digits() for `plain`."""
    make_directory(directory)
    for part, count, first_stream in (("train", training_count, 0), ("t10k", test_count, 1 << 32)):
        write_idx(directory, part, *draw_digits(count, seed, first_stream, plain=plain))


def draw_digits(count: int, seed: int, first_stream: int, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Returns images, uint8 of shape (N, 1, 28, 28), light on dark, and labels of shape (N,). Digit i does not depend on
    `count`.

    Args:
        plain: draw large digits, white on black. Otherwise the brightness of digit and background is random, and there
            is noise.
    """
    images, labels = [], []
    for number in range(count):
        random = Random(seed, first_stream + number)
        labels.append(random.between(0, 9))
        images.append(_draw_digit(random, labels[-1], plain))
    return torch.tensor(np.stack(images))[:, None], torch.tensor(labels)


def _draw_digit(random: Random, digit: int, plain: bool) -> np.ndarray:
    """The rotation, size, place and thickness are random."""
    image = Image.new("L", (_SIDE, _SIDE))
    shift, smallest, largest = (1, 26, 30) if plain else (3, 16, 24)
    center = _SIDE / 2 + random.between(-shift, shift), _SIDE / 2 + random.between(-shift, shift)
    font = ImageFont.load_default(random.between(smallest, largest))
    light = 255 if plain else random.between(140, 255)
    stroke = random.between(0, 1)
    ImageDraw.Draw(image).text(center, str(digit), fill=light, font=font, anchor="mm", stroke_width=stroke)
    image = image.rotate(random.between(-20, 20), Image.Resampling.BILINEAR, center=center)
    if plain:
        return np.asarray(image)
    noise = np.random.default_rng(random.next()).normal(0, random.between(1, 20), (_SIDE, _SIDE))
    pixels = np.asarray(image) + random.between(0, 50) + noise
    return pixels.clip(0, 255).astype(np.uint8)
