"""Tensors as pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# In pixels.
_TITLE_BAR = 36
_TITLE = 20
_GAP = 4

_PAPER = 48  # grey


def draw_picture(columns: Sequence[tuple[str, Tensor]], smallest_tile: int = 256) -> Image.Image:
    """Draws a table with one row per sample and one titled column per tensor, such as image, mask and prediction.

    Args:
        columns: titles, and tensors of shape (N, 3, H, W) with values 0 to 1.
        smallest_tile: the fewest pixels on the longer side of a tile. Smaller tiles are enlarged by a whole number.
    """
    height, width = columns[0][1].shape[2:]
    factor = -(-smallest_tile // max(height, width))
    padding = (0, _GAP, 0, _GAP)
    padded = [F.pad(_enlarged(tiles, factor), padding, value=_PAPER / 255) for _, tiles in columns]
    pixels = torch.cat([torch.cat(row, dim=-1) for row in zip(*padded, strict=True)], dim=-2)
    pixels = pixels[:, :-_GAP, :-_GAP].clamp(0, 1).mul(255).round().byte()
    table = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture = Image.new("RGB", (table.width, table.height + _TITLE_BAR), (_PAPER, _PAPER, _PAPER))
    picture.paste(table, (0, _TITLE_BAR))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_TITLE)
    for number, (title, _) in enumerate(columns):
        middle = number * (width * factor + _GAP) + width * factor / 2
        draw.text((middle, _TITLE_BAR / 2), title, fill="white", font=font, anchor="mm")
    return picture


def _enlarged(tiles: Tensor, factor: int) -> Tensor:
    return tiles.float().cpu().repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
