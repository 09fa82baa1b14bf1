"""Finds where to cut a model. Measures its layers, computes the best balance and predicts the cost of a step.

    from gpipe.balance import balance_by_time
    balance = balance_by_time(2, model, sample)          # the sample is a micro-batch

    from gpipe.balance import suggest
    best = suggest(model, batch, ["cuda:0", "cuda:1"]).best
    pipe = gpipe.GPipe(model, best.balance, chunks=best.chunks, checkpoint=best.checkpoint)

All functions leave the model and the random state unchanged. A model that is not a ``nn.Sequential`` is converted first by
:func:`gpipe.to_sequential`; do that once yourself if you call several functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpipe import _C, checks
from gpipe._C import Candidate, Cluster, ClusterPlan, LayerProfile, Prediction, Profile, SkipProfile, Suggestion, TieProfile
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.checks import Checkpoint
from gpipe.exported.conversion import as_sequential
from gpipe.exported.exporter import mode, unchanged
from gpipe.partition import layers_of, verify_module
from gpipe.structure import first_micro_batch, take_apart

__all__ = [
    "Candidate",
    "Cluster",
    "ClusterPlan",
    "LayerProfile",
    "Prediction",
    "Profile",
    "SkipProfile",
    "Suggestion",
    "TieProfile",
    "balance_by_size",
    "balance_by_time",
    "plan_cluster",
    "predict",
    "profile",
    "refine",
    "suggest",
]

Device = torch.device | int | str
MODES: tuple[Checkpoint, ...] = ("never", "except_last", "always")


@checks.checks_arguments
def profile(
    module: nn.Module,
    sample: Any,
    *,
    device: Device | None = None,
    workers: int = 1,
    intraop_threads: int = 0,
    seconds: float = 10.0,
    repeats: int = 9,
    param_scale: float = 2.0,
    progress: Callable[[float], None] | None = None,
) -> Profile:
    """Measures each layer of a model in training mode, for micro-batches like ``sample``. Raises RuntimeError, with the
    layer's name, if a layer fails or does not fit the device alone.

    Args:
        module: the model. Nothing else may use it during the measurement.
        sample: one micro-batch, as for :meth:`gpipe.GPipe.forward`.
        device: where to measure. Default: the first GPU, else the CPU.
        workers: number of stages that will run at once on this device, because CPU stages slow each other.
        intraop_threads: threads per operator of a CPU layer; 0 for an equal share, as in a pipeline.
        seconds: time limit; no run starts after it.
        repeats: the most runs to measure.
        param_scale: bytes that training needs per byte of a parameter: 2 for plain SGD, 3 with momentum, 4 for Adam.
        progress: called with the completed share of the work, from 0 to 1.
    """
    options = _C.ProfileOptions(workers, intraop_threads, seconds, repeats, param_scale, _progress(progress))
    with _measured(module, sample, _device(device)) as (layers, batch):
        return _C.profile(layers, batch, options)


@checks.checks_arguments
def balance_by_time(
    partitions: int, module: nn.Module, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """Measures a model for about ``timeout`` seconds. Returns the number of layers of each of ``partitions`` stages whose
    slowest is as fast as possible, without checkpointing. Arguments and errors as for :func:`profile`."""
    model = _checked_model(partitions, module, sample)
    where = _device(device)
    workers = partitions if where.type == "cpu" else 1
    return profile(model, sample, device=where, workers=workers, seconds=timeout).balance_by_time(partitions)


@checks.checks_arguments
def balance_by_size(
    partitions: int,
    module: nn.Module,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    checkpoint: Checkpoint = "except_last",
) -> list[int]:
    """Measures a model. Returns the number of layers of each of ``partitions`` stages whose largest needs as few bytes as
    possible, skips included. Other arguments and errors as for :func:`profile`.

    Args:
        input: a mini-batch, which is cut into ``chunks`` micro-batches.
        param_scale: 2 to 3 for SGD, 4 to 5 for Adam, 4 for Adadelta, 3 for Adagrad, 3 to 5 for RMSprop.
    """
    model = _checked_model(partitions, module, input)
    sample, micro_batches = first_micro_batch(input, chunks)
    # The bytes that operators allocate depend on their number of threads, so use that of a stage.
    threads = max(1, torch.get_num_threads() // partitions)
    once: dict[str, Any] = {"seconds": 0.0, "repeats": 1, "param_scale": param_scale}
    measured = profile(model, sample, device=device, intraop_threads=threads, **once)
    return measured.balance_by_size(partitions, micro_batches, checkpoint)


@checks.checks_arguments
def predict(
    profile: Profile,
    balance: Iterable[int],
    chunks: int,
    checkpoint: Checkpoint = "except_last",
    *,
    bandwidth: float = 0.0,
    copies: bool = False,
    schedule: str | None = None,
    placement: Iterable[int] | str = "looped",
) -> Prediction:
    """Predicts the cost of a training step by simulation. Other arguments are those of :class:`gpipe.GPipe`.

    Args:
        profile: costs for micro-batches of the size that ``chunks`` gives.
        bandwidth: bytes per second between devices; 0 for transfers without delay.
        copies: whether each transfer makes a copy on the receiver's device, as between GPUs.
        schedule: the schedule of ``step``; ``None`` for a forward and its backward.
    """
    checks.check_is(profile, "profile", Profile, "a Profile, as gpipe.balance.profile() returns")
    cut = checks.check_balance(balance, len(profile.layers))
    scheduling = _scheduling(schedule, placement, len(cut))
    return _C.predict(profile, cut, _C.RunOptions(chunks, checkpoint, bandwidth, copies, scheduling))


@checks.checks_arguments
def suggest(
    module: nn.Module,
    sample: Any,
    devices: Sequence[Device],
    *,
    chunks: Sequence[int] = (),
    checkpoints: Sequence[Checkpoint] = MODES,
    memory_limit: int = 0,
    bandwidth: float = 0.0,
    schedule: str | None = "auto",
    placement: Iterable[int] | str = "looped",
    seconds: float = 60.0,
    intraop_threads: int = 0,
    param_scale: float = 2.0,
    progress: Callable[[float], None] | None = None,
) -> Suggestion:
    """Measures a model at several micro-batch sizes. Searches for the schedule, placement, balance, number of chunks and
    checkpoint mode that train it fastest. Returns the candidates, best first; if none fits, also the device, the
    missing bytes and what would help. Other arguments and errors as for :func:`profile`.

    Args:
        sample: a mini-batch.
        devices: one per worker. The model is measured on the first; the others are assumed to be equally fast.
        chunks, checkpoints: what to try. Default: 4, 8, 2, 16, 1 and 32 chunks, in this order, as far as the samples and
            the time allow; all modes.
        memory_limit: the most bytes per device, where each CPU worker counts as a device; 0 for no limit.
        bandwidth: bytes per second between devices; 0 for transfers without delay.
        schedule: the schedule of ``step``; ``'auto'`` to try all; ``None`` for a forward and its backward.
        placement: as for :class:`gpipe.GPipe`; ``'looped'`` to try all placements that a schedule takes.
        seconds: approximate time limit for all measurements.
    """
    placed = _check_devices(devices)
    counts = [checks.check_chunks(number) for number in checks.check_list(chunks, "chunks")]
    modes = _check_modes(checkpoints)
    options = _C.ProfileOptions(1, intraop_threads, seconds, 9, param_scale, _progress(progress))
    scheduling = _scheduling(schedule, placement, 2 * len(placed))
    with _measured(module, sample, placed[0]) as (layers, batch):
        return _C.suggest(layers, batch, placed, counts, modes, memory_limit, bandwidth, scheduling, options)


@checks.checks_arguments
def refine(
    module: nn.Module,
    sample: Any,
    devices: Sequence[Device],
    suggestion: Suggestion,
    candidates: int = 3,
    *,
    progress: Callable[[float], None] | None = None,
) -> list[tuple[Candidate, float]]:
    """Runs up to ``candidates`` of the first ones of a suggestion that fit, which :func:`suggest` made for the other
    arguments. Returns them with their measured seconds per step, fastest first. ``progress`` is as for :func:`profile`.
    Raises RuntimeError if none fits."""
    checks.check_is(suggestion, "suggestion", Suggestion, "a Suggestion, as suggest() returns")
    placed = _check_devices(devices)
    with _measured(module, sample, placed[0]) as (layers, batch):
        return _C.refine(layers, batch, placed, suggestion, candidates, _progress(progress))


@checks.checks_arguments
def plan_cluster(
    cluster: Cluster,
    profiles: Sequence[Profile],
    samples: int,
    *,
    checkpoints: Sequence[Checkpoint] = MODES,
    schedule: str | None = "auto",
) -> ClusterPlan:
    """Chooses how to train a model on all devices of a cluster: the number of replicas, and what :func:`suggest` chooses.
    Returns the best candidate for each number of replicas, best first. Every figure is predicted.

    Args:
        profiles: of one model, on a device of the cluster, each for micro-batches of a size to try.
        samples: number of samples in the mini-batch, which the replicas share equally.
        checkpoints, schedule: as for :func:`suggest`.
    """
    checks.check_is(cluster, "cluster", Cluster, "a Cluster, as Cluster.from_json() returns")
    listed = checks.check_list(profiles, "profiles")
    for each in listed:
        checks.check_is(each, "profiles", Profile, "Profiles, as gpipe.balance.profile() returns")
    return _C.plan_cluster(cluster, listed, samples, _check_modes(checkpoints), _scheduling(schedule).schedule)


def _scheduling(schedule: str | None, placement: Any = "looped", stages: int = 0) -> _C.Scheduling:
    return _C.Scheduling(*checks.check_scheduling("" if schedule is None else schedule, placement, stages))


def _check_modes(checkpoints: object) -> list[str]:
    return list(map(checks.check_checkpoint, checks.check_list(checkpoints, "checkpoints")))


def _progress(function: object) -> Callable[[float], None] | None:
    return None if function is None else checks.check_function(function, "progress", "the completed share")


def _checked_model(partitions: int, module: nn.Module, input: Any) -> nn.Sequential:
    model = as_sequential(module, input)
    verify_module(model)
    _C.check_stages(partitions, len(model))
    return model


def _check_devices(devices: object) -> list[torch.device]:
    if placed := checks.check_devices(devices):
        return placed
    raise ValueError("devices is empty; give at least one device")


def _device(device: Device | None) -> torch.device:
    return checks.arrange_workers(None, 1).devices[0] if device is None else torch.device(device)


@contextmanager
def _measured(module: nn.Module, sample: object, device: torch.device) -> Iterator[tuple[list[Any], Any]]:
    """Gives a block the layers of a model in training mode, and a sample with its tensors on a device. Restores modes, and
    attributes, parameters and buffers that layers replaced."""
    model = as_sequential(module, sample)
    verify_module(model)
    tensors, structure = take_apart(sample)
    with unchanged(vars(model).get("module", model).modules()):
        moved = (tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in tensors)
        with mode(model, True):
            yield layers_of(model), structure.build(moved)
    for each in model.modules():
        if isinstance(each, DeferredBatchNorm):
            each.reset()
