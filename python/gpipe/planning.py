"""Chooses how a pipeline runs a model."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe import _C
from gpipe.alone import profile_one_by_one
from gpipe.balance import Profile, plan
from gpipe.checks import Checkpoints, Memory, arrange_workers
from gpipe.core import StagedModel
from gpipe.exported.pretended import is_on_meta
from gpipe.ranks import Ranks, on_rank_0
from gpipe.structure import first_micro_batch, take_apart
from gpipe.team import Team
from gpipe.weights import Values
from gpipe.wrapper import entering


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
    given: Mapping[str, Any],
    devices: Sequence[torch.device] | None,
    memory: Memory | None,
    ranks: Ranks | None,
    seconds: float,
) -> dict[str, Any]:
    """Measures a model for about ``seconds``, and chooses what is ``None`` in ``given``: stages, balance, chunks, checkpoint,
    schedule and placement, as for :func:`gpipe.plan`. The number of micro-batches is chosen only if the results do not depend
    on it, as they do with batch norm. All ranks call it; rank 0 measures and chooses, but of a model on the ``meta`` device
    each measures a share. Layers of a model that no device holds are measured one at a time. Raises RuntimeError if nothing
    fits the devices' memory."""
    wanted, chunks = given["stages"] if given["balance"] is None else len(given["balance"]), given["chunks"]
    schedule = given["schedule"] or "auto"
    if wanted is not None:
        _C.check_stages(wanted, len(model))
    processes = 1 if ranks is None else ranks.size // ranks.replicas
    if devices is None and wanted and processes == 1:
        devices = arrange_workers(None, wanted, schedule, given["placement"] or "looped").devices
    elif devices is None:
        default = 1 if processes > 1 else min(torch.cuda.device_count() or 2, len(model))
        devices = arrange_workers(None, max(1, wanted // processes) if wanted else default).devices
    placed = list(devices) * processes
    workers = len(placed)
    tensors = entering(model, batch)
    samples = len(take_apart(tensors)[0][0])
    if chunks is None and samples == 1:
        warnings.warn(
            "the plan is for a mini-batch of 1 sample, so for one micro-batch; give a mini-batch of the size you train with",
            stacklevel=4,
        )
    if chunks is None and _has_batch_norm(model):
        chunks = max(1, min(2 * workers, samples // 2))
    counts = [chunks] if chunks else sorted({min(workers * factor, samples) for factor in (1, 2, 4, 8)})
    profiles = _profiles_of_shares(model, tensors, counts, placed, ranks, seconds) if is_on_meta(model) else None

    def best() -> str:
        limits = memory
        if limits is None and all(each.type == "cuda" for each in devices):
            limits = [_free(each, model) for each in devices] * processes
        options: dict[str, Any] = {**given, "stages": wanted, "chunks": counts, "schedule": schedule, "memory": limits}
        options |= {"seconds": seconds, "hosts": processes, "pilots": 3 if processes == 1 else 0}
        try:
            found = plan(profiles or model, samples if profiles else batch, placed, **options)
        except RuntimeError as error:
            if profiles or not any(text in str(error) for text in ("out of memory", "can't allocate memory")):
                raise
            found = plan(_profiles_of_shares(model, tensors, counts, placed, None, seconds), samples, placed, **options)
        whole = found.unpartitioned
        faster = 0 if whole is None or not whole.fits else found.best.seconds / whole.seconds
        if wanted is None and memory is None and faster > 1.03:
            warnings.warn(
                f"plain PyTorch on one device, on a CPU with all threads, is predicted to be {faster:.2f} times as fast as the "
                "pipeline; train the module without one unless you are short of memory",
                stacklevel=6,
            )
        return json.dumps(found.best.arguments)

    arguments: dict[str, Any] = json.loads(on_rank_0(ranks, best))
    return arguments


def _profiles_of_shares(
    model: nn.Sequential, batch: Any, counts: list[int], devices: list[torch.device], ranks: Ranks | None, seconds: float
) -> list[Profile]:
    """Returns on rank 0 the profiles of a model for numbers of micro-batches. Layers are measured one at a time."""
    threads = max(1, torch.get_num_threads() // len(devices)) if devices[0].type == "cpu" else 0
    options: dict[str, Any] = {"device": devices[0], "threads": threads, "seconds": seconds / len(counts)}
    team = None
    if ranks is not None:
        size = ranks.size // ranks.replicas
        layers, values = nn.Sequential(*(nn.Identity() for _ in range(size))), Values()
        workers = arrange_workers(devices[:1], size, "gpipe", "looped", ranks._core)
        team = Team(StagedModel(layers, [1] * size, workers, "gpipe", False, False, ranks, values))
        options |= {"rank": ranks.rank, "ranks": ranks.size}

    def gather(work: Callable[[], bytes]) -> list[bytes]:
        if team is None:
            return [work()]
        with team.refusing():
            share = work()
        return team.gather(share, "profiles of layers")

    samples = [first_micro_batch(batch, count)[0] for count in counts]
    found = [profile_one_by_one(model, sample, gather=gather, **options) for sample in samples]
    return [each for each in found if each is not None]


def _free(device: torch.device, model: nn.Module) -> int:
    """The bytes of a GPU that PyTorch has or can still get, with those of the model."""
    own = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.device == device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused + own


def _has_batch_norm(model: nn.Sequential) -> bool:
    operators = any('"aten::batch_norm"' in getattr(layer, "description", "") for layer in model)
    return operators or any(isinstance(each, _BatchNorm) for each in model.modules())  # of opaque modules
