"""Confusion matrices as pictures."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# In pixels.
_CELL = 48
_LEFT = 96  # of the first column's line
_TOP = 88  # of the first row's line
_RIGHT = _BOTTOM = 12
_TITLE_BAR = 36
_AXIS_BAR = 24
_AXIS_NAME = 60

_PAPER = 48
_HALF_LIGHT = 117  # a grey with the same contrast to black and to white


def draw_confusion(counts: Tensor) -> Image.Image:
    """Draws a confusion matrix in grey: a row per true class, a column per predicted class. The title tells the
    accuracy. A cell is brighter the larger its share of the row's images is, and shows the number of its images.

    Args:
        counts: integers of shape (classes, classes).
    """
    classes = len(counts)
    side = classes * (_CELL + 1) + 1
    picture = Image.new("L", (_LEFT + side + _RIGHT, _TOP + side + _BOTTOM), _PAPER)
    draw = ImageDraw.Draw(picture)
    small, large = ImageFont.load_default(14), ImageFont.load_default(20)

    def write(x: float, y: float, text: str) -> None:
        draw.text((x, y), text, fill=255, font=large, anchor="mm")

    accuracy = 100 * counts.trace().item() / max(1, int(counts.sum()))
    write(picture.width / 2, _TITLE_BAR / 2, f"accuracy {accuracy:.2f} %")
    write(_LEFT + side / 2, _TITLE_BAR + _AXIS_BAR / 2, "predicted")
    write(_AXIS_NAME / 2, _TOP + side / 2, "true")
    # The square root makes rare mistakes visible.
    greys = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt().mul(255).round().int()
    for row in range(classes):
        middle = _edge(0, row) + _CELL / 2
        write(_LEFT + middle, (_TITLE_BAR + _AXIS_BAR + _TOP) / 2, str(row))
        write((_AXIS_NAME + _LEFT) / 2, _TOP + middle, str(row))
        for column in range(classes):
            left, top, grey = _edge(_LEFT, column), _edge(_TOP, row), int(greys[row, column])
            draw.rectangle((left, top, left + _CELL - 1, top + _CELL - 1), fill=grey)
            if count := int(counts[row, column]):
                ink = 0 if grey > _HALF_LIGHT else 255
                draw.text((left + _CELL / 2, top + _CELL / 2), str(count), fill=ink, font=small, anchor="mm")
    return picture


def _edge(start: int, cell: int) -> int:
    return start + 1 + cell * (_CELL + 1)
