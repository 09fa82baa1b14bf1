"""Drawn scenes: cars in streets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from common.files import make_directory, writing
from common.random import Random
from unet.classes import class_color

_SCENE_CLASSES = 4
_SMALLEST = 16

# Outlines and windows of cars that face right. x is in thousandths of the length from the rear, y of the height from
# the ground.
_BODIES = [
    (
        [(0, 180), (5, 480), (60, 570), (230, 600), (340, 960), (400, 1000), (600, 1000), (660, 950), (770, 600)]
        + [(960, 490), (995, 380), (1000, 180)],
        [
            [(275, 610), (360, 920), (490, 920), (490, 610)],
            [(515, 610), (515, 920), (640, 900), (730, 610)],
        ],
    ),
    (
        [(0, 180), (0, 960), (30, 1000), (760, 1000), (830, 930), (930, 560), (990, 470), (1000, 180)],
        [[(680, 600), (680, 890), (800, 890), (890, 600)]],
    ),
]


def check_scene(size: tuple[int, int], classes: int) -> None:
    """Raises ValueError for a size or a number of classes that cannot be drawn."""
    if min(size) < _SMALLEST:
        raise ValueError(f"a scene of {size[0]}x{size[1]} is too small; give at least {_SMALLEST}x{_SMALLEST}")
    if classes > _SCENE_CLASSES:
        raise ValueError(f"a scene has 2 to {_SCENE_CLASSES} classes, not {classes}")


def write_synthetic(directory: Path, count: int, size: tuple[int, int], seed: int, classes: int) -> None:
    """Writes `count` scenes that are simpler than those of the C++ program: a car (class 1) with windows (class 2) and
    wheels (class 3) in front of other things. Sample i does not depend on `count`.

    Raises:
        ValueError: for a size or a number of classes that cannot be drawn, or for folders that hold other files.
    """
    check_scene(size, classes)
    suffix = ".gif" if classes == 2 else ".png"
    images = [directory / "imgs" / f"{number:04}.jpg" for number in range(count)]
    masks = [directory / "masks" / f"{number:04}_mask{suffix}" for number in range(count)]
    for files in (images, masks):
        make_directory(files[0].parent)
        if others := set(files[0].parent.iterdir()) - set(files):
            raise ValueError(
                f"cannot write synthetic data: {files[0].parent} holds another file, {min(others).name}; remove it or "
                "choose another folder"
            )
    for number, (image_path, mask_path) in enumerate(zip(images, masks, strict=True)):
        image, labels = draw_scene(Random(seed, number), size)
        with writing(image_path):
            image.save(image_path, quality=92)
        with writing(mask_path):
            _paint_labels(labels, classes).save(mask_path)


def draw_scene(random: Random, size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """Returns the image, and the class of each pixel as an image of one channel."""
    width, height = size
    image, labels = Image.new("RGB", size), Image.new("L", size)
    on_image, on_labels = ImageDraw.Draw(image), ImageDraw.Draw(labels)
    horizon = height * random.between(45, 58) // 100
    on_image.rectangle((0, 0, width, horizon), fill=_color(random, 120, 230))
    on_image.rectangle((0, horizon, width, height), fill=_color(random, 50, 150))
    for _ in range(random.between(3, 7)):
        x, half = random.between(0, width), random.between(width // 40, width // 8)
        foot, top = horizon + random.between(0, height // 8), random.between(0, horizon)
        draw = on_image.ellipse if random.chance(40) else on_image.rectangle
        draw((x - half, top, x + half, foot), fill=_color(random, 20, 240))

    outline, windows = _BODIES[random.between(0, len(_BODIES) - 1)]
    length = width * random.between(55, 80) // 100
    tall = min(length * random.between(30, 42) // 100, height * 6 // 10)
    left = random.between(0, width - length)
    ground = random.between(min(horizon + height // 8, height * 97 // 100), height * 97 // 100)
    mirror = random.chance(50)

    def at(point: tuple[int, int]) -> tuple[int, int]:
        along = 1000 - point[0] if mirror else point[0]
        return left + length * along // 1000, ground - tall * point[1] // 1000

    paint, glass, tyre = _color(random, 20, 240), _color(random, 30, 70), _color(random, 20, 45)
    for points, color, label in [(outline, paint, 1), *((window, glass, 2) for window in windows)]:
        on_image.polygon([at(point) for point in points], fill=color)
        on_labels.polygon([at(point) for point in points], fill=label)
    radius = max(1, length * random.between(75, 95) // 1000)
    for along in (185, 805):
        x = at((along, 0))[0]
        box = (x - radius, ground - 2 * radius, x + radius, ground)
        on_image.ellipse(box, fill=tyre)
        on_labels.ellipse(box, fill=3)
        half = radius // 2
        on_image.ellipse((x - half, ground - radius - half, x + half, ground - radius + half), fill=(170, 170, 175))
    return _lit(image, random), labels


def _color(random: Random, low: int, high: int) -> tuple[int, int, int]:
    return random.between(low, high), random.between(low, high), random.between(low, high)


def _lit(image: Image.Image, random: Random) -> Image.Image:
    """Changes the exposure and adds noise."""
    noise = np.random.default_rng(random.next()).normal(0, random.between(2, 9), (image.height, image.width, 1))
    pixels = np.asarray(image) * (random.between(75, 112) / 100) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _paint_labels(labels: Image.Image, classes: int) -> Image.Image:
    """Colours the labels as in a mask file. Classes from `classes` on become car."""
    known = labels.point([label if label < classes else 1 for label in range(256)])
    if classes == 2:
        return known.point([0] + [255] * 255).convert("1")
    known.putpalette([part for label in range(256) for part in class_color(label)])
    return known
