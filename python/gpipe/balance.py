"""Finds where to cut a model. Measures its layers, computes the best balance and predicts the cost of a step.

    from gpipe.balance import balance_by_time
    balance = balance_by_time(2, model, sample)          # the sample is a micro-batch

    from gpipe.balance import suggest
    best = suggest(model, batch, ["cuda:0", "cuda:1"]).best
    pipe = gpipe.GPipe(model, best.balance, chunks=best.chunks, checkpoint=best.checkpoint)

All functions leave the model unchanged: its parameters, gradients, buffers, devices and modes, and the random state.
A model that is not a ``nn.Sequential`` is converted first; see :func:`gpipe.to_sequential`. Convert it once yourself if
you call several functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpipe import _C
from gpipe._C import (
    Candidate,
    Cluster,
    ClusterPlan,
    LayerProfile,
    Prediction,
    Profile,
    SkipProfile,
    Suggestion,
    TieProfile,
)
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.checks import (
    arrange_workers,
    check_balance,
    check_checkpoint,
    check_chunks,
    check_devices,
    check_flag,
    check_function,
    check_number,
    check_scheduling,
    check_whole,
    shown,
)
from gpipe.exported.conversion import as_sequential
from gpipe.model_checks import verify_module
from gpipe.partition import layers_of
from gpipe.skip import verify_skippables
from gpipe.structure import take_apart

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
_REPEATS = 9


def profile(
    module: nn.Module,
    sample: Any,
    *,
    device: Device | None = None,
    workers: int = 1,
    intraop_threads: int = 0,
    seconds: float = 10.0,
    repeats: int = _REPEATS,
    param_scale: float = 2.0,
    progress: Callable[[float], None] | None = None,
) -> Profile:
    """Measures each layer of a model in training mode, for micro-batches of the sample's size.

    Args:
        module: the model, a ``nn.Sequential`` or any module that :func:`gpipe.to_sequential` converts. Nothing else may
            use it during the measurement.
        sample: one micro-batch, as for :meth:`gpipe.GPipe.forward`.
        device: where to measure. Default: the first GPU, or the CPU if there is no GPU.
        workers: number of stages that will run at once on this device. It matters because CPU stages slow each other.
        intraop_threads: threads that one operator of a CPU layer may use; 0 for an equal share, as in a pipeline.
        seconds: time limit in seconds; no run starts after it.
        repeats: the most runs to measure.
        param_scale: bytes that training needs per byte of a parameter: 2 for plain SGD, 3 with momentum, 4 for Adam.
        progress: called with the completed share of the work, from 0 to 1.

    Raises:
        TypeError, ValueError: if the model or the sample cannot be used in a pipeline, or an option is not valid.
        RuntimeError: if a layer fails or does not fit the device alone; the message names the layer.
    """
    options = _options(workers, intraop_threads, seconds, repeats, param_scale, progress)
    with _measured(module, sample, _device(device)) as (layers, batch):
        return _C.profile(layers, batch, options)


def balance_by_time(
    partitions: int, module: nn.Module, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """Measures a model and returns the balance whose slowest stage is fastest, without checkpointing.

    Args:
        partitions: number of stages.
        module: the model.
        sample: one micro-batch. The times depend on its size.
        timeout: approximate time limit for the measurement, in seconds.
        device: as for :func:`profile`. On the CPU, ``partitions`` stages run at once.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: unless ``partitions`` is between 1 and the number of layers; other errors as :func:`profile`.
    """
    model = as_sequential(module, sample)
    partitions = _check_partitions(partitions, model)
    where = _device(device)
    workers = partitions if where.type == "cpu" else 1
    measured = profile(model, sample, device=where, workers=workers, seconds=timeout)
    return measured.balance_by_time(partitions)


def balance_by_size(
    partitions: int,
    module: nn.Module,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    checkpoint: str = "except_last",
) -> list[int]:
    """Measures a model and returns the balance whose largest stage needs the fewest bytes, skips included.

    Args:
        partitions: number of stages.
        module: the model.
        input: a mini-batch.
        chunks: number of micro-batches that the mini-batch is cut into.
        param_scale: bytes that training needs per byte of a parameter: 2 to 3 for SGD, 4 to 5 for Adam, 4 for Adadelta,
            3 for Adagrad, 3 to 5 for RMSprop.
        device: as for :func:`profile`.
        checkpoint: the checkpoint mode of the pipeline.

    Returns:
        As :func:`balance_by_time`.
    """
    model = as_sequential(module, input)
    partitions = _check_partitions(partitions, model)
    chunks = check_chunks(chunks)
    checkpoint = check_checkpoint(checkpoint)
    tensors, structure = take_apart(input)
    parts = [tensor.chunk(chunks) for tensor in tensors]
    sample = structure.build(pieces[0] for pieces in parts)
    # The bytes that operators allocate depend on their number of threads, so use that of a stage.
    threads = max(1, torch.get_num_threads() // partitions)
    measured = profile(
        model, sample, device=device, intraop_threads=threads, seconds=0.0, repeats=1, param_scale=param_scale
    )
    return measured.balance_by_size(partitions, len(parts[0]), checkpoint)


def predict(
    profile: Profile,
    balance: Iterable[int],
    chunks: int,
    checkpoint: str = "except_last",
    *,
    bandwidth: float = 0.0,
    copies: bool = False,
    schedule: str | None = None,
    stages_per_worker: int = 1,
    placement: Iterable[int] | str = "looped",
) -> Prediction:
    """Predicts the cost of a training step, the forward and backward of one mini-batch, by simulation.

    Args:
        profile: costs for micro-batches of the size that ``chunks`` gives.
        balance: number of layers of each stage.
        chunks: number of micro-batches per mini-batch.
        checkpoint: the checkpoint mode of the pipeline.
        bandwidth: bytes per second between devices; 0 for transfers without delay, as between CPU stages.
        copies: whether each transfer makes a copy on the receiver's device, as between GPUs.
        schedule: the schedule of ``step``; ``None`` for a forward and its backward.
        stages_per_worker, placement: as for :class:`gpipe.GPipe`.

    Raises:
        TypeError, ValueError: if the balance does not cut the profile's layers, or an option is not valid.
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"profile must be a Profile, as gpipe.balance.profile() returns, but is {type(profile)}")
    cut = check_balance(balance, len(profile.layers))
    options = _C.RunOptions(
        check_chunks(chunks),
        check_checkpoint(checkpoint),
        check_number(bandwidth, "bandwidth"),
        check_flag(copies, "copies"),
        _scheduling(schedule, stages_per_worker, placement, len(cut)),
    )
    return _C.predict(profile, cut, options)


