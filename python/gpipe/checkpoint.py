"""torchgpipe's place of :func:`gpipe.is_checkpointing` and :func:`gpipe.is_recomputing`."""

from gpipe._C import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
