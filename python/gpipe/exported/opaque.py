"""Keeps modules whole that torch.export cannot export.

While a model is exported, each call of such a module is one operator, which only tells the shapes of the outputs. The
layer calls the module itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from gpipe.exported.tensors import is_inside
from gpipe.exported.trial import unchanged

__all__ = ["OPERATOR", "kept_whole", "run_whole", "whole_modules"]

OPERATOR = "gpipe_export::whole"


@functools.cache
def _operator() -> Any:
    torch.library.define(OPERATOR, "(Tensor[] inputs, str arguments, str outputs) -> Tensor[]")
    torch.library.register_fake(OPERATOR, _fake)
    return torch.ops.gpipe_export.whole.default


def _fake(inputs: list[Tensor], arguments: str, outputs: str) -> list[Tensor]:
    batch = inputs[0].shape[0]
    return [
        inputs[0].new_empty((batch, *rest), dtype=getattr(torch, dtype)) for dtype, rest in json.loads(outputs)
    ]


def whole_modules(module: nn.Module, classes: Iterable[type[nn.Module]]) -> dict[str, nn.Module]:
    """Returns the submodules of some classes by path, without those inside another.

    Raises:
        TypeError: for a class that is not a subclass of ``nn.Module``.
        ValueError: for a class that no submodule has.
    """
    kinds = (classes,) if isinstance(classes, type) else tuple(classes)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"opaque must be a list of subclasses of nn.Module, but has {kind!r}")
    found: dict[str, nn.Module] = {}
    for path, each in module.named_modules():
        if isinstance(each, kinds) and path and not is_inside(path, found):
            found[path] = each
    for kind in kinds:
        if not any(isinstance(each, kind) for each in found.values()):
            raise ValueError(f"opaque has {kind.__name__}, but no submodule of the model is one")
    return found


@contextmanager
def kept_whole(
    module: nn.Module, whole: Iterable[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Makes each call of some modules one operator for a block. Runs the model once before, to learn their outputs."""
    whole = list(whole)
    if not whole:
        yield
        return
    outputs = _outputs(module, whole, args, kwargs)
    for each in whole:
        each.__dict__["forward"] = functools.partial(_call, iter(outputs[each]), type(each).__name__)
    try:
        yield
    finally:
        for each in whole:
            del each.__dict__["forward"]


def _outputs(
    module: nn.Module, whole: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[nn.Module, list[Any]]:
    """Returns what each module returns, call by call."""
    found: dict[nn.Module, list[Any]] = {each: [] for each in whole}

    def record(each: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        batch = [leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        for leaf in tree_leaves(output):
            if not batch or not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch[0]:
                name = type(each).__name__
                raise ValueError(
                    f"an opaque module must get and return tensors with the batch as dimension 0, but {name} does not"
                )
        found[each].append(output)

    hooks = [each.register_forward_hook(record, with_kwargs=True) for each in whole]
    try:
        with unchanged(module):
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _call(outputs: Iterator[Any], name: str, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
    results, result_spec = tree_flatten(next(outputs))
    shapes = [(str(leaf.dtype).removeprefix("torch."), list(leaf.shape[1:])) for leaf in results]
    try:
        arguments = json.dumps([treespec_dumps(spec), constants])
    except (TypeError, NotImplementedError):
        raise ValueError(f"an opaque module must get tensors, numbers, texts and None, but {name} does not") from None
    return tree_unflatten(_operator()(tensors, arguments, json.dumps(shapes)), result_spec)


@functools.cache
def _parsed(arguments: str) -> tuple[TreeSpec, list[Any]]:
    spec, constants = json.loads(arguments)
    return treespec_loads(spec), constants


def run_whole(module: nn.Module, arguments: str, inputs: list[Tensor]) -> list[Any]:
    """Calls a module as the operator was called. Returns its flattened output."""
    spec, constants = _parsed(arguments)
    tensors = iter(inputs)
    leaves = [next(tensors) if constant is None else constant[0] for constant in constants]
    args, kwargs = tree_unflatten(leaves, spec)
    return tree_flatten(module(*args, **kwargs))[0]