def suggest(
    module: nn.Module,
    sample: Any,
    devices: Sequence[Device],
    *,
    chunks: Sequence[int] = (),
    checkpoints: Sequence[str] = ("never", "except_last", "always"),
    memory_limit: int = 0,
    bandwidth: float = 0.0,
    schedule: str | None = "auto",
    stages_per_worker: int = 1,
    seconds: float = 60.0,
    intraop_threads: int = 0,
    param_scale: float = 2.0,
    progress: Callable[[float], None] | None = None,
) -> Suggestion:
    """Measures a model at several micro-batch sizes. Searches for the schedule, placement, balance, number of chunks and
    checkpoint mode that train it fastest.

    Args:
        module: the model.
        sample: a mini-batch.
        devices: one per worker. The model is measured on the first; the others are assumed to be equally fast.
        chunks: numbers of chunks to try. Default: 1, 2, 4, .. 32, up to the number of samples.
        checkpoints: checkpoint modes to try.
        memory_limit: the most bytes per device, where each CPU worker counts as a device; 0 for no limit.
        bandwidth: bytes per second between devices; 0 for transfers without delay.
        schedule: the schedule of ``step``; ``'auto'`` to try all; ``None`` for a forward and its backward.
        stages_per_worker: as for :class:`gpipe.GPipe`. With ``'auto'``, 2 leaves only schedules with two stages per worker.
        seconds: approximate time limit for all measurements, in seconds.
        intraop_threads, param_scale, progress: as for :func:`profile`.

    Returns:
        The candidates, best first. If none fits: the device, the missing bytes and what would help.

    Raises:
        ValueError: if there are fewer layers than stages; other errors as :func:`profile`.
    """
    placed = _check_devices(devices)
    counts = [check_chunks(number) for number in _check_list("chunks", chunks)]
    modes = [check_checkpoint(mode) for mode in _check_list("checkpoints", checkpoints)]
    options = _options(1, intraop_threads, seconds, _REPEATS, param_scale, progress)
    limits = check_whole(memory_limit, "memory_limit", bits=63), check_number(bandwidth, "bandwidth")
    scheduling = _scheduling(schedule, stages_per_worker, "looped", 0)
    with _measured(module, sample, placed[0]) as (layers, batch):
        return _C.suggest(layers, batch, list(map(str, placed)), counts, modes, *limits, scheduling, options)


