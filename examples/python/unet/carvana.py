"""Files in the layout of the Carvana data set: DIR/imgs/NAME.jpg with DIR/masks/NAME_mask.gif."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from common.random import Random

_MASK_SUFFIX = "_mask"
_FEW_PIXELS = 1 << 20  # read from a file of any length
_PIXELS_PER_BYTE = {"JPEG": 512, "PNG": 8256, "GIF": 2730}  # no encoder fits more into a byte


class Sample(NamedTuple):
    image: Path
    mask: Path


def list_samples(directory: Path) -> list[Sample]:
    """The samples of a folder, sorted by name. Reads the headers of all files; damage after a header shows on decoding.

    Raises:
        OSError: for a folder that is missing.
        ValueError: which names the files, if there are no images, an image has no mask, a mask has no image, a file is
            not an image, or an image and its mask differ in size.
    """
    images = _by_stem(directory / "imgs", (".jpg", ".jpeg", ".png"))
    masks = {}
    for stem, path in _by_stem(directory / "masks", (".gif", ".png")).items():
        if not stem.endswith(_MASK_SUFFIX):
            raise ValueError(f"{path}: the name of a mask must be <image>{_MASK_SUFFIX}{path.suffix}")
        masks[stem.removesuffix(_MASK_SUFFIX)] = path
    if not images:
        raise ValueError(f"{directory / 'imgs'}: no .jpg, .jpeg or .png file")
    if missing := sorted(images.keys() - masks.keys()):
        raise ValueError(f"{directory / 'masks'}: no mask (<image>{_MASK_SUFFIX}.gif or .png) for: {_few(missing)}")
    if missing := sorted(masks.keys() - images.keys()):
        raise ValueError(f"{directory / 'imgs'}: no image for the masks of: {_few(missing)}")
    samples = [Sample(images[stem], masks[stem]) for stem in sorted(images)]
    for image, mask in samples:
        if image_size(image) != image_size(mask):
            width, height = image_size(image)
            raise ValueError(f"{image} is {width}x{height}, but its mask {mask} is %dx%d" % image_size(mask))
    return samples


def split(samples: Sequence[Sample], validation_percent: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Draws `validation_percent` of the samples for validation, the same ones as the C++ programs. Returns those for
    training and those for validation."""
    if len(samples) < 2:
        raise ValueError(f"cannot split {len(samples)} sample into training and validation; give at least two")
    wanted = int(len(samples) * validation_percent / 100 + 0.5)
    order = list(range(len(samples)))
    Random(seed).shuffle(order)
    validation = set(order[: min(max(wanted, 1), len(samples) - 1)])
    return (
        [sample for index, sample in enumerate(samples) if index not in validation],
        [sample for index, sample in enumerate(samples) if index in validation],
    )


def image_size(path: Path) -> tuple[int, int]:
    """Width and height, from the file's header."""
    with _open(path) as image:
        return image.size


def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    width, height = (max(1, int(side * scale + 0.5)) for side in size)
    return width, height


def read_image(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Red, green and blue, uint8 of shape (H, W, 3), resized. Alpha channels and transparency are ignored: each pixel has
    the colour that the file gives it.

    Raises:
        OSError: for a file that cannot be opened.
        ValueError: with the file's name and the reason, for a file of another kind, damaged or truncated. Images with
            more pixels than Pillow accepts (179 million), or than the file is long enough for, are refused.
    """
    with _open(path) as image:
        image.draft("RGB", size)  # a JPEG is decoded no larger than needed
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR))


def read_pixels(path: Path) -> np.ndarray:
    """Red, green and blue, uint8 of shape (H, W, 3), at full size."""
    return read_image(path, image_size(path))


@contextmanager
def _open(path: Path) -> Iterator[Image.Image]:
    """Reads the header of an image. Turns decoding errors into ValueErrors that name the file."""
    length = path.stat().st_size
    if not length:  # 0 also for a pipe, which would block
        raise ValueError(f"{path}: the file is empty")
    with path.open("rb") as file:
        try:
            with Image.open(file, formats=tuple(_PIXELS_PER_BYTE)) as image:
                if image.width * image.height > max(_FEW_PIXELS, length * _PIXELS_PER_BYTE.get(image.format or "", 512)):
                    raise ValueError(f"damaged: {image.width}x{image.height} pixels do not fit into {length} bytes")
                yield image
        except UnidentifiedImageError:
            raise ValueError(f"{path}: not a JPEG, PNG or GIF file, or damaged") from None
        except Exception as error:  # Pillow has no common class for damaged files
            raise ValueError(f"{path}: {error}") from error


def _by_stem(directory: Path, extensions: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix.lower() not in extensions:
            continue
        if path.stem in files:
            raise ValueError(f"two files have the same stem: {files[path.stem]} and {path}")
        files[path.stem] = path
    return files


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
