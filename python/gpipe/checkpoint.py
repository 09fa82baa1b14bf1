"""Tells a layer whether its forward will be recomputed, or is a recompute."""

from gpipe._C import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
