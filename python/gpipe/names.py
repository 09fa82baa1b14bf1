"""Names of parameters, buffers and state, as the user's model has them."""

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gpipe.skip import Skippable


class ConvertedLayer(Skippable):
    """A layer of a converted model. ``model`` is a tree of modules with its parameters and buffers, at their paths in the
    original model, and ``order`` the names of the original model's tensors, in order."""

    model: nn.Module
    order: list[str]

    def check_original(self) -> None:
        """Raises RuntimeError if a parameter of the model that was converted has been replaced."""
        raise NotImplementedError


class StateNames:
    """The names that the user's model has for the state of its layers. ``layers`` has the layers by their paths in a tree
    of modules. ``<path>.weight`` is ``<layer>.weight`` in the user's model, where ``<layer>`` is the last part of the path.
    ``<path>.model.<name>`` of a converted model's layer is ``<name>``. All paths have equally many parts."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        self._depth = next((path.count(".") for path in layers), 0) + 1
        self._converted = {path: layer for path, layer in layers.items() if isinstance(layer, ConvertedLayer)}
        self._own = {path.rpartition(".")[2]: path for path in layers if path not in self._converted}  # by layer's name

    def shown(self, path: str, prefix: str = "") -> str:
        """Returns the user's name of what has a path in the tree of modules. What is outside layers keeps its name."""
        if not path.startswith(prefix):
            return path
        parts = path[len(prefix) :].split(".")
        layer = ".".join(parts[: self._depth])
        if layer not in self._layers:
            return path
        return prefix + ".".join(parts[self._depth + (1 if layer in self._converted else -1) :])

    def shown_in(self, text: str) -> str:
        """Replaces paths in a text by the user's names."""
        hidden = [*(re.escape(f"{path}.model.") for path in self._converted), r"partitions\.\d+\."]
        return re.sub(rf"(^|[.\s])({'|'.join(hidden)})", r"\1", text)

    def path_of(self, name: str) -> str:
        """Returns the path of a tensor of the layers. Other names stay."""
        layer, _, rest = name.partition(".")
        return self._paths().get(name, f"{self._own[layer]}.{rest}" if layer in self._own else name)

    def _paths(self) -> dict[str, str]:
        paths = {}
        for path, layer in self._converted.items():
            buffers = dict(layer.model.named_buffers(remove_duplicate=False))  # also those that are not persistent
            paths.update({name: f"{path}.model.{name}" for name in (*layer.model.state_dict(keep_vars=True), *buffers)})
        return paths

    def places(self, prefix: str) -> dict[str, int]:
        """Returns the places of a converted model's tensors in the order of the original, by name."""
        orders = {id(layer.order): layer.order for layer in self._converted.values()}
        return {prefix + name: place for order in orders.values() for place, name in enumerate(order)}

    def show_state(self, state: Any, prefix: str, earlier: Collection[str]) -> None:
        """Gives the keys of a state, except earlier ones, their names and order in the user's model."""
        shown = {self.shown(key, prefix): key for key in state if key not in earlier}
        places = self.places(prefix)
        for name in sorted(shown, key=lambda name: places.get(name, len(places))):
            state[name] = state.pop(shown[name])
        metadata = getattr(state, "_metadata", {})
        for key in list(metadata):
            # Keep the old key too: the children look for it.
            metadata.setdefault(self.shown(key, prefix), metadata[key])

    def hide_state(self, state: dict[str, Any], prefix: str) -> None:
        """Replaces the user's names in the keys of a state by paths. Also those of a state that torchgpipe saved."""
        converted = self._paths()
        for key in [key for key in state if key.startswith(prefix)]:
            path = converted.get(key[len(prefix) :])
            name, _, rest = key[len(prefix) :].partition(".")
            if name == "partitions" and name not in self._own:  # saved by torchgpipe, maybe with another balance
                name, _, rest = rest.partition(".")[2].partition(".")
                layer = self._layers.get(self._own.get(name, ""))
                rest = _without_wrappers(layer, rest)
                if _is_deferred_sum(layer, rest):
                    del state[key]
                    continue
            if path is None and name in self._own:
                path = f"{self._own[name]}.{rest}"
            if path is not None:
                state[prefix + path] = state.pop(key)


class OriginalNames(nn.Module):
    """A module that shows the parameters, buffers and state of its layers under the names that the user's model has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_load_state_dict_post_hook(rename_missing)  # type: ignore[no-untyped-call]

    def _state_names(self) -> StateNames:
        """Returns the names of the layers that the module has now."""
        raise NotImplementedError

    def _named_members(self, get_members_fn: Any, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[Any]:
        # Serves named_parameters() and named_buffers().
        names, dotted = self._state_names(), prefix and f"{prefix}."
        found = super()._named_members(get_members_fn, prefix, *args, **kwargs)
        members = [(names.shown(path, dotted), member) for path, member in found]
        places = names.places(dotted)
        return iter(sorted(members, key=lambda named: places.get(named[0], len(places))))

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter by its name in the user's model, or in the tree of modules."""
        return super().get_parameter(self._state_names().path_of(target))

    def get_buffer(self, target: str) -> Tensor:
        """Returns a buffer by its name in the user's model, or in the tree of modules."""
        return super().get_buffer(self._state_names().path_of(target))

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns the state with the keys of the user's model. Arguments as for ``nn.Module.state_dict``."""
        # PyTorch also allows the arguments by position.
        given: list[Any] = [destination, prefix, keep_vars]
        destination, prefix, keep_vars = [*args, *given[len(args) :]]
        earlier = set(destination or ())
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self._state_names().show_state(state, prefix, earlier)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of the user's model, or a state that torchgpipe saved for any balance. Arguments and result as
        for ``nn.Module.load_state_dict``."""
        names = self._state_names()
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = OrderedDict(state_dict)
            shown = {path: names.shown(path) for path, _ in self.named_modules()}
            inner = {path: metadata[name] for path, name in shown.items() if name in metadata}
            state_dict._metadata = {**metadata, **inner}  # type: ignore[attr-defined]
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            error.args = (names.shown_in(str(error)),)
            raise

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._state_names().hide_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def rename_missing(module: OriginalNames, incompatible: Any) -> None:
    """Gives missing and unexpected keys their names in the user's model."""
    names = module._state_names()
    for keys in incompatible:
        keys[:] = map(names.shown_in, keys)


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
    owners = dict(layer.named_modules()) if layer is not None and name in ("sum", "sum_squares") else {}
    return isinstance(owners.get(owner), nn.modules.batchnorm._BatchNorm)
