"""Other pictures of the same things."""

from __future__ import annotations

import numpy as np

from common.random import Random

_SHIFT = 8  # a side's share, inverted
_CONTRAST = 20  # percent around the middle grey
_BRIGHTNESS = 25  # of 255
_TINT = 10  # percent a channel


def augment(image: np.ndarray, mask: np.ndarray, random: Random) -> tuple[np.ndarray, np.ndarray]:
    """In half of the cases mirrored left to right, shifted by up to an eighth of each side (what comes in repeats the
    edge), the image with other contrast, brightness and tint: what the C++ program draws from the same numbers.

    Args:
        image: uint8 of shape (H, W, 3).
        mask: uint8 of shape (H, W), which moves along.
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
