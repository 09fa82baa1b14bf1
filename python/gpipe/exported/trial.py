"""Runs a model once while it is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["compare", "unchanged"]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restores buffers and random numbers after a block, which runs without grad mode."""
    owners = {id(each._buffers): each._buffers for each in module.modules()}.values()
    held = [(owner, *item) for owner in owners for item in owner.items()]
    saved = [(owner, name, buffer, buffer.clone()) for owner, name, buffer in held if buffer is not None]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            yield
        finally:
            for owner, name, buffer, value in saved:
                buffer.copy_(value)
                owner[name] = buffer


def compare(module: nn.Module, original: Callable[[], Any], converted: Callable[[], Any]) -> None:
    """Compares what a model and its sequence return, and what they write to buffers, in the modes that they are in.

    Raises:
        ValueError: if they differ.
    """
    results = []
    for call in (original, converted):
        with unchanged(module):
            torch.manual_seed(0)
            results.append([*tree_leaves(call()), *(buffer.clone() for buffer in module.buffers())])
    try:
        torch.testing.assert_close(*results, equal_nan=True)
    except AssertionError:
        raise ValueError(
            "cannot convert the model: some of its modules are in training mode and others in evaluation mode, and the "
            "exports do not show what it computes then; call train() or eval() on the whole model before"
        ) from None
