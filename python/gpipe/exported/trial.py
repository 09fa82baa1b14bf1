"""Runs a model once while it is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["agree", "compare", "mode", "unchanged"]


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets the mode of a module and all its submodules for a block."""
    modes = {each: each.training for each in module.modules()}
    try:
        module.train(training)
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


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
    if not _equal(_result(module, original), _result(module, converted)):
        raise ValueError(
            "cannot convert the model: some of its modules are in training mode and others in evaluation mode, and the "
            "exports do not show what it computes then; call train() or eval() on the whole model before"
        )


def agree(module: nn.Module, sequence: nn.Module, original: Callable[[], Any], converted: Callable[[], Any]) -> bool:
    """Returns whether a model and its sequence do the same in each mode: return equal values, or raise. In one mode, they
    must return."""
    returned = False
    for training in (True, False):
        results: list[list[Any] | None] = []
        with mode(module, training), mode(sequence, training):
            for call in (original, converted):
                try:
                    results.append(_result(module, call))
                except Exception:
                    results.append(None)
        ours, theirs = results
        if ours is None or theirs is None:
            if ours is not theirs:
                return False
        elif not _equal(ours, theirs):
            return False
        else:
            returned = True
    return returned


def _result(module: nn.Module, call: Callable[[], Any]) -> list[Any]:
    with unchanged(module):
        torch.manual_seed(0)
        return [*tree_leaves(call()), *(buffer.clone() for buffer in module.buffers())]


def _equal(ours: list[Any], theirs: list[Any]) -> bool:
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError:
        return False
    return True
