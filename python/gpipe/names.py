"""Names of parameters, buffers and state, as the unpartitioned model has them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gpipe.partition import Partition
from gpipe.skip import Skippable

__all__ = ["UnpartitionedNames"]


class UnpartitionedNames(nn.Module):
    """Hides the stages of a pipeline from the names of its parameters, buffers, state and layers.

    In the tree of modules, a layer is ``partitions.<stage>.<layer>``. For users, for ``state_dict()`` and for functions
    that follow the names of parameters, it is ``<layer>``.
    """

    partitions: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_rename_missing)  # type: ignore[no-untyped-call]

    def _stages(self) -> list[Partition]:
        return list(self.partitions)  # type: ignore[arg-type]

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

    # Parameters and buffers.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield _without_stage(name, prefix and f"{prefix}."), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield _without_stage(name, prefix and f"{prefix}."), buffer

    def _fqn_modifiers(self) -> dict[str, str]:
        """Returns a dict whose values torch.distributed.checkpoint leaves out of names."""
        return {"": "partitions"}

    # State.

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns the state with the keys of the unpartitioned model. Arguments as for ``nn.Module.state_dict``."""
        # PyTorch also allows the arguments by position.
        by_position = [*args, destination, prefix, keep_vars][: len(args)]
        destination, prefix, keep_vars = [*by_position, *[destination, prefix, keep_vars][len(by_position) :]]
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        inner = f"{prefix}partitions."
        for key in [key for key in state if key.startswith(inner)]:
            state[_without_stage(key, prefix)] = state.pop(key)
        metadata = getattr(state, "_metadata", {})
        for key in [key for key in metadata if key.startswith(inner)]:
            # Keep the old key too: the pipeline's own children look for it.
            if name := key[len(inner) :].partition(".")[2]:
                metadata[prefix + name] = metadata[key]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of the unpartitioned model, or a state that torchgpipe saved for any balance. Arguments and
        result as for ``nn.Module.load_state_dict``."""
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = OrderedDict(state_dict)
            inner = {
                f"partitions.{j}.{key}": value
                for j, stage in enumerate(self._stages())
                for key, value in metadata.items()
                if key.partition(".")[0] in stage._modules
            }
            state_dict._metadata = {**metadata, **inner}  # type: ignore[attr-defined]
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        stage_of = {name: j for j, stage in enumerate(self._stages()) for name, _ in stage.named_children()}
        layers = {name: layer for stage in self._stages() for name, layer in stage.named_children()}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name, _, rest = key[len(prefix) :].partition(".")
            if name == "partitions" and name not in stage_of:  # saved by torchgpipe, maybe with another balance
                name, _, rest = rest.partition(".")[2].partition(".")
                rest = _without_wrappers(layers.get(name), rest)
                if _is_deferred_sum(layers.get(name), rest):
                    del state_dict[key]
                    continue
            if name in stage_of:
                state_dict[f"{prefix}partitions.{stage_of[name]}.{name}.{rest}"] = state_dict.pop(key)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _without_stage(name: str, prefix: str) -> str:
    """Turns <prefix>partitions.<stage>.<name> into <prefix><name>. Returns other names unchanged."""
    inner = f"{prefix}partitions."
    return prefix + name[len(inner) :].partition(".")[2] if name.startswith(inner) else name


def _rename_missing(module: nn.Module, incompatible: Any) -> None:
    """Gives missing and unexpected keys their names in the unpartitioned model."""
    for keys in incompatible:
        keys[:] = [re.sub(r"(^|\.)partitions\.\d+\.", r"\1", key) for key in keys]


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
