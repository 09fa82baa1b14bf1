"""Random numbers that do not depend on where a model is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpipe import _C


@contextmanager
def random_scope(seed: int, layer: int, micro_batch: int) -> Iterator[None]:
    """Makes this thread's draws without an explicit generator, such as of dropout and ``torch.rand``, come from a stream that
    depends only on a mini-batch's seed, of 64 bits, and the indices of a layer and a micro-batch, for a block. A pipeline does
    this around each layer of each micro-batch, in the forward and in the recompute.

    In the block, ``torch.get_rng_state``, ``torch.set_rng_state`` and ``torch.manual_seed`` apply to that stream, so that
    ``torch.utils.checkpoint`` in a layer repeats the layer's draws. Scopes nest, and belong to a thread."""
    redirect_generators()
    scope = _C.RandomScope(seed % 2**64, layer, micro_batch)
    try:
        yield
    finally:
        del scope  # ends it


def _redirect(function: Callable[..., Any], in_scope: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ``in_scope`` inside a scope, and ``function`` elsewhere."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _C.scope_generator("cpu") is None else in_scope(*args, **kwargs)

    return redirected


def _generator(device: torch.device | int | str) -> torch.Generator:
    place = torch.device("cuda", device) if isinstance(device, int) else device
    generator = _C.scope_generator(str(place))
    assert generator is not None
    return generator


def _get_state(device: torch.device | int | str = "cuda") -> Tensor:
    return _generator(device).get_state()


def _set_state(new_state: Tensor, device: torch.device | int | str = "cuda") -> None:
    _generator(device).set_state(new_state)


def _seed(seed: int) -> torch.Generator:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _generator("cuda").manual_seed(int(seed))
    return _generator("cpu").manual_seed(int(seed))


@functools.cache
def redirect_generators() -> None:
    """Makes PyTorch's functions for default generators apply to the scope's generators inside a scope. Called before the first
    scope: an import of the package changes nothing. torch.utils.checkpoint looks the functions up under these names."""
    cpu_get, cpu_set = functools.partial(_get_state, "cpu"), functools.partial(_set_state, device="cpu")
    torch.get_rng_state = torch.random.get_rng_state = _redirect(torch.get_rng_state, cpu_get)
    torch.set_rng_state = torch.random.set_rng_state = _redirect(torch.set_rng_state, cpu_set)
    torch.manual_seed = torch.random.manual_seed = _redirect(torch.manual_seed, _seed)
    torch.cuda.get_rng_state = _redirect(torch.cuda.get_rng_state, _get_state)
    torch.cuda.set_rng_state = _redirect(torch.cuda.set_rng_state, _set_state)
