"""Names of parameters, buffers and state, as the user's model has them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gpipe.exported.layer import ExportedLayer
from gpipe.partition import Partition
from gpipe.skip import Skippable

__all__ = ["OriginalNames", "UnpartitionedNames", "rename_missing"]


class OriginalNames(nn.Module):
    """Shows the parameters, buffers and state of layers under the names that the user's model has for them, wherever the
    layers are in the tree of modules.

    A layer is at ``<path>``, and its weight at ``<path>.weight``. The weight of a converted model's layer is at
    ``<path>.model.<name>``, where ``<name>`` is the original model's.
    """

    _depth: int
    """The number of parts of a layer's path in the tree of modules. The last is the layer's name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_load_state_dict_post_hook(rename_missing)  # type: ignore[no-untyped-call]

    def _layers_by_path(self) -> dict[str, nn.Module]:
        """Returns the layers by their paths in the tree of modules."""
        raise NotImplementedError

    def _shown(self, name: str, prefix: str = "", layers: Mapping[str, nn.Module] | None = None) -> str:
        """Returns the user's name of what has the given name in the tree of modules. Names outside layers stay."""
        if not name.startswith(prefix):
            return name
        layers = self._layers_by_path() if layers is None else layers
        parts = name[len(prefix) :].split(".")
        layer = layers.get(".".join(parts[: self._depth]))
        if layer is None:
            return name
        hidden = self._depth + 1 if isinstance(layer, ExportedLayer) else self._depth - 1
        return prefix + ".".join(parts[hidden:])

    def _paths(self) -> dict[str, str]:
        """Returns the names in the tree of modules of the state of a converted model's layers, by the users' names."""
        return {
            name: f"{path}.model.{name}"
            for path, layer in self._layers_by_path().items()
            if isinstance(layer, ExportedLayer)
            for name in layer.model.state_dict(keep_vars=True)
        }

    def _path_of(self, name: str) -> str:
        """Returns the name in the tree of modules of a converted model's parameter or buffer. Other names stay."""
        for path, layer in self._layers_by_path().items():
            if isinstance(layer, ExportedLayer):
                own = [layer.model.named_parameters, layer.model.named_buffers]
                if any(name == each for named in own for each, _ in named(remove_duplicate=False)):
                    return f"{path}.model.{name}"
        return name

    # Parameters and buffers.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        layers = self._layers_by_path()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._shown(name, prefix and f"{prefix}.", layers), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        layers = self._layers_by_path()
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield self._shown(name, prefix and f"{prefix}.", layers), buffer

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter by its name in the user's model, or in the tree of modules."""
        return super().get_parameter(self._path_of(target))

    def get_buffer(self, target: str) -> Tensor:
        """Returns a buffer by its name in the user's model, or in the tree of modules."""
        return super().get_buffer(self._path_of(target))

    # State.

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns the state with the keys of the user's model. Arguments as for ``nn.Module.state_dict``."""
        # PyTorch also allows the arguments by position.
        by_position = [*args, destination, prefix, keep_vars][: len(args)]
        destination, prefix, keep_vars = [*by_position, *[destination, prefix, keep_vars][len(by_position) :]]
        earlier = set(destination or ())
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        layers = self._layers_by_path()
        shown = {self._shown(key, prefix, layers): key for key in state if key not in earlier}
        # A converted model's layers are in the order of execution, but its state is in the original's.
        orders = {id(layer.order): layer.order for layer in layers.values() if isinstance(layer, ExportedLayer)}
        places = {prefix + name: place for order in orders.values() for place, name in enumerate(order)}
        for name in sorted(shown, key=lambda name: places.get(name, len(places))):
            state[name] = state.pop(shown[name])
        metadata = getattr(state, "_metadata", {})
        for key in list(metadata):
            # Keep the old key too: the children look for it.
            metadata.setdefault(self._shown(key, prefix, layers), metadata[key])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of the user's model, or a state that torchgpipe saved for any balance. Arguments and result as
        for ``nn.Module.load_state_dict``."""
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = OrderedDict(state_dict)
            layers = self._layers_by_path()
            names = {path: self._shown(path, layers=layers) for path, _ in self.named_modules()}
            inner = {path: metadata[name] for path, name in names.items() if name in metadata}
            state_dict._metadata = {**metadata, **inner}  # type: ignore[attr-defined]
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            error.args = (_without_hidden(self, str(error)),)
            raise

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        paths = self._paths()
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if (path := paths.get(key[len(prefix) :])) is not None:
                state_dict[prefix + path] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


class UnpartitionedNames(OriginalNames):
    """Hides the stages of a pipeline from the names of its parameters, buffers, state and layers.

    In the tree of modules, a layer is ``partitions.<stage>.<layer>``. For users, for ``state_dict()`` and for functions
    that follow the names of parameters, it is ``<layer>``.
    """

    partitions: nn.ModuleList
    _borrowed: list[nn.Parameter]
    """The parameters of this rank's layers that another rank owns."""
    _depth = 3

    def _stages(self) -> list[Partition]:
        return list(self.partitions)  # type: ignore[arg-type]

    def _layers_by_path(self) -> dict[str, nn.Module]:
        return {
            f"partitions.{j}.{name}": layer
            for j, stage in enumerate(self._stages())
            for name, layer in stage.named_children()
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        # A parameter that another rank owns counts as a duplicate.
        hidden = {id(each) for each in self._borrowed if remove_duplicate}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) not in hidden:
                yield name, parameter

    # Layers as attributes.

    def __getattr__(self, name: str) -> Any:
        stage = self._stage_with(name)
        return super().__getattr__(name) if stage is None else stage._modules[name]

    def __setattr__(self, name: str, value: Any) -> None:
        stage = self._stage_with(name) if isinstance(value, nn.Module) else None
        if stage is None:
            super().__setattr__(name, value)
        else:
            stage._modules[name] = value

    def _stage_with(self, name: str) -> nn.Module | None:
        stages = self.__dict__.get("_modules", {}).get("partitions", ())
        return next((stage for stage in stages if name in stage._modules), None)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Returns a dict whose values torch.distributed.checkpoint leaves out of names."""
        return {"": "partitions"}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        paths = {path.rpartition(".")[2]: path for path in self._layers_by_path()}
        layers = {name: layer for stage in self._stages() for name, layer in stage.named_children()}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name, _, rest = key[len(prefix) :].partition(".")
            if name == "partitions" and name not in paths:  # saved by torchgpipe, maybe with another balance
                name, _, rest = rest.partition(".")[2].partition(".")
                rest = _without_wrappers(layers.get(name), rest)
                if _is_deferred_sum(layers.get(name), rest):
                    del state_dict[key]
                    continue
            if name in paths and not isinstance(layers[name], ExportedLayer):
                state_dict[f"{prefix}{paths[name]}.{rest}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def rename_missing(module: OriginalNames, incompatible: Any) -> None:
    """Gives missing and unexpected keys their names in the user's model."""
    for keys in incompatible:
        keys[:] = [_without_hidden(module, key) for key in keys]


def _without_hidden(module: OriginalNames, text: str) -> str:
    """Removes from the keys in a text what the user's model does not have."""
    converted = (path for path, layer in module._layers_by_path().items() if isinstance(layer, ExportedLayer))
    hidden = [*(re.escape(f"{path}.model.") for path in converted), r"partitions\.\d+\."]
    return re.sub(rf"(^|[.\s])({'|'.join(hidden)})", r"\1", text)


def _without_wrappers(layer: nn.Module | None, key: str) -> str:
    """Removes from a key of a layer's state the ``module.`` that torchgpipe adds for each skippable module."""
    if isinstance(layer, Skippable) and "module" not in layer._modules:
        key = key.removeprefix("module.")
    name, dot, rest = key.partition(".")
    child = layer._modules.get(name) if layer is not None else None
    return key if child is None else name + dot + _without_wrappers(child, rest)


def _is_deferred_sum(layer: nn.Module | None, key: str) -> bool:
    """Returns whether a key of a layer's state is one that only torchgpipe's deferred batch norm has."""
    owner, _, name = key.rpartition(".")
    if layer is None or name not in ("sum", "sum_squares"):
        return False
    module = dict(layer.named_modules()).get(owner)
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
