"""Tensors as pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

_LINE = 2  # pixels
_LINE_GREY = 96 / 255


def draw_picture(columns: Sequence[Tensor]) -> Image.Image:
    """A picture with a row a sample and a column a tensor, thin lines between.

    Args:
        columns: of shape (N, 3, H, W) each, values 0 to 1.
    """
    lined = [F.pad(column.float().cpu(), (0, _LINE, 0, _LINE), value=_LINE_GREY) for column in columns]
    pixels = torch.cat([torch.cat(row, dim=-1) for row in zip(*lined, strict=True)], dim=-2)
    pixels = pixels[:, :-_LINE, :-_LINE].clamp(0, 1).mul(255).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
