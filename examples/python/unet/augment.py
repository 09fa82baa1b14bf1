"""Random changes of training images."""

from __future__ import annotations

import numpy as np

from common.random import Random

_SHIFT = 8  # the largest shift is 1/8 of a side
_CONTRAST = 20  # percent, around middle grey
_BRIGHTNESS = 25  # of 255
_TINT = 10  # percent, per channel


def augment(image: np.ndarray, mask: np.ndarray, random: Random) -> tuple[np.ndarray, np.ndarray]:
    """Mirrors the image and its mask left to right in half of the cases, and shifts them by up to an eighth of each side,
    repeating the edge. Changes the contrast, brightness and tint of the image. The C++ program makes the same changes
    from the same random numbers.

    Args:
        image: uint8 of shape (H, W, 3).
        mask: uint8 of shape (H, W).
    """
    height, width = mask.shape
    mirror = random.chance(50)
    shift_x = random.between(-(width // _SHIFT), width // _SHIFT)
    shift_y = random.between(-(height // _SHIFT), height // _SHIFT)
    columns = (np.arange(width) - shift_x).clip(0, width - 1)
    rows = (np.arange(height) - shift_y).clip(0, height - 1)
    if mirror:
        columns = width - 1 - columns
    place = np.ix_(rows, columns)
    return _recolored(image[place], random), mask[place]


def _recolored(image: np.ndarray, random: Random) -> np.ndarray:
    contrast = random.between(100 - _CONTRAST, 100 + _CONTRAST)
    brightness = random.between(-_BRIGHTNESS, _BRIGHTNESS)
    contrasted = np.trunc((np.arange(256) - 128) * contrast / 100) + 128 + brightness
    channels = []
    for channel in range(image.shape[2]):
        tint = random.between(100 - _TINT, 100 + _TINT)
        table = np.trunc(contrasted * tint / 100).clip(0, 255).astype(np.uint8)
        channels.append(table[image[..., channel]])
    return np.stack(channels, axis=-1)
