"""MNIST's files in the IDX format: bytes in three dimensions, and labels."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from common.files import writing

# Two zero bytes, the type (8 for bytes), the number of dimensions.
_IMAGES_MAGIC = 0x00000803
_LABELS_MAGIC = 0x00000801
_LARGEST_SIDE = 4096

_NAMES = ("{}-images-idx3-ubyte", "{}-labels-idx1-ubyte")


def read_idx(directory: Path, part: str, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Reads the part "train" or "t10k": images, uint8 of shape (N, 1, H, W), and labels, int64 of shape (N,). Allocates
    nothing for a file whose length does not match its header.

    Raises:
        OSError: for a file that is missing.
        ValueError: with the file's name and the reason, for a file that is compressed, of another kind, empty, truncated
            or too long, for a label that is not below `classes`, and for counts that differ.
    """
    images_path, labels_path = (directory / name.format(part) for name in _NAMES)
    images, labels = _read(images_path, _IMAGES_MAGIC), _read(labels_path, _LABELS_MAGIC)
    if len(images) != len(labels):
        raise ValueError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
    if len(wrong := (labels >= classes).nonzero()):
        index = int(wrong[0])
        raise ValueError(f"{labels_path}: label {index} is {labels[index]}; it must be below {classes}")
    return images.unsqueeze(1), labels.long()


def write_idx(directory: Path, part: str, images: Tensor, labels: Tensor) -> None:
    """Creates or replaces both files. Images are uint8 of shape (N, 1, H, W), labels integers of shape (N,)."""
    for name, magic, items in zip(
        _NAMES, (_IMAGES_MAGIC, _LABELS_MAGIC), (images.squeeze(1), labels.byte()), strict=True
    ):
        header = struct.pack(f">{1 + items.dim()}I", magic, *items.shape)
        path = directory / name.format(part)
        with writing(path):
            path.write_bytes(header + items.contiguous().numpy().tobytes())


def _read(path: Path, magic: int) -> Tensor:
    compressed = path.with_name(f"{path.name}.gz")
    if not path.exists() and compressed.exists():
        raise ValueError(f"{path}: missing, but {compressed} exists; run gunzip on it")
    if not path.stat().st_size:  # 0 also for a pipe, which would block
        raise ValueError(f"{path}: the file is empty")
    with path.open("rb") as file:
        shape = _read_shape(path, file, magic)
        length, expected = path.stat().st_size - file.tell(), math.prod(shape)
        content = bytearray()
        if length == expected:
            content = bytearray(file.read(expected))
            length = len(content)
    if length != expected:
        what = "truncated" if length < expected else "too long"
        raise ValueError(f"{path}: {what}: {length} bytes after the header, which announces {expected}")
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _read_shape(path: Path, file: BinaryIO, magic: int) -> tuple[int, ...]:
    size = 4 * (1 + (magic & 0xFF))
    header = file.read(size)
    if header[:2] == b"\x1f\x8b":
        raise ValueError(f"{path}: compressed; run gunzip on it")
    if len(header) >= 4 and int.from_bytes(header[:4], "big") != magic:
        kind = "images" if magic == _IMAGES_MAGIC else "labels"
        start = f"0x{header[:4].hex()} instead of 0x{magic:08x}"
        raise ValueError(f"{path}: not an IDX file of {kind}: it starts with {start}")
    if len(header) < size:
        raise ValueError(f"{path}: truncated: {len(header)} bytes, but the header alone has {size}")
    shape = struct.unpack(f">{magic & 0xFF}I", header[4:])
    if shape[0] == 0:
        raise ValueError(f"{path}: the file has no items")
    if any(not 1 <= side <= _LARGEST_SIDE for side in shape[1:]):
        raise ValueError(
            f"{path}: images of {shape[1]} rows and {shape[2]} columns; 1 to {_LARGEST_SIDE} are supported"
        )
    return shape