def refine(
    module: nn.Module, sample: Any, devices: Sequence[Device], suggestion: Suggestion, candidates: int = 3
) -> list[tuple[Candidate, float]]:
    """Runs the first candidates of a suggestion that fit.

    Args:
        module, sample, devices: as for :func:`suggest`.
        suggestion: what :func:`suggest` returned for them.
        candidates: the most candidates to run.

    Returns:
        Candidates with their measured seconds per step, fastest first.

    Raises:
        ValueError: unless ``candidates`` is positive.
        RuntimeError: if nothing fits, or a layer fails.
    """
    if not isinstance(suggestion, Suggestion):
        raise TypeError(f"suggestion must be a Suggestion, as suggest() returns, but is {type(suggestion)}")
    placed = _check_devices(devices)
    most = check_whole(candidates, "candidates")
    with _measured(module, sample, placed[0]) as (layers, batch):
        return _C.refine(layers, batch, list(map(str, placed)), suggestion, most)


def plan_cluster(
    cluster: Cluster,
    profiles: Sequence[Profile],
    samples: int,
    *,
    checkpoints: Sequence[str] = ("never", "except_last", "always"),
    schedule: str | None = "auto",
) -> ClusterPlan:
    """Chooses how to train a model on all devices of a cluster: the number of replicas, and for each replica the
    schedule, placement, balance, number of chunks and checkpoint mode.

    Args:
        cluster: the devices, memory and network.
        profiles: of one model, on a device of the cluster, each for micro-batches of another size. A replica's share of
            the mini-batch is cut into micro-batches of one of these sizes.
        samples: number of samples in the mini-batch, which the replicas share equally.
        checkpoints: checkpoint modes to try.
        schedule: the schedule of ``step``; ``'auto'`` to try all; ``None`` for a forward and its backward.

    Returns:
        The best candidate for each number of replicas, best first. Every figure is predicted.

    Raises:
        TypeError, ValueError: if an option is not valid, or no number of replicas suits the devices, samples and layers.
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, as Cluster.from_json() returns, but is {type(cluster)}")
    listed = _check_list("profiles", profiles)
    for each in listed:
        if not isinstance(each, Profile):
            raise TypeError(f"profiles must be Profiles, as gpipe.balance.profile() returns, but one is {type(each)}")
    return _C.plan_cluster(
        cluster,
        listed,
        check_whole(samples, "samples", bits=63),
        [check_checkpoint(mode) for mode in _check_list("checkpoints", checkpoints)],
        check_scheduling("" if schedule is None else schedule, 1, "looped", 0)[0],
    )


def _check_list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of values to try, but is {shown(values)}")
    return list(values)


def _scheduling(schedule: object, stages_per_worker: object, placement: object, stages: int) -> _C.Scheduling:
    name = "" if schedule is None else schedule
    return _C.Scheduling(*check_scheduling(name, stages_per_worker, placement, stages))


def _check_partitions(partitions: object, module: nn.Sequential) -> int:
    number = check_whole(partitions, "partitions")
    verify_module(module)
    _C.check_stages(number, len(module))
    return number


def _options(
    workers: object,
    intraop_threads: object,
    seconds: object,
    repeats: object,
    param_scale: object,
    progress: Callable[[float], None] | None,
) -> _C.ProfileOptions:
    return _C.ProfileOptions(
        check_whole(workers, "workers"),
        check_whole(intraop_threads, "intraop_threads"),
        check_number(seconds, "seconds"),
        check_whole(repeats, "repeats"),
        check_number(param_scale, "param_scale"),
        None if progress is None else check_function(progress, "progress", "the completed share"),
    )


def _check_devices(devices: object) -> list[torch.device]:
    if placed := check_devices(devices):
        return placed
    raise ValueError("devices is empty; give at least one device")


def _device(device: Device | None) -> torch.device:
    return arrange_workers(None, 1).devices[0] if device is None else torch.device(device)


@contextmanager
def _measured(module: nn.Module, sample: object, device: torch.device) -> Iterator[tuple[list[Any], Any]]:
    """Gives a block the layers of a model in training mode, and a sample with its tensors on a device. Restores modes, and
    parameters and buffers that layers replaced."""
    model = as_sequential(module, sample)
    verify_module(model)
    verify_skippables(model)
    tensors, structure = take_apart(sample)
    states = [(each, each.training, dict(each._parameters), dict(each._buffers)) for each in model.modules()]
    model.train()
    try:
        moved = (tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in tensors)
        yield layers_of(model), structure.build(moved)
    finally:
        for each, training, parameters, buffers in states:
            each.training = training
            if not isinstance(each, torch.jit.ScriptModule):  # a scripted module cannot replace them
                each._parameters.update(parameters)
                each._buffers.update(buffers)
            if isinstance(each, DeferredBatchNorm):
                each.reset()
