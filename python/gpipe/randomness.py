"""Random numbers that do not depend on where a model is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.checks import check_chunks
from gpipe.structure import take_apart

__all__ = ["RandomScope", "reference"]


class RandomScope:
    """Within it, random draws on this thread that name no generator (dropout, ``torch.rand``, ..) come from a stream
    that depends on ``(seed, layer, micro_batch)`` alone. A pipeline opens one around each layer of each micro-batch, in
    the forward and again in the recompute.

        seed = RandomScope.draw_seed()
        with RandomScope(seed, layer=2, micro_batch=0):
            y = dropout(x)

    ``torch.get_rng_state``, ``torch.set_rng_state`` and ``torch.manual_seed`` then mean the scope's stream too, so
    ``torch.utils.checkpoint`` inside a layer repeats the layer's draws.

    Scopes nest; each belongs to the thread that entered it.
    """

    def __init__(self, seed: int, layer: int, micro_batch: int) -> None:
        self._arguments = (seed, layer, micro_batch)
        self._scopes: list[_C.RandomScope] = []

    @staticmethod
    def draw_seed() -> int:
        """One draw of 64 bits from the default generator: the seed of a mini-batch."""
        return _C.draw_seed()

    def __enter__(self) -> RandomScope:
        self._scopes.append(_C.RandomScope(*self._arguments))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scopes.pop().close()


def reference(module: nn.Sequential, input: Any, *, chunks: int = 1) -> Any:
    """What a pipeline of the model computes, without one: runs the model micro-batch by micro-batch, with the random
    numbers that the pipeline's layers would get.

    Args:
        module: the unpartitioned model.
        input: as the pipeline's; dimension 0 of each tensor is the batch.
        chunks: micro-batches that the mini-batch is cut into.

    Returns:
        What the last layer returns, joined along dimension 0.
    """
    chunks = check_chunks(chunks)
    inputs, structure = take_apart(input)
    seed = RandomScope.draw_seed()
    outputs = []
    for micro_batch, parts in enumerate(zip(*(tensor.chunk(chunks) for tensor in inputs), strict=True)):
        value = structure.build(parts)
        for index, layer in enumerate(module):
            with RandomScope(seed, index, micro_batch):
                value = layer(value)
        outputs.append(take_apart(value))
    if not outputs:
        raise ValueError("there is no input tensor")
    if any(made != outputs[0][1] for _, made in outputs):
        raise RuntimeError(f"the last layer returned {' and '.join(repr(made) for _, made in outputs)}")
    return outputs[0][1].build(torch.cat(pieces) for pieces in zip(*(tensors for tensors, _ in outputs), strict=True))


def _redirect(function: Callable[..., Any], in_scope: Callable[..., Any]) -> Callable[..., Any]:
    """A function of PyTorch's that reads or writes a default generator, or inside a scope the scope's."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _C.scope_generator("cpu") is None else in_scope(*args, **kwargs)

    return redirected


def _generator(device: torch.device | int | str) -> torch.Generator:
    place = torch.device("cuda", device) if isinstance(device, int) else device
    generator = _C.scope_generator(str(place))
    assert generator is not None
    return generator


def _get_state(device: torch.device | int | str = "cpu") -> Tensor:
    return _generator(device).get_state()


def _set_state(new_state: Tensor, device: torch.device | int | str = "cpu") -> None:
    _generator(device).set_state(new_state)


def _get_cuda_state(device: torch.device | int | str = "cuda") -> Tensor:
    return _get_state(device)


def _set_cuda_state(new_state: Tensor, device: torch.device | int | str = "cuda") -> None:
    _set_state(new_state, device)


def _seed(seed: int) -> torch.Generator:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _generator("cuda").manual_seed(int(seed))
    return _generator("cpu").manual_seed(int(seed))


# torch.utils.checkpoint looks these up here.
torch.get_rng_state = torch.random.get_rng_state = _redirect(torch.get_rng_state, _get_state)
torch.set_rng_state = torch.random.set_rng_state = _redirect(torch.set_rng_state, _set_state)
torch.manual_seed = torch.random.manual_seed = _redirect(torch.manual_seed, _seed)
torch.cuda.get_rng_state = _redirect(torch.cuda.get_rng_state, _get_cuda_state)
torch.cuda.set_rng_state = _redirect(torch.cuda.set_rng_state, _set_cuda_state)
