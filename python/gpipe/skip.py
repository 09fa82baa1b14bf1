"""Skip connections: one layer stashes a tensor and later layers read it, in the same stage or in others.

    @skippable(stash=["features"])
    class Encode(nn.Module):
        def forward(self, x):
            stash("features", x)
            return x

    @skippable(pop=["features"])
    class Decode(nn.Module):
        def forward(self, x):
            return x + pop("features")

``pop`` takes the tensor out. ``peek`` leaves it for later layers, of which any number may read it; the last one may pop it.
In a pipeline, the tensor goes from the stage that stashes it to the workers that read it, once to each. In a plain
``nn.Sequential``, the calling thread keeps it until a layer pops it. ``None`` may be stashed too.

A ``forward`` may also be a generator, as in torchgpipe: ``yield stash("features", x)``, ``x = yield pop("features")``.
A type checker knows ``isolate`` of a class that derives from :class:`Skippable`: ``class Encode(Skippable)``.
"""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from gpipe import _C
from gpipe.wrapper import layers_in

__all__ = ["Namespace", "Skippable", "peek", "pop", "skippable", "stash", "verify_skippables"]

M = TypeVar("M", bound=nn.Module)


class _NamespaceMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return instance is None or type.__instancecheck__(cls, instance)


@functools.total_ordering
@dataclass(frozen=True, repr=False)
class Namespace(metaclass=_NamespaceMeta):
    """Separates skips that have the same name. Hashable and ordered. A copy, or a pickled one, equals its original. ``None``
    is the namespace of all layers that are not isolated."""

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __lt__(self, other: Namespace | None) -> bool:
        return other is not None and self.id < other.id


# The C++ namespace that stands for a namespace in this process.
_native: dict[Namespace | None, _C.Namespace] = {None: _C.Namespace.shared()}


