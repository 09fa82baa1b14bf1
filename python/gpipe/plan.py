"""Chooses how a pipeline runs a model."""

import warnings
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe import _C
from gpipe.balance import MODES, Candidate, suggest
from gpipe.checks import Checkpoint, arrange_workers, check_checkpoint
from gpipe.ranks import Ranks
from gpipe.structure import take_apart

_CLOSE = 1.03  # Candidates whose predicted times differ by less count as equally fast.


class Plan(TypedDict):
    """How a pipeline runs its model: arguments of :class:`gpipe.GPipe`."""

    balance: list[int]
    chunks: int
    checkpoint: Checkpoint
    schedule: str
    placement: list[int]


def choose_plan(
    model: nn.Sequential,
    batch: Any,
    *,
    devices: Sequence[torch.device] | None,
    stages: int | None,
    chunks: int | None,
    checkpoint: Checkpoint | None,
    schedule: str | None,
    ranks: Ranks | None,
    seconds: float,
) -> Plan:
    """Measures a model for about ``seconds``, and chooses what is ``None``. The number of micro-batches is chosen only if the
    results do not depend on it, as they do with batch norm. Raises RuntimeError if nothing fits the devices' memory."""
    if stages is not None:
        _C.check_stages(stages, len(model))
    processes = 1 if ranks is None else ranks.size // ranks.replicas
    if devices is None:
        default = 1 if processes > 1 else torch.cuda.device_count() or min(2, len(model))
        devices = arrange_workers(None, max(1, stages // processes) if stages else default).devices
    workers = len(devices) * processes
    samples = len(take_apart(batch)[0][0])
    if chunks is None and samples == 1:
        warnings.warn(
            "the plan is for a mini-batch of 1 sample, so for one micro-batch; give a mini-batch of the size you train with",
            stacklevel=6,
        )
    if chunks is None and _has_batch_norm(model):
        chunks = max(1, min(2 * workers, samples // 2))
    tried = [chunks] if chunks is not None else sorted({min(workers * factor, samples) for factor in (1, 2, 4, 8)})
    memory = min((torch.cuda.mem_get_info(each)[1] for each in devices if each.type == "cuda"), default=0)
    found = suggest(
        model,
        batch,
        list(devices) * processes,
        chunks=tried,
        checkpoints=MODES if checkpoint is None else [checkpoint],
        memory_limit=memory,
        schedule="auto" if schedule is None else schedule,
        seconds=seconds,
        param_scale=4.0,
    )
    candidates = [each for each in found.candidates if each.fits and stages in (None, len(each.balance))]
    if not candidates:
        raise RuntimeError(
            found.reason
            or f"no schedule that was tried runs {stages} stages on {workers} worker{'s' * (workers > 1)}; leave stages "
            "out, or give devices, one per worker, which may repeat"
        )
    # Two kinds of schedules round differently. One kind is enough, so that equal trainings give equal bits.
    candidates = [each for each in candidates if not _C.fills_and_drains(each.schedule)] or candidates
    fastest = min(each.seconds for each in candidates)
    chosen = min((each for each in candidates if each.seconds <= _CLOSE * fastest), key=_order)
    whole = found.unpartitioned
    if stages is None and whole is not None and whole.fits and chosen.seconds > _CLOSE * whole.seconds:
        warnings.warn(
            f"plain PyTorch on one device, on a CPU with all threads, is predicted to be {chosen.seconds / whole.seconds:.2f} "
            "times as fast as the pipeline; train the module without one unless you are short of memory",
            stacklevel=6,
        )
    return {
        "balance": chosen.balance,
        "chunks": chosen.chunks,
        "checkpoint": check_checkpoint(chosen.checkpoint),
        "schedule": chosen.schedule,
        "placement": chosen.placement,
    }


def _has_batch_norm(model: nn.Sequential) -> bool:
    operators = any('"aten::batch_norm"' in getattr(layer, "description", "") for layer in model)
    return operators or any(isinstance(each, _BatchNorm) for each in model.modules())  # of opaque modules


def _order(candidate: Candidate) -> tuple[int, ...]:
    """Orders candidates that are equally fast, so that measurements that differ a little lead to one choice."""
    names = [name for name, _, _ in _C.schedule_rules()]
    place = names.index(candidate.schedule) if candidate.schedule in names else -1  # a file
    return MODES.index(candidate.checkpoint), len(candidate.balance), place, candidate.chunks
