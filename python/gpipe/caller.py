"""What a pipeline's caller has set up around the call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C import _autograd, _TorchDispatchModeKey
from torch.utils import checkpoint as _checkpoint

__all__ = ["outside_checkpoints", "refuse_sharded_layers", "refuse_tracing"]

_TRACERS = {
    _TorchDispatchModeKey.PROXY: "make_fx",
    _TorchDispatchModeKey.FAKE: "FakeTensorMode",
    _TorchDispatchModeKey.FUNCTIONAL: "functionalization",
}


def refuse_tracing() -> None:
    """Raises NotImplementedError where the layers' operators are traced: they would run in threads that the trace does
    not follow."""
    if torch.compiler.is_exporting():
        raise _refusal("torch.export")
    for key, tracer in _TRACERS.items():
        if torch._C._get_dispatch_mode(key) is not None:
            raise _refusal(tracer)


def _refusal(tracer: str) -> NotImplementedError:
    return NotImplementedError(
        f"a pipeline cannot be traced ({tracer}): its layers run in threads of its own. Trace the unpartitioned model, "
        "whose state has the same keys"
    )


def refuse_sharded_layers(stages: nn.Module) -> None:
    """Raises RuntimeError for stages and layers that are sharded, which only the whole pipeline can be.

    FSDP reduces a layer's gradients after each of its backwards, and there is one per micro-batch. And a thread that
    has run operators of DTensors aborts the process when it ends (PyTorch 2.11).
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    tensors = sys.modules.get("torch.distributed.tensor")
    if (fsdp is None and tensors is None) or not torch.distributed.is_initialized():
        return
    for name, module in stages.named_modules():
        if fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
            how = "FSDP"
        elif tensors is not None and any(isinstance(own, tensors.DTensor) for own in module.parameters(recurse=False)):
            how = "its parameters are DTensors"
        else:
            continue
        raise RuntimeError(
            f"partitions.{name} is sharded ({how}), but stages and layers of a pipeline cannot be; shard the whole "
            "pipeline by fully_shard(pipe), or wrap it in DistributedDataParallel"
        )


@contextmanager
def outside_checkpoints() -> Iterator[None]:
    """Lifts the hooks by which torch.utils.checkpoint replaces the tensors that operators save. They would come along
    to the pipeline's workers, whose backward would then run the pipeline anew. Hooks of others stay."""
    lifted = []
    while hooks := _autograd._top_saved_tensors_default_hooks(True):
        if getattr(hooks[0], "__module__", None) != _checkpoint.__name__:
            break
        _autograd._pop_saved_tensors_default_hooks()
        lifted.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(lifted):
            _autograd._push_saved_tensors_default_hooks(*hooks)
