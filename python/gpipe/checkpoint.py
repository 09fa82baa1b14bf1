"""Old place of :func:`gpipe.is_checkpointing` and :func:`gpipe.is_recomputing`."""

import sys
from typing import TYPE_CHECKING, Any

from gpipe.renamed import renamed

if not TYPE_CHECKING:  # a type checker would take any name for one of the module

    def __getattr__(name: str) -> Any:
        return renamed(f"{__name__}.{name}", sys.modules["gpipe"])
