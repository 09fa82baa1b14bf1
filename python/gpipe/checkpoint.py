"""Tells a layer what its forward is run for."""

from gpipe._C import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