class Skippable(nn.Module):
    """Base of the classes that ``@skippable`` returns. They derive from the decorated class, ``module_cls``, too."""

    module_cls: type[nn.Module]
    stashable_names: frozenset[str] = frozenset()  # names that each forward stashes
    poppable_names: frozenset[str] = frozenset()  # names that each forward pops
    peekable_names: frozenset[str] = frozenset()  # names that each forward peeks at

    def __getattr__(self, name: str) -> Any:
        # In torchgpipe the attribute `module` holds the layer.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" and "_modules" in self.__dict__:
                return self
            raise

    def add_module(self, name: str, module: nn.Module | None) -> None:
        # nn.Module.add_module refuses names for which hasattr() is true, as it always is for `module`.
        if name == "module":
            self._modules[name] = module
        else:
            super().add_module(name, module)

    def isolate(self: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:
        """Moves the declared names, or ``only`` some, into a namespace, so that a model can use the same class twice. Call it
        before the model becomes a pipeline. Returns the layer. Raises ValueError for a name that it does not declare."""
        assert isinstance(self, Skippable)
        declared = self.stashable_names | self.poppable_names | self.peekable_names
        names = declared if only is None else {only} if isinstance(only, str) else set(only)
        if unknown := names - declared:
            raise ValueError(f"no layer to isolate declares '{min(unknown)}'")
        # A copy.copy() of the layer shares the dict, so replace it.
        self.__dict__["_namespaces"] = {**self.__dict__.get("_namespaces", {}), **dict.fromkeys(names, ns)}
        return self

    def native_key(self, name: str) -> _C.SkipKey:
        namespace: Namespace | None = self.__dict__.get("_namespaces", {}).get(name)
        return _C.SkipKey(_native.get(namespace) or _native.setdefault(namespace, _C.Namespace()), name)

    def declared(self) -> tuple[list[_C.SkipKey], list[_C.SkipKey], list[_C.SkipKey]]:
        """Returns the keys of what the layer stashes, pops and peeks at."""
        names = self.stashable_names, self.poppable_names, self.peekable_names
        stashes, pops, peeks = (list(map(self.native_key, sorted(each))) for each in names)
        return stashes, pops, peeks

    def name_in_messages(self, key: str) -> str:
        """Returns the name that messages show for the module, whose name in the model is ``key``."""
        return key

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"


_thread = threading.local()  # its `forward` is the innermost one of a skippable layer that runs


@dataclass
class _Forward:
    layer: Skippable
    answer: Any = None  # of the last stash(), pop() or peek()

    def drive(self, generator: Generator[Any, Any, Any]) -> Any:
        """Returns the result of a forward that is a generator and yields what stash(), pop() and peek() return."""
        answer = None
        try:
            while True:
                answer = generator.send(answer)
                if answer is not self.answer:
                    raise TypeError(
                        f"the forward of a @skippable layer yielded {answer!r}: yield only stash(...), pop(...) and peek(...)"
                    )
        except StopIteration as stop:
            return stop.value
        finally:
            generator.close()


def _execute(call: Callable[..., Any], name: str, *tensor: Tensor | None) -> Any:
    """Executes a ``stash``, ``pop`` or ``peek`` of the layer whose forward runs."""
    current: _Forward | None = getattr(_thread, "forward", None)
    if current is None:
        raise RuntimeError(
            f"{call.__name__}('{name}') was called outside the forward of a @skippable layer; call it in the forward of a "
            "layer that declares the name"
        )
    declared, done = {
        _C.stash: (current.layer.stashable_names, "stashed"),
        _C.pop: (current.layer.poppable_names, "popped"),
        _C.peek: (current.layer.peekable_names, "peeked at"),
    }[call]
    if name not in declared:
        names = " ".join(f"'{each}'" for each in sorted(declared)) or "none"
        raise RuntimeError(
            f"'{name}' was {done} by a layer that does not declare it; it declares {names}; add the name to "
            f"@skippable({call.__name__}=[...])"
        )
    current.answer = call(current.layer.native_key(name), *tensor)
    return current.answer


def stash(name: str, tensor: Tensor | None) -> Any:
    """Stores a tensor, or ``None``, for the layers that read the name. Call it in the ``forward`` of a layer that declares the
    name in ``@skippable(stash=[...])``. Do not change the tensor in place before its last reader has it. Raises TypeError
    for anything but ``None`` and a plain tensor, and RuntimeError for a name that is not declared, or in a pipeline stashed
    twice."""
    if tensor is not None and type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
        raise TypeError(f"'{name}' must be a torch.Tensor or None to be stashed, but is {type(tensor)}; convert it first")
    return _execute(_C.stash, name, tensor)


def pop(name: str) -> Tensor:
    """Returns the tensor, or ``None``, that an earlier layer stashed under a name, on the device of the layer's stage. Call it
    in the ``forward`` of a layer that declares the name in ``@skippable(pop=[...])``. Raises RuntimeError if the layer does
    not, or if the name was not stashed."""
    popped: Tensor = _execute(_C.pop, name)
    return popped


def peek(name: str) -> Tensor:
    """As :func:`pop`, but leaves the tensor for later layers. The layer declares the name in ``@skippable(peek=[...])``."""
    read: Tensor = _execute(_C.peek, name)
    return read


def _check_names(names: Iterable[str], what: str) -> frozenset[str]:
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a name to {what} must be a non-empty string, but is {name!r}")
    return frozenset(listed)


def _noted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the forward of a layer the one that stash(), pop() and peek() of its thread belong to."""

    @functools.wraps(forward)
    def noted(self: Skippable, *args: Any, **kwargs: Any) -> Any:
        outer, current = getattr(_thread, "forward", None), _Forward(self)
        _thread.forward = current
        try:
            output = forward(self, *args, **kwargs)
            return current.drive(output) if isinstance(output, Generator) else output
        finally:
            _thread.forward = outer

    return noted


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = (), peek: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Declares the names that each forward of a layer class stashes, pops and peeks at; a string is one name. The class
    decorator returns a subclass of the class and of :class:`Skippable`. Raises TypeError for a name that is not a non-empty
    string, and for a class that is decorated already."""
    stashable_names = _check_names(stash, "stash")
    poppable_names = _check_names(pop, "pop")
    peekable_names = _check_names(peek, "peek at")

    def decorate(module_cls: type[M]) -> type[M]:
        if hasattr(module_cls, "module_cls"):
            raise TypeError(f"{module_cls.__name__} is skippable already; declare all its names in one decorator")
        members = {name: getattr(module_cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        members |= {"module_cls": module_cls, "stashable_names": stashable_names}
        members |= {"poppable_names": poppable_names, "peekable_names": peekable_names}
        members["forward"] = _noted(module_cls.forward)
        bases = (module_cls,) if issubclass(module_cls, Skippable) else (Skippable, module_cls)
        return cast(type[M], type(module_cls.__name__, bases, members))

    return decorate


def skippables_in(layer: nn.Module, name: str) -> Iterator[tuple[str, Skippable]]:
    """Yields a layer's skippable modules, each with its name in messages. ``name`` is the layer's."""
    for path, module in layer.named_modules():
        if isinstance(module, Skippable):
            yield module.name_in_messages(f"{name}.{path}" if path else name), module


def verify_skippables(module: nn.Sequential) -> None:
    """Raises TypeError, with every fault, unless each name that layers of a model stash is read later, and each name that
    they read was stashed earlier and not popped. Skippable modules nested in layers count."""
    declarations = [
        (index, path, *skip.declared())
        for index, (name, layer) in enumerate(layers_in(module).items())
        for path, skip in skippables_in(layer, name)
    ]
    try:
        _C.check_skips(declarations)
    except ValueError as error:
        raise TypeError(str(error)) from None
