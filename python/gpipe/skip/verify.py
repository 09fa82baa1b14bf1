"""Checks that the skips of a model match."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gpipe import _C
from gpipe.skip.layer import Skippable
from gpipe.skip.namespace import native_keys


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
