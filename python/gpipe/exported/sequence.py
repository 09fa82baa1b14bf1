"""The sequence of a converted model's layers."""

from __future__ import annotations

from torch import nn

from gpipe.names import OriginalNames

__all__ = ["ExportedSequential"]


class ExportedSequential(OriginalNames, nn.Sequential):
    """A converted model: the layers in order of execution. Its parameters and buffers are those of the original model,
    and ``state_dict()`` has the same keys."""

    _depth = 1

    def _layers_by_path(self) -> dict[str, nn.Module]:
        return dict(self.named_children())
