"""The decorator of layers that stash and pop, and the check that the skips of a model match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch import nn

from gpipe import _C
from gpipe.skip.commands import run_forward
from gpipe.skip.namespace import Namespace, native_keys, native_namespace

M = TypeVar("M", bound=nn.Module)


class Skippable(nn.Module):
    """Base of the classes that ``@skippable`` returns. They derive from the decorated class too.

    Attributes:
        module_cls: the decorated class.
        stashable_names: names that each forward stashes.
        poppable_names: names that each forward pops.
    """

    module_cls: type[nn.Module]
    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()

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

    def namespace_of(self, name: str) -> Namespace | None:
        """Returns the namespace of a declared name."""
        namespaces: dict[str, Namespace] = self.__dict__.get("_namespaces", {})
        return namespaces.get(name)

    def isolate(self: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:
        """Moves the declared names into a namespace, so that the same class can be used twice in one model. Call it
        before the model becomes a pipeline.

        Args:
            ns: the namespace.
            only: the names to move; all if ``None``.

        Returns:
            The layer.

        Raises:
            ValueError: if ``only`` has a name that the layer does not declare.
        """
        assert isinstance(self, Skippable)
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else {only} if isinstance(only, str) else set(only)
        if unknown := names - declared:
            raise ValueError(f"no layer to isolate declares '{min(unknown)}'")
        # A copy.copy() of the layer shares the dict, so replace it.
        namespaces = dict(self.__dict__.get("_namespaces", {}))
        namespaces.update(dict.fromkeys(names, ns))
        self.__dict__["_namespaces"] = namespaces
        return self

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Returns the names that the layer stashes, each with its namespace."""
        return ((self.namespace_of(name), name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Returns the names that the layer pops, each with its namespace."""
        return ((self.namespace_of(name), name) for name in sorted(self.poppable_names))

    def name_in_messages(self, key: str) -> str:
        """Returns the name that messages show for the module. ``key`` is its name in the model."""
        return key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        stashable, poppable = (
            {name: native_namespace(ns) for ns, name in keys} for keys in (self.stashable(), self.poppable())
        )
        return run_forward(stashable, poppable, lambda: forward(*args, **kwargs))

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"


def _check_names(names: Iterable[str], what: str) -> frozenset[str]:
    if isinstance(names, str):
        names = [names]
    listed = list(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a name to {what} must be a non-empty string, but is {name!r}")
    return frozenset(listed)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declares the names that each forward of a layer class stashes and pops.

    Args:
        stash: names of tensors for later layers; a string is one name.
        pop: names of tensors from earlier layers; a string is one name.

    Returns:
        A class decorator. It returns a subclass of the decorated class and of :class:`Skippable`, with the same
        parameters and attributes.

    Raises:
        TypeError: if a name is not a non-empty string, or if the class is decorated already.
    """
    stashable_names = _check_names(stash, "stash")
    poppable_names = _check_names(pop, "pop")

    def decorate(module_cls: type[M]) -> type[M]:
        if issubclass(module_cls, Skippable):
            raise TypeError(f"{module_cls.__name__} is skippable already; declare all its names in one decorator")
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
    """Yields the skippable modules among a layer and its submodules, each with its name in messages. ``name`` is the
    layer's."""
    for path, module in layer.named_modules():
        if isinstance(module, Skippable):
            yield module.name_in_messages(f"{name}.{path}" if path else name), module


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that each name that the layers of a model stash is popped later, and each name that they pop is stashed
    earlier. Skippable modules nested in layers count.

    Args:
        module: the model.

    Raises:
        TypeError: if any do not match. The message lists every fault with layer and name.
    """
    declarations = [
        (index, path, native_keys(skip.stashable()), native_keys(skip.poppable()))
        for index, (name, layer) in enumerate(module.named_children())
        for path, skip in skippables_in(layer, name)
    ]
    try:
        _C.check_skips(declarations)
    except ValueError as error:
        raise TypeError(str(error)) from None
