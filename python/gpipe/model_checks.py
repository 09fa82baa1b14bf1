"""Checks that a model can become a pipeline."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from gpipe.names import rename_missing
from gpipe.partition import Partition

__all__ = ["verify_module"]

def verify_module(module: nn.Sequential) -> None:
    """Checks a model, except its skips.

    Raises:
        TypeError: if the model is not a ``nn.Sequential``, has a ``forward`` of its own or is compiled as a whole.
        ValueError: if a layer stands in two places; if the model itself has hooks, parameters or buffers; or if a
            parameter or buffer is not initialized.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but is {type(module)}; use "
            "gpipe.GPipe.from_module(module, input, stages=2) for another module, nn.Sequential(*layers) for layers"
        )
    _check_only_layers(module)
    _check_initialized(module)
    _check_distinct(module)


def _check_only_layers(module: nn.Sequential) -> None:
    """A pipeline takes over the layers of a model and nothing else."""
    kind = type(module)
    plain = kind.forward in (nn.Sequential.forward, Partition.forward) and kind.__call__ is nn.Module.__call__
    if not plain or "forward" in vars(module) or module._compiled_call_impl is not None:
        raise TypeError(
            f"the model ({kind.__name__}) has a forward of its own, or is compiled as a whole, but a pipeline calls "
            "only its layers; move the code of the forward into layers, compile the layers, or pass "
            "nn.Sequential(*model) if that computes the same"
        )
    hooks = {name: table for name, table in vars(module).items() if name.endswith("_hooks")}
    used = [name for name, table in hooks.items() if set(table.values()) - {rename_missing}]
    own = [f"a{name[:-1].replace('_', ' ')}" for name in used]  # such as "a forward hook"
    own += [f"a parameter ('{name}')" for name, value in module._parameters.items() if value is not None]
    own += [f"a buffer ('{name}')" for name, value in module._buffers.items() if value is not None]
    if own:
        raise ValueError(
            f"the model itself, not one of its layers, has {', '.join(own)}, which a pipeline would lose; register "
            "parameters and buffers in a layer, and hooks on a layer or on the pipeline"
        )


def _check_initialized(module: nn.Sequential) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"'{name}' of a lazy layer is not initialized; run the model once on a sample first")


def _check_distinct(module: nn.Sequential) -> None:
    first: dict[int, str] = {}
    for name, layer in module._modules.items():
        assert layer is not None
        if (other := first.setdefault(id(layer), name)) != name:
            raise ValueError(
                f"layers '{other}' and '{name}' are the same module; use a copy, because each layer belongs to one "
                "place"
            )
