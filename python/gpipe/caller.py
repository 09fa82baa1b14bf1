"""Modes of PyTorch that are active around the call of a pipeline."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C import _autograd, _TorchDispatchModeKey
from torch.utils import checkpoint as _checkpoint

_TRACERS = {
    _TorchDispatchModeKey.PROXY: "make_fx",
    _TorchDispatchModeKey.FAKE: "FakeTensorMode",
    _TorchDispatchModeKey.FUNCTIONAL: "functionalization",
}


def refuse_tracing() -> None:
    """Raises NotImplementedError while PyTorch traces on this thread. A trace does not follow the pipeline's worker threads."""
    tracers = [name for key, name in _TRACERS.items() if torch._C._get_dispatch_mode(key) is not None]
    if tracers:
        tracer = "torch.export" if torch.compiler.is_exporting() else tracers[0]  # is_exporting() is of all threads
        raise NotImplementedError(
            f"a pipeline cannot be traced ({tracer}) because its layers run in worker threads; trace the unpartitioned "
            "model, whose state has the same keys"
        )


def refuse_sharding(pipe: nn.Module, stages: nn.Module, method: str) -> None:
    """Raises RuntimeError if a stage or a layer is sharded: FSDP would reduce its gradients once per micro-batch. And in
    PyTorch 2.11, a thread that has run operators of DTensors aborts the process when it ends. Raises RuntimeError too if
    the whole pipeline is sharded and the gradients of ``method`` would not reach the sharded parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    tensors = sys.modules.get("torch.distributed.tensor")
    if (fsdp is None and tensors is None) or not torch.distributed.is_initialized():
        return

    def has_shards(module: nn.Module, recurse: bool) -> bool:
        return tensors is not None and any(isinstance(own, tensors.DTensor) for own in module.parameters(recurse))

    if fsdp is not None and isinstance(pipe, fsdp.FSDPModule) and method != "forward":
        if method == "step" or has_shards(pipe, True):
            raise RuntimeError(
                f"{method}() cannot train a pipeline that is sharded by fully_shard; call "
                "torch.distributed.fsdp.register_fsdp_forward_method(pipe, 'compute_loss') once, then "
                "pipe.compute_loss(...).backward()"
            )
    for name, module in stages.named_modules():
        if fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
            how = "FSDP"
        elif has_shards(module, False):
            how = "its parameters are DTensors"
        else:
            continue
        raise RuntimeError(
            f"partitions.{name} is sharded ({how}), but the stages and layers of a pipeline cannot be; shard the whole "
            "pipeline with fully_shard(pipe), or wrap it in DistributedDataParallel"
        )


@contextmanager
def outside_checkpoints() -> Iterator[None]:
    """Removes the hooks of torch.utils.checkpoint for a block. In workers they would run the whole pipeline again."""
    removed = []
    while hooks := _autograd._top_saved_tensors_default_hooks(True):
        if getattr(hooks[0], "__module__", None) != _checkpoint.__name__:
            break
        _autograd._pop_saved_tensors_default_hooks()
        removed.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(removed):
            _autograd._push_saved_tensors_default_hooks(*hooks)


def prepare_compilation() -> None:
    """Makes the calling thread the first that compiles, if layers are compiled. On a machine without GPUs, that thread leaves
    a device guard for all. The guard ends with the thread, and the next compilation crashes (PyTorch 2.11)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and dynamo.cached_backends:
        torch._C._ensureCUDADeviceGuardSet()
