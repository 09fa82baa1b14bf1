"""``stash`` and ``pop``, and the forward of a skippable layer that they belong to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe import _C

Names = Mapping[str, _C.Namespace]


class _Stash(NamedTuple):
    name: str
    tensor: Tensor | None


class _Pop(NamedTuple):
    name: str


class _Forward:
    """One forward of a skippable layer, with the names that it declares."""

    def __init__(self, stashable: Names, poppable: Names) -> None:
        self.stashable = stashable
        self.poppable = poppable
        self.generates = False  # whether the forward is a generator, which yields its commands

    def execute(self, command: _Stash | _Pop) -> Any:
        """Executes a command. Returns the popped tensor."""
        name = command.name
        if isinstance(command, _Pop):
            if name not in self.poppable:
                raise _undeclared(name, "popped", self.poppable)
            return _C.pop(self.poppable[name], name)
        if name not in self.stashable:
            raise _undeclared(name, "stashed", self.stashable)
        return _C.stash(self.stashable[name], name, command.tensor)

    def drive(self, generator: Generator[Any, Any, Any]) -> Any:
        """Executes the commands that a generator yields. Returns the generator's result."""
        self.generates = True
        answer: Tensor | None = None
        try:
            while True:
                command = generator.send(answer)
                if not isinstance(command, (_Stash, _Pop)):
                    raise TypeError(
                        f"the forward of a @skippable layer yielded {command!r}: yield only stash(...) and pop(...)"
                    )
                answer = self.execute(command)
        except StopIteration as stop:
            return stop.value
        finally:
            generator.close()


def _undeclared(name: str, what: str, declared: Names) -> RuntimeError:
    names = " ".join(f"'{each}'" for each in sorted(declared)) or "none"
    return RuntimeError(f"'{name}' was {what} by a layer that does not declare it; it declares {names}")


_thread = threading.local()


def run_forward(stashable: Names, poppable: Names, forward: Callable[[], Any]) -> Any:
    """Calls ``forward``, which is the forward of a layer that declares these names, and executes its commands.

    Raises:
        RuntimeError: if it stashes or pops a name that the layer does not declare.
        TypeError: if it is a generator and yields anything but commands.
    """
    current = _Forward(stashable, poppable)
    outer = getattr(_thread, "forward", None)
    _thread.forward = current
    try:
        output = forward()
        return current.drive(output) if isinstance(output, Generator) else output
    finally:
        _thread.forward = outer


def _run(command: _Stash | _Pop) -> Any:
    current: _Forward | None = getattr(_thread, "forward", None)
    if current is None:
        what = "stash" if isinstance(command, _Stash) else "pop"
        raise RuntimeError(
            f"{what}('{command.name}') was called outside the forward of a @skippable layer; call it in the forward of "
            "a layer that declares the name"
        )
    return command if current.generates else current.execute(command)


def stash(name: str, tensor: Tensor | None) -> Any:
    """Stores a tensor, or ``None``, for the layer that pops the name.

    Call it in the ``forward`` of a layer that declares the name. In a generator, write ``yield stash(name, tensor)``.

    Args:
        name: a name that the layer declares in ``@skippable(stash=[...])``.
        tensor: the tensor to store. It must not be changed in place before it is popped in another stage.

    Raises:
        TypeError: if ``tensor`` is neither ``None`` nor a tensor, or is of a subclass of Tensor.
        RuntimeError: if the layer does not declare the name as one that it stashes; in a pipeline, if it stashes it twice.
    """
    if tensor is not None and type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
        raise TypeError(f"'{name}' must be a torch.Tensor or None to be stashed, but is {type(tensor)}; convert it first")
    return _run(_Stash(name, tensor))


def pop(name: str) -> Any:
    """Takes the tensor, or ``None``, that an earlier layer stashed under a name.

    Call it in the ``forward`` of a layer that declares the name. In a generator, write ``x = yield pop(name)``.

    Args:
        name: a name that the layer declares in ``@skippable(pop=[...])``.

    Returns:
        The stashed tensor, on the device of the layer's stage.

    Raises:
        RuntimeError: if the layer does not declare the name as one that it pops, or if it was not stashed.
    """
    return _run(_Pop(name))
