"""The classes of a mask's pixels. Class 0 is the background; classes 1 and up are the things to find.

A mask file of two classes is black and white. With more classes, class k has the k-th colour of PASCAL VOC's masks
(black, maroon, green, olive, navy, ...), or the grey level k.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from unet.carvana import read_pixels

MAX_CLASSES = 64


def class_color(label: int) -> tuple[int, int, int]:
    """The colour of a class in masks of more than two classes. Each three bits of the class, from the lowest, give the
    next lower bit of red, green and blue."""
    red = green = blue = 0
    for bit in range(7, -1, -1):
        red |= (label & 1) << bit
        green |= (label >> 1 & 1) << bit
        blue |= (label >> 2 & 1) << bit
        label >>= 3
    return red, green, blue


def read_labels(path: Path, classes: int, size: tuple[int, int]) -> np.ndarray:
    """The class of each pixel, uint8 of shape (H, W), resized by the nearest pixel.

    Raises:
        ValueError: with the file's name, if it cannot be decoded or has a colour that is not of these classes.
    """
    pixels = read_pixels(path).astype(np.int32)
    labels = _black_and_white(pixels) if classes == 2 else _colored(pixels, classes, path)
    return np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))


def _black_and_white(pixels: np.ndarray) -> np.ndarray:
    luminance = pixels @ np.array([299, 587, 114], np.int32) // 1000
    return (luminance if luminance.max() <= 1 else luminance > 127).astype(np.uint8)


def _colored(pixels: np.ndarray, classes: int, path: Path) -> np.ndarray:
    label_of = {class_color(label): label for label in range(classes)}
    label_of |= {(label, label, label): label for label in range(classes)}
    weights = np.array([1 << 16, 1 << 8, 1], np.int32)
    known = np.array(sorted(label_of))
    labels = np.array([label_of[tuple(color)] for color in known.tolist()], np.uint8)
    codes, codes_known = pixels @ weights, known @ weights
    index = np.searchsorted(codes_known, codes).clip(max=len(known) - 1)
    if (wrong := codes_known[index] != codes).any():
        color = ",".join(map(str, pixels[wrong][0]))
        raise ValueError(f"{path}: the colour {color} is not that of any of {classes} classes")
    return np.asarray(labels[index])
