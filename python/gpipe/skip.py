"""Skip connections: a layer stashes a tensor, a later one pops it, whatever stages they are in.

    @skippable(stash=["features"])
    class Encode(nn.Module):
        def forward(self, x):
            stash("features", x)
            return x

    @skippable(pop=["features"])
    class Decode(nn.Module):
        def forward(self, x):
            return x + pop("features")

Inside a pipeline a skip goes straight from the stage that stashes to the stage that pops; in a plain ``nn.Sequential``
the same layers hand it over on the calling thread. Any dtype may be stashed, and ``None``.

A ``forward`` may also be a generator that yields what ``stash`` and ``pop`` return, as in torchgpipe:
``yield stash("features", x)``, ``features = yield pop("features")``.
"""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn

from gpipe import _C

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]

M = TypeVar("M", bound=nn.Module)


class _NamespaceMeta(type):
    # None is the namespace of layers that were never isolated.
    def __instancecheck__(cls, instance: object) -> bool:
        return instance is None or type.__instancecheck__(cls, instance)


@functools.total_ordering
class Namespace(metaclass=_NamespaceMeta):
    """Keeps equal names of skips apart. Hashable and ordered; a copy, also one that was pickled, equals the original.

    ``None`` counts as a namespace too: that of layers which were never isolated.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return type(other) is Namespace and self.id == other.id

    def __lt__(self, other: Namespace | None) -> bool:
        return other is not None and self.id < other.id


# What stands for each namespace among C++ layers, in this process.
_native: dict[Namespace | None, _C.Namespace] = {None: _C.Namespace.shared()}


def native_namespace(namespace: Namespace | None) -> _C.Namespace:
    """The same namespace for C++ layers, in this process."""
    return _native.get(namespace) or _native.setdefault(namespace, _C.Namespace())


def native_keys(keys: Iterable[tuple[Namespace | None, str]]) -> list[tuple[_C.Namespace, str]]:
    """Skips by the identities that C++ knows them by."""
    return [(native_namespace(namespace), name) for namespace, name in keys]


class _Stash(NamedTuple):
    name: str
    tensor: Tensor | None


class _Pop(NamedTuple):
    name: str


class _Call:
    """One forward of a skippable layer: what it has stashed and popped so far."""

    __slots__ = ("layer", "generates", "stashed", "popped")

    def __init__(self, layer: Skippable) -> None:
        self.layer = layer
        self.generates = False  # then stash() and pop() only make commands
        self.stashed: set[str] = set()
        self.popped: set[str] = set()

    def run(self, command: _Stash | _Pop) -> Tensor | None:
        name = command.name
        if isinstance(command, _Stash):
            if name not in self.layer.stashable_names:
                raise RuntimeError(f"'{name}' has not been declared as stashable")
            if name in self.stashed:
                raise RuntimeError(f"'{name}' was stashed twice in one forward")
            _C.stash(native_namespace(self.layer.namespace_of(name)), name, command.tensor)
            self.stashed.add(name)
            return None
        if name not in self.layer.poppable_names:
            raise RuntimeError(f"'{name}' has not been declared as poppable")
        tensor: Tensor | None = _C.pop(native_namespace(self.layer.namespace_of(name)), name)
        self.popped.add(name)
        return tensor

    def drive(self, generator: Generator[Any, Any, Any]) -> Any:
        self.generates = True
        answer: Tensor | None = None
        try:
            while True:
                command = generator.send(answer)
                if not isinstance(command, (_Stash, _Pop)):
                    raise TypeError(f"{command!r} is not a command from @skippable")
                answer = self.run(command)
        except StopIteration as stop:
            return stop.value
        finally:
            generator.close()

    def check(self) -> None:
        for names, used, what in (
            (self.layer.stashable_names, self.stashed, "stashed"),
            (self.layer.poppable_names, self.popped, "popped"),
        ):
            if len(used) < len(names):
                missing = ", ".join(f"'{name}'" for name in sorted(names - used))
                raise RuntimeError(f"{missing} must be {what} but have not")


_thread = threading.local()


def _run(command: _Stash | _Pop) -> Any:
    call: _Call | None = getattr(_thread, "call", None)
    if call is None:
        what = "stashed" if isinstance(command, _Stash) else "popped"
        raise RuntimeError(f"'{command.name}' cannot be {what} here: no forward of a @skippable layer is running")
    return command if call.generates else call.run(command)


def stash(name: str, tensor: Tensor | None) -> Any:
    """Leaves a tensor, or ``None``, for the layer that pops the name.

    To be called in the ``forward`` of a layer that declares the name; in a generator, ``yield stash(name, tensor)``.

    Raises:
        TypeError: for anything else than a tensor or ``None``.
        RuntimeError: when the layer does not declare the name so, or stashes it twice.
    """
    if tensor is not None and not isinstance(tensor, Tensor):
        raise TypeError(f"'{name}' must be a Tensor or None to be stashed, but is {type(tensor)}")
    return _run(_Stash(name, tensor))


def pop(name: str) -> Any:
    """Takes the tensor, or ``None``, that an earlier layer has stashed by that name.

    To be called in the ``forward`` of a layer that declares the name; in a generator, ``x = yield pop(name)``.

    Raises:
        RuntimeError: when the layer does not declare the name so, or when nothing was stashed.
    """
    return _run(_Pop(name))


class Skippable(nn.Module):
    """What ``@skippable`` makes of a class: a subclass of it and of this."""

    module_cls: type[nn.Module]
    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        # torchgpipe has the layer in an attribute `module`.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" and "_modules" in self.__dict__:
                return self
            raise

    # PyTorch asks `hasattr` whether a name is taken.

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if name == "module":
            self._modules[name] = module
        else:
            super().add_module(name, module)

    def namespace_of(self, name: str) -> Namespace | None:
        """The namespace that a declared name is in."""
        namespaces: dict[str, Namespace] = self.__dict__.get("_namespaces", {})
        return namespaces.get(name)

    def isolate(self: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:
        """Moves the declared names, or ``only`` some, into a namespace, so that the same class can be used twice in one
        model. To be called before the model becomes a pipeline. Returns the layer.

        Raises:
            ValueError: when ``only`` has a name that the layer does not declare.
        """
        assert isinstance(self, Skippable)
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else {only} if isinstance(only, str) else set(only)
        if unknown := names - declared:
            missing = ", ".join(f"'{name}'" for name in sorted(unknown))
            raise ValueError(f"cannot isolate what is not declared: {missing}")
        # Not the same dict: a copy.copy() of the layer may share it.
        namespaces = dict(self.__dict__.get("_namespaces", {}))
        namespaces.update(dict.fromkeys(names, ns))
        self.__dict__["_namespaces"] = namespaces
        return self

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """The names to stash, each with its namespace."""
        return ((self.namespace_of(name), name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        """The names to pop, each with its namespace."""
        return ((self.namespace_of(name), name) for name in sorted(self.poppable_names))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self)
        outer = getattr(_thread, "call", None)
        _thread.call = call
        try:
            output = super().forward(*args, **kwargs)
            if isinstance(output, Generator):
                output = call.drive(output)
        finally:
            _thread.call = outer
        call.check()
        return output

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"


def _names(names: Iterable[str], what: str) -> frozenset[str]:
    if isinstance(names, str):
        names = [names]
    listed = list(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a name to {what} must be a string that is not empty, but is {name!r}")
    return frozenset(listed)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declares which names the layers of a class stash and which they pop, in every forward.

    Args:
        stash: names of tensors to leave for later layers; a bare string is one name.
        pop: names of tensors to take from earlier layers.

    Returns:
        A class decorator. The class that it returns is a subclass of the one given, with the same parameters and
        attributes, and of :class:`Skippable`.
    """
    stashable_names = _names(stash, "stash")
    poppable_names = _names(pop, "pop")

    def decorate(module_cls: type[M]) -> type[M]:
        if issubclass(module_cls, Skippable):
            raise TypeError(f"{module_cls.__name__} is skippable already: give one decorator all names")
        members = {
            "__module__": module_cls.__module__,
            "__qualname__": module_cls.__qualname__,
            "__doc__": module_cls.__doc__,
            "module_cls": module_cls,
            "stashable_names": stashable_names,
            "poppable_names": poppable_names,
        }
        return cast(type[M], type(module_cls.__name__, (Skippable, module_cls), members))

    return decorate


