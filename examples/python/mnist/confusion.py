"""Which classes are taken for which."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# In pixels.
_CELL = 48
_MARGIN = 36

_PAPER = 48
_HALF_LIGHT = 117  # of this grey, black and white stand out alike


def draw_confusion(counts: Tensor) -> Image.Image:
    """A grey square a pair of classes, whose numbers stand above and on the left: row the true class, column the
    predicted one. The brighter, the more of its row's images it holds; their number is written in it.

    Args:
        counts: integers of shape (classes, classes).
    """
    classes = len(counts)
    side = _MARGIN + classes * (_CELL + 1) + 1
    picture = Image.new("L", (side, side), _PAPER)
    draw = ImageDraw.Draw(picture)
    small, large = ImageFont.load_default(14), ImageFont.load_default(20)
    # The root makes the rare mistakes visible, which are what one looks for.
    greys = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt().mul(255).round().int()
    for row in range(classes):
        middle = _edge(row) + _CELL / 2
        draw.text((middle, _MARGIN / 2), str(row), fill=255, font=large, anchor="mm")
        draw.text((_MARGIN / 2, middle), str(row), fill=255, font=large, anchor="mm")
        for column in range(classes):
            left, top, grey = _edge(column), _edge(row), int(greys[row, column])
            draw.rectangle((left, top, left + _CELL - 1, top + _CELL - 1), fill=grey)
            if count := int(counts[row, column]):
                ink = 0 if grey > _HALF_LIGHT else 255
                draw.text((left + _CELL / 2, top + _CELL / 2), str(count), fill=ink, font=small, anchor="mm")
    return picture


def _edge(cell: int) -> int:
    return _MARGIN + 1 + cell * (_CELL + 1)
