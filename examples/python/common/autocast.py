"""Mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def autocast(enabled: bool, devices: Iterable[torch.device]) -> Iterator[None]:
    """Operators on these kinds of devices compute in bfloat16 where that is safe. bfloat16 has the range of float, so
    the loss needs no scaling."""
    with ExitStack() as stack:
        for kind in sorted({device.type for device in devices}):
            stack.enter_context(torch.autocast(kind, torch.bfloat16, enabled=enabled))
        yield