def skippables_in(layer: nn.Module, name: str) -> Iterator[tuple[str, Skippable]]:
    """A layer and what is nested in it, as far as it is skippable, each with its name."""
    for path, module in layer.named_modules():
        if isinstance(module, Skippable):
            yield (f"{name}.{path}" if path else name), module


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every name that a model's layers stash is popped later, and the other way round. Skippable layers
    that are nested in others count.

    Raises:
        TypeError: which lists every fault, each with layer and name.
    """
    stashed: dict[tuple[Namespace | None, str], str] = {}
    popped: set[tuple[Namespace | None, str]] = set()
    too_early: dict[tuple[Namespace | None, str], str] = {}
    faults: list[str] = []
    for child, layer in module.named_children():
        for path, skip in skippables_in(layer, child):
            for name in sorted(skip.stashable_names & skip.poppable_names):
                faults.append(f"'{path}' declared '{name}' both as stashable and as poppable")
            for key in skip.stashable():
                if key in stashed:
                    faults.append(f"'{path}' redeclared '{key[1]}' as stashable but not isolated by namespace")
                    continue
                stashed[key] = path
                # A layer that pops what one nested in it stashes decides on the order itself.
                if key in too_early and path.startswith(f"{too_early[key]}."):
                    del too_early[key]
            for key in skip.poppable():
                if key in popped:
                    faults.append(f"'{path}' redeclared '{key[1]}' as poppable but not isolated by namespace")
                    continue
                popped.add(key)
                if key not in stashed:
                    too_early[key] = path
    for key, path in too_early.items():
        faults.append(f"'{path}' declared '{key[1]}' as poppable but it was not stashed")
    for key in stashed:
        if key not in popped:
            faults.append(f"no module declared '{key[1]}' as poppable but stashed")
    if faults:
        bullets = "\n".join(f"* {fault}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{bullets}")
