"""Tensors almost without memory in the place of a model's, for runs that show sizes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe.exported.exporter import OF_MODULES, unchanged
from gpipe.wrapper import ConvertedLayer


def is_on_meta(module: nn.Module) -> bool:
    """Returns whether a model has tensors on the ``meta`` device."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def pretend(module: nn.Module, dtype: torch.dtype | None = None, most: float = 1 << 16) -> None:
    """Gives a model's parameters and buffers of floating point a dtype; without one, those on the ``meta`` device the CPU, and
    those of at most ``most`` elements values and memory."""
    made: dict[int, Tensor] = {}

    def other(tensor: Tensor) -> Tensor:
        if dtype is None and tensor.numel() <= most:
            found = real_like(tensor.detach())
        else:
            one = torch.zeros((), dtype=dtype or tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
            found = one.expand(tensor.shape)
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found

    for each in module.modules():
        for tensors in _tables(each):
            for name, tensor in tensors.items():
                if tensor is not None and (tensor.is_floating_point() if dtype else tensor.is_meta):
                    if id(tensor) not in made:
                        made[id(tensor)] = other(tensor)
                    tensors[name] = made[id(tensor)]


def _tables(module: nn.Module) -> Any:
    return () if isinstance(module, torch.jit.ScriptModule) else (module._parameters, module._buffers)


def real_like(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU in the place of one on the ``meta`` device: random numbers, or zeros of integers."""
    if not tensor.is_meta:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    # As models begin, with weights around 0 and scales around 1, so that comparisons round as usual.
    made = (torch.rand(tensor.shape, dtype=tensor.dtype, device="cpu") - 0.5) / 15 + (tensor.dim() < 2)
    return made.requires_grad_(tensor.requires_grad)


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


@contextmanager
def shapes_only(module: nn.Module) -> Iterator[None]:
    """Makes modules with parameters and without submodules return random numbers for a block, without computing."""
    with ExitStack() as stack:
        for each in module.modules():
            if not isinstance(each, torch.jit.ScriptModule) and not each._modules and [*each.parameters()]:
                stack.enter_context(patch.object(each, "forward", partial(_call, each, each.forward)))
        yield


def _call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with unchanged([module]):
            for tensors in _tables(module):
                tensors.update({name: _meta_like(each) for name, each in tensors.items() if each is not None})
            given = tree_map_only(Tensor, _meta_like, (args, kwargs))
            return tree_map_only(Tensor, lambda each: real_like(each).clone(), forward(*given[0], **given[1]))
    except (NotImplementedError, RuntimeError):  # it reads values
        return forward(*args, **kwargs)


def refuse_loose(module: nn.Module, name: str = "") -> None:
    """Raises ValueError if a module has a tensor on the ``meta`` device that is neither a parameter nor a buffer."""
    for path, each in module.named_modules(prefix=name):
        for attribute, value in vars(each).items() if not isinstance(each, (ConvertedLayer, torch.jit.ScriptModule)) else ():
            leaves = tree_leaves(value) if attribute not in OF_MODULES else ()
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                raise ValueError(
                    f"'{attribute}' of '{path}' ({type(each).__name__}) is a tensor on the meta device, which nothing gives a value; make "
                    "it a buffer, or make the module on the CPU"
                )
