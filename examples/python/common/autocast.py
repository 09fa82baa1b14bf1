"""Mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def autocast(enabled: bool, devices: Iterable[torch.device]) -> Iterator[None]:
    """Operators on those kinds of devices compute in bfloat16 where that is safe. It needs no loss scaling: bfloat16
    has the range of float."""
    with ExitStack() as stack:
        for kind in sorted({device.type for device in devices}):
            stack.enter_context(torch.autocast(kind, torch.bfloat16, enabled=enabled))
        yield
