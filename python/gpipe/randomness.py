"""Random numbers that do not depend on where a model is cut, and the result of a pipeline without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.checks import checks_arguments
from gpipe.structure import take_apart


class RandomScope:
    """A context manager in which this thread's draws without an explicit generator, such as of dropout and ``torch.rand``,
    come from a stream that depends only on a mini-batch's seed, of 64 bits, and the indices of a layer and a micro-batch. A
    pipeline enters a scope around each layer of each micro-batch, in the forward and in the recompute.

        seed = RandomScope.draw_seed()
        with RandomScope(seed, layer=2, micro_batch=0):
            y = dropout(x)

    Inside a scope, ``torch.get_rng_state``, ``torch.set_rng_state`` and ``torch.manual_seed`` apply to the scope's
    stream, so that ``torch.utils.checkpoint`` in a layer repeats the layer's draws. Scopes nest, and belong to a thread.
    """

    @checks_arguments
    def __init__(self, seed: int, layer: int, micro_batch: int) -> None:
        redirect_generators()
        self._arguments = seed % 2**64, layer, micro_batch
        self._scopes: list[_C.RandomScope] = []

    @staticmethod
    def draw_seed() -> int:
        """Draws the seed of a mini-batch, of 64 bits, from the default generator."""
        return _C.draw_seed()

    def __enter__(self) -> RandomScope:
        self._scopes.append(_C.RandomScope(*self._arguments))
        return self

    def __exit__(self, *error: object) -> None:
        self._scopes.pop()  # ends it


@checks_arguments
def run_unpartitioned(module: nn.Sequential, input: Any, *, chunks: int = 1) -> Any:
    """Runs an unpartitioned model micro-batch by micro-batch on the calling thread, with the random numbers and result of a
    pipeline with the same default generator. Arguments and errors as for :class:`gpipe.GPipe` and its ``forward``. Raises
    RuntimeError if the last layer returned objects of different structure for two micro-batches."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential, but is {type(module)}")
    inputs, structure = take_apart(input)
    if not inputs:
        raise ValueError("the input holds no tensors; a pipeline needs at least one")
    trains_batch_norm = module.training and any(name.endswith("num_batches_tracked") for name, _ in module.named_buffers())
    sizes = _C.micro_batch_sizes(len(inputs[0]), chunks, 0, 2 if trains_batch_norm else 1)
    seed = RandomScope.draw_seed()
    outputs = []
    for micro_batch, parts in enumerate(zip(*(tensor.split_with_sizes(sizes) for tensor in inputs), strict=True)):
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
