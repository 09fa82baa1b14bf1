"""Chooses how a pipeline runs a model."""

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe import _C
from gpipe.balance import plan
from gpipe.checks import Checkpoints, Memory, arrange_workers
from gpipe.ranks import Ranks
from gpipe.structure import take_apart


class Plan(TypedDict):
    """How a pipeline runs its model: arguments of :class:`gpipe.GPipe`."""

    balance: list[int]
    chunks: int
    checkpoint: Checkpoints
    schedule: str
    placement: list[int]
    deferred_batch_norm: bool
    keep_memory: bool


def read_plan(path: Any) -> dict[str, Any]:
    """Reads a plan that :meth:`gpipe.balance.Plan.save` wrote. Raises ValueError for another file."""
    try:
        saved = json.loads(Path(path).read_text())
        return {name: saved[name] for name in ("balance", "chunks", "checkpoint", "schedule", "placement")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"'{path}' is not a plan that was saved: {type(error).__name__}: {error}") from error


def choose_plan(
    model: nn.Sequential,
    batch: Any,
    *,
    devices: Sequence[torch.device] | None,
    stages: int | None,
    balance: list[int] | None,
    chunks: int | None,
    checkpoint: Checkpoints | None,
    schedule: str | None,
    placement: Iterable[int] | str | None,
    memory: Memory | None,
    ranks: Ranks | None,
    seconds: float,
) -> dict[str, Any]:
    """Measures a model for about ``seconds``, and chooses what is ``None``. The number of micro-batches is chosen only if the
    results do not depend on it, as they do with batch norm. Raises RuntimeError if nothing fits the devices' memory."""
    wanted = len(balance) if balance is not None else stages
    if wanted is not None:
        _C.check_stages(wanted, len(model))
    processes = 1 if ranks is None else ranks.size // ranks.replicas
    if devices is None and wanted and processes == 1:
        devices = arrange_workers(None, wanted, schedule or "auto", placement or "looped").devices
    elif devices is None:
        default = 1 if processes > 1 else min(torch.cuda.device_count() or 2, len(model))
        devices = arrange_workers(None, max(1, wanted // processes) if wanted else default).devices
    placed = list(devices) * processes
    workers = len(placed)
    samples = len(take_apart(batch)[0][0])
    if chunks is None and samples == 1:
        warnings.warn(
            "the plan is for a mini-batch of 1 sample, so for one micro-batch; give a mini-batch of the size you train with",
            stacklevel=6,
        )
    if chunks is None and _has_batch_norm(model):
        chunks = max(1, min(2 * workers, samples // 2))
    limits = memory
    if limits is None and all(each.type == "cuda" for each in devices):
        limits = [_free(each, model) for each in devices] * processes
    found = plan(
        model,
        batch,
        placed,
        memory=limits,
        stages=wanted,
        balance=balance,
        chunks=chunks or sorted({min(workers * factor, samples) for factor in (1, 2, 4, 8)}),
        checkpoint=checkpoint,
        schedule="auto" if schedule is None else schedule,
        placement=placement,
        seconds=seconds,
        hosts=processes,
        pilots=3 if processes == 1 else 0,
    )
    best, whole = found.best, found.unpartitioned
    faster = 0 if whole is None or not whole.fits else best.seconds / whole.seconds
    if wanted is None and memory is None and faster > 1.03:
        warnings.warn(
            f"plain PyTorch on one device, on a CPU with all threads, is predicted to be {faster:.2f} times as fast as the "
            "pipeline; train the module without one unless you are short of memory",
            stacklevel=6,
        )
    return best.arguments


def _free(device: torch.device, model: nn.Module) -> int:
    """The bytes of a GPU that PyTorch has or can still get, with those of the model."""
    own = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.device == device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused + own


def _has_batch_norm(model: nn.Sequential) -> bool:
    operators = any('"aten::batch_norm"' in getattr(layer, "description", "") for layer in model)
    return operators or any(isinstance(each, _BatchNorm) for each in model.modules())  # of opaque modules
