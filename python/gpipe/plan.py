"""Chooses how a pipeline runs a model."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe import _C
from gpipe.balance import MODES, Candidate, profile, suggest
from gpipe.checks import Checkpoints, arrange_workers, check_scheduling
from gpipe.ranks import Ranks
from gpipe.structure import first_micro_batch, take_apart

_CLOSE = 1.03  # Candidates whose predicted times differ by less count as equally fast.


class Plan(TypedDict):
    """How a pipeline runs its model: arguments of :class:`gpipe.GPipe`."""

    balance: list[int]
    chunks: int
    checkpoint: Checkpoints
    schedule: str
    placement: list[int]
    deferred_batch_norm: bool
    keep_memory: bool


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
    ranks: Ranks | None,
    seconds: float,
) -> dict[str, Any]:
    """Measures a model for about ``seconds``, and chooses what is ``None``. The number of micro-batches is chosen only if the
    results do not depend on it, as they do with batch norm. Raises RuntimeError if nothing fits the devices' memory."""
    if checkpoint is not None and checkpoint not in MODES:
        what = f"checkpoint is {checkpoint!r}, but only a name can be part of a plan that is chosen"
        raise ValueError(f"{what}; give balance, chunks and schedule too, or one of {', '.join(MODES)}")
    wanted = len(balance) if balance is not None else stages
    if wanted is not None:
        _C.check_stages(wanted, len(model))
    processes = 1 if ranks is None else ranks.size // ranks.replicas
    if devices is None:
        default = 1 if processes > 1 else torch.cuda.device_count() or min(2, len(model))
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
    tried = [chunks] if chunks is not None else sorted({min(workers * factor, samples) for factor in (1, 2, 4, 8)})
    memory = min((torch.cuda.mem_get_info(each)[1] for each in devices if each.type == "cuda"), default=0)
    name = "auto" if schedule is None else schedule
    whole, reason = None, ""
    if balance is None:
        found = suggest(
            model,
            batch,
            placed,
            chunks=tried,
            checkpoints=MODES if checkpoint is None else [checkpoint],
            memory_limit=memory,
            schedule=name,
            placement="looped" if placement is None else placement,
            seconds=seconds,
            param_scale=4.0,
        )
        predicted, whole, reason = found.candidates, found.unpartitioned, found.reason
    else:
        predicted = []
        schedulings = _schedulings(name, placement, workers, len(balance))
        limits = _C.SearchOptions(placed, memory, 0.0)
        for count in tried:
            sample, micro_batches = first_micro_batch(batch, count)
            cores = sum(each.type == "cpu" for each in placed) if placed[0].type == "cpu" else 1
            measured = profile(
                model, sample, device=placed[0], workers=cores, seconds=seconds / len(tried), param_scale=4.0
            )
            predicted += _C.candidates(measured, balance, micro_batches, schedulings, limits)
        predicted = [each for each in predicted if checkpoint in (None, each.checkpoint)]
        if predicted and not any(each.fits for each in predicted):
            reason = f"the balance {balance} needs more memory than the devices have; give another, or leave it out"
    candidates = [each for each in predicted if each.fits and wanted in (None, len(each.balance))]
    if not candidates:
        raise RuntimeError(
            reason
            or f"no schedule that was tried runs {wanted} stages on {workers} worker{'s' * (workers > 1)}; leave stages "
            "out, or give devices, one per worker, which may repeat"
        )
    # Two kinds of schedules round differently. One kind is enough, so that equal trainings give equal bits.
    candidates = [each for each in candidates if not _C.fills_and_drains(each.schedule)] or candidates
    fastest = min(each.seconds for each in candidates)
    chosen = min((each for each in candidates if each.seconds <= _CLOSE * fastest), key=_order)
    if wanted is None and whole is not None and whole.fits and chosen.seconds > _CLOSE * whole.seconds:
        warnings.warn(
            f"plain PyTorch on one device, on a CPU with all threads, is predicted to be {chosen.seconds / whole.seconds:.2f} "
            "times as fast as the pipeline; train the module without one unless you are short of memory",
            stacklevel=6,
        )
    return {name: getattr(chosen, name) for name in ("balance", "chunks", "checkpoint", "schedule", "placement")}


def _schedulings(schedule: str, placement: object, workers: int, stages: int) -> list[_C.Scheduling]:
    """Returns what runs so many stages on so many workers, if a schedule and a placement are given or not."""
    place = None if placement is None else check_scheduling(schedule, placement, stages)[1] or None
    if schedule == "auto":
        tried = _C.all_schedulings(workers, stages)
        return [each for each in tried if len(each.placement) == stages and place in (None, each.placement)]
    return [_C.Scheduling(schedule, place or _C.place_stages(schedule, stages, max(1, stages // workers)))]


def _has_batch_norm(model: nn.Sequential) -> bool:
    operators = any('"aten::batch_norm"' in getattr(layer, "description", "") for layer in model)
    return operators or any(isinstance(each, _BatchNorm) for each in model.modules())  # of opaque modules


def _order(candidate: Candidate) -> tuple[int, ...]:
    """Orders candidates that are equally fast, so that measurements that differ a little lead to one choice."""
    names = [name for name, _, _ in _C.schedule_rules()]
    place = names.index(candidate.schedule) if candidate.schedule in names else -1  # a file
    return MODES.index(candidate.checkpoint), len(candidate.balance), place, candidate.chunks
