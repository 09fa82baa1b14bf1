"""Random numbers that do not depend on where a model is cut. Refuses recomputes that would draw from generators of Python or
NumPy."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

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


def _generator(device: torch.device | int | str) -> torch.Generator:
    generator = _C.scope_generator(f"cuda:{device}" if isinstance(device, int) else str(device))
    assert generator is not None
    return generator


def _seed(seed: int) -> torch.Generator:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _generator("cuda").manual_seed(int(seed))
    return _generator("cpu").manual_seed(int(seed))


@functools.cache
def redirect_generators() -> None:
    """Makes PyTorch's functions for default generators apply to the scope's generators inside a scope. Called before the first
    scope: an import of the package changes nothing. torch.utils.checkpoint looks the functions up under these names."""

    def redirect(name: str, in_scope: Callable[..., Any], *modules: Any) -> None:
        function = getattr(modules[0], name)

        @functools.wraps(function)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if _C.scope_generator("cpu") is None else in_scope(*args, **kwargs)

        for module in modules:
            setattr(module, name, redirected)

    redirect("manual_seed", _seed, torch, torch.random)
    redirect("get_rng_state", lambda: _generator("cpu").get_state(), torch, torch.random)
    redirect("set_rng_state", lambda new_state: _generator("cpu").set_state(new_state), torch, torch.random)
    redirect("get_rng_state", lambda device="cuda": _generator(device).get_state(), torch.cuda)
    redirect("set_rng_state", lambda new_state, device="cuda": _generator(device).set_state(new_state), torch.cuda)


_turn = threading.RLock()


@contextmanager
def without_turn() -> Iterator[None]:
    """Releases the lock for a block, if this thread holds it: inside a layer, another pipeline may need the lock."""
    held = _turn._is_owned()  # type: ignore[attr-defined]
    if held:
        _turn.release()
    try:
        yield
    finally:
        if held:
            _turn.acquire()


class GeneratorState:
    """The state of both global generators, and of others."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self._states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
        if numpy := sys.modules.get("numpy.random"):  # None until something imports NumPy
            self._states.append((numpy.set_state, numpy.get_state()))
        for each in others:
            if isinstance(each, random.Random):
                self._states.append((each.setstate, each.getstate()))
            elif hasattr(each, "bit_generator"):
                self._states.append((functools.partial(setattr, each.bit_generator, "state"), each.bit_generator.state))
            else:
                self._states.append((each.set_state, each.get_state()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratorState) and self._comparable() == other._comparable()

    def of_last(self) -> Any:
        """Returns the state of the last generator, which can be compared."""
        return self._comparable()[-1]

    def _comparable(self) -> list[Any]:
        return [_without_arrays(state) for _, state in self._states]

    def restore(self) -> None:
        for restore, state in self._states:
            restore(state)


def is_generator(value: object) -> bool:
    """Returns whether a value is a generator of Python, NumPy or PyTorch, whose state :class:`GeneratorState` can hold."""
    numpy = sys.modules.get("numpy.random")
    return isinstance(value, (random.Random, torch.Generator, *((numpy.Generator, numpy.RandomState) if numpy else ())))


def _without_arrays(state: Any) -> Any:
    """Replaces arrays and tensors in a state by their bytes, which can be compared."""
    if isinstance(state, torch.Tensor):
        return bytes(state.tolist())
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple) and isinstance(state[0], str):  # of numpy.random
        return tuple(map(_without_arrays, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


class Draws:
    """Refuses a recompute of a stage that draws. Used by one thread at a time.

    All stages and threads share the global generators. So a stage whose forward has seen them change is only suspected. The
    recompute looks again, layer by layer, while no other suspected stage runs.
    """

    def __init__(self, stage: nn.Module) -> None:
        values = (value for each in stage.modules() for value in vars(each).values())
        # Attributes of layers. C++ refuses those of PyTorch.
        self._generators = [value for value in values if is_generator(value) and not isinstance(value, torch.Generator)]
        self._is_suspected = True

    def __call__(self, run: Callable[[Any, Callable[[str], None]], Any], input: Any) -> Any:
        """Calls ``run(input, f)``, which runs the layers and calls ``f(name)`` after each. Raises RuntimeError if a layer whose
        forward has drawn draws in its recompute."""
        if not _C.is_checkpointing() and not (_C.is_recomputing() and _C.saved_for_recompute()):
            return run(input, lambda _: None)

        def check(name: str) -> None:
            if GeneratorState(self._generators) != state:
                raise RuntimeError(
                    f"layer '{name}' draws from a generator of Python or NumPy, so its forward cannot be recomputed; draw "
                    "with torch, or use checkpoint='never' (if only another thread draws, give it a generator of its own)"
                )

        with _turn if self._is_suspected else nullcontext():
            state = GeneratorState(self._generators)
            output = run(input, check if _C.is_recomputing() else lambda _: None)
            self._is_suspected = GeneratorState(self._generators) != state
        if self._is_suspected:
            _C.save_for_recompute(True)
        return output
