"""Models that can be cut between any two layers. The layers are implemented in C++ and use skip connections.

    model = gpipe.models.unet(out_channels=1)
    pipe = gpipe.GPipe(model, gpipe.balance.balance_by_time(2, model, sample), chunks=4)

Their states have the keys and shapes of the C++ models. ``copy.deepcopy`` copies a model. A model cannot be pickled;
save its ``state_dict()``.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.checks import check_flag, check_number, check_text, check_whole
from gpipe.skip import Namespace, Skippable
from gpipe.skip.namespace import native_namespace

__all__ = ["NativeLayer", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "unet"]


# Attributes that the constructor of a copy sets.
_CONSTRUCTED = ("_native", "_namespaces", "_tensors", "_places", "_parameters", "_buffers", "_modules")


class NativeLayer(Skippable):
    """A C++ layer as a module. It shares its parameters and buffers with the layer."""

    def __init__(self, native: _C.NativeLayer, namespaces: dict[str, Namespace]) -> None:
        super().__init__()
        self._native = native
        stashes, pops = native.skips()
        self.stashable_names = frozenset(name for _, name in stashes)
        self.poppable_names = frozenset(name for _, name in pops)
        self._tensors: list[Tensor] = []
        self._places: list[tuple[str, dict[str, Any], str]] = []  # for each: path, dict that holds it, key
        for path, tensor, is_parameter in native.tensors():
            *parents, name = path.split(".")
            owner: nn.Module = self
            for parent in parents:
                if parent not in owner._modules:
                    owner.add_module(parent, nn.Module())
                owner = owner.get_submodule(parent)
            if is_parameter:
                owner.register_parameter(name, tensor)
            else:
                owner.register_buffer(name, tensor)
            self._tensors.append(tensor)
            self._places.append((path, owner._parameters if is_parameter else owner._buffers, name))
        self._namespaces = namespaces
        self._pass_namespaces()

    def forward(self, input: Any) -> Any:
        for tensor, (path, table, name) in zip(self._tensors, self._places):
            if table.get(name) is not tensor:
                raise RuntimeError(
                    f"{path} of the C++ layer '{self._native.name}' was replaced, but the layer still has the old "
                    "tensor; copy into it instead: load_state_dict(..., assign=False), or parameter.data.copy_(...)"
                )
        self._native.train(self.training)
        return self._native.forward(input)

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> NativeLayer:
        super().isolate(ns, only=only)
        self._pass_namespaces()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NativeLayer:
        with torch.no_grad():  # keep the tensor objects, which the C++ layer shares
            for tensor in self._tensors:
                tensor.data = fn(tensor.data)
                if tensor.grad is not None:
                    tensor.grad = fn(tensor.grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayer:
        twin = NativeLayer(self._native.clone(), dict(self._namespaces))
        memo[id(self)] = twin
        for tensor, copied in zip(self._tensors, twin._tensors):
            copied.requires_grad_(tensor.requires_grad)
            copied.grad = copy.deepcopy(tensor.grad, memo)
            memo[id(tensor)] = copied
        for name, value in self.__dict__.items():  # hooks and the user's attributes
            if name not in _CONSTRUCTED:
                twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def _pass_namespaces(self) -> None:
        """Gives the C++ layer the namespaces of its skips."""
        for name in self.stashable_names | self.poppable_names:
            self._native.isolate(native_namespace(self.namespace_of(name)), name)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a C++ layer cannot be pickled; save the model's state_dict() instead")

    def extra_repr(self) -> str:
        return self._native.describe()


def _sequential(layers: list[_C.NativeLayer]) -> nn.Sequential:
    namespace = Namespace()
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers:
        stashes, pops = layer.skips()
        modules[layer.name] = NativeLayer(layer, {name: namespace for _, name in stashes + pops})
    return nn.Sequential(modules)


def unet(
    in_channels: int = 3,
    out_channels: int = 1,
    *,
    depth: int = 4,
    base_channels: int = 64,
    convolutions: int = 2,
    dropout: float = 0.0,
    dims: int = 2,
    upsampling: str = "transposed",
) -> nn.Sequential:
    """A U-Net (Ronneberger et al., arXiv:1505.04597) with batch norm; 31 million parameters by default.

    Args:
        in_channels: channels of the input image.
        out_channels: channels of the output: logits, one channel per class.
        depth: number of times that the resolution is halved; also the number of skips.
        base_channels: channels at full resolution; they double at each halving.
        convolutions: number of convolutions (3x3, batch norm, ReLU) per block.
        dropout: probability of dropping a channel at the end of each block.
        dims: 2 for inputs (N, C, H, W), 3 for (N, C, D, H, W), of any size.
        upsampling: ``'transposed'`` for transposed convolutions, ``'linear'`` for interpolation.

    Raises:
        ValueError: if an option is out of range; the message names the option and its value.
    """
    return _sequential(
        _C.unet(
            check_whole(in_channels, "in_channels"),
            check_whole(out_channels, "out_channels"),
            check_whole(depth, "depth"),
            check_whole(base_channels, "base_channels"),
            check_whole(convolutions, "convolutions"),
            check_number(dropout, "dropout"),
            check_whole(dims, "dims"),
            check_text(upsampling, "upsampling"),
        )
    )


def _resnet(depth: int, num_classes: int, in_channels: int, small_images: bool) -> nn.Sequential:
    num_classes, in_channels = check_whole(num_classes, "num_classes"), check_whole(in_channels, "in_channels")
    return _sequential(_C.resnet(depth, num_classes, in_channels, check_flag(small_images, "small_images")))


def resnet18(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-18 (He et al., arXiv:1512.03385) with the architecture of torchvision's.

    Args:
        num_classes: number of outputs, which are logits.
        in_channels: channels of the input image (N, C, H, W), of any size.
        small_images: whether the stem keeps the resolution, for small images such as MNIST and CIFAR.

    Raises:
        ValueError: if an option is out of range; the message names the option and its value.
    """
    return _resnet(18, num_classes, in_channels, small_images)


def resnet34(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-34; see :func:`resnet18`."""
    return _resnet(34, num_classes, in_channels, small_images)


def resnet50(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-50; see :func:`resnet18`."""
    return _resnet(50, num_classes, in_channels, small_images)


def resnet101(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-101; see :func:`resnet18`."""
    return _resnet(101, num_classes, in_channels, small_images)


def resnet152(num_classes: int = 1000, in_channels: int = 3, *, small_images: bool = False) -> nn.Sequential:
    """A ResNet-152; see :func:`resnet18`."""
    return _resnet(152, num_classes, in_channels, small_images)
