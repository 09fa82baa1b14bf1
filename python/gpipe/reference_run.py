"""The result of a pipeline, computed without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpipe.checks import check_chunks
from gpipe.randomness import RandomScope
from gpipe.structure import take_apart

__all__ = ["reference"]


def reference(module: nn.Sequential, input: Any, *, chunks: int = 1) -> Any:
    """Runs a model micro-batch by micro-batch on the calling thread. Its layers draw the random numbers that they would
    draw in a pipeline, so the result is that of a pipeline with the same default generator.

    Args:
        module: the unpartitioned model.
        input: tensors as for :meth:`gpipe.GPipe.forward`; dimension 0 is the batch.
        chunks: the most micro-batches that the mini-batch is cut into.

    Returns:
        The output of the last layer, concatenated along dimension 0.

    Raises:
        ValueError: if ``chunks`` is not positive, or if the input holds no tensors.
        TypeError: if the input or the output holds anything but tensors and ``None``.
        RuntimeError: if the last layer returned objects of different structure for two micro-batches.
    """
    chunks = check_chunks(chunks)
    inputs, structure = take_apart(input)
    if not inputs:
        raise ValueError("the input holds no tensors; a pipeline needs at least one")
    seed = RandomScope.draw_seed()
    outputs = []
    for micro_batch, parts in enumerate(zip(*(tensor.chunk(chunks) for tensor in inputs), strict=True)):
        value = structure.build(parts)
        for index, layer in enumerate(module):
            with RandomScope(seed, index, micro_batch):
                value = layer(value)
        outputs.append(take_apart(value))
    first = outputs[0][1]
    for _, other in outputs:
        if other != first:
            raise RuntimeError(
                f"the last layer returned {first!r} for one micro-batch and {other!r} for another; return the same "
                "structure for all"
            )
    return first.build(torch.cat(pieces) for pieces in zip(*(tensors for tensors, _ in outputs), strict=True))
