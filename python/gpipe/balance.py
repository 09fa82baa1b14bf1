"""Finds where to cut a model. Measures its layers, computes the best balance and predicts the cost of a step.

    from gpipe.balance import balance_by_time
    balance = balance_by_time(2, model, sample)          # the sample is a micro-batch

    best = gpipe.plan(model, batch, ["cuda:0", "cuda:1"], memory="6GiB").best
    pipe = gpipe.GPipe(model, **best.arguments)

All functions leave the model and the random state unchanged. A model that is not a ``nn.Sequential`` is converted first by
:func:`gpipe.to_sequential`; do that once yourself if you call several functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from gpipe import _C, checks
from gpipe._C import LayerProfile, Plan, Plans, Prediction, Profile, SkipProfile, TieProfile
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.checks import Checkpoint, Checkpoints, Memory
from gpipe.exported.conversion import as_sequential
from gpipe.exported.exporter import mode, unchanged
from gpipe.partition import layers_of, verify_module
from gpipe.structure import first_micro_batch, take_apart
from gpipe.wrapper import ConvertedSequence, batch_first, entering

__all__ = [
    "LayerProfile",
    "Plan",
    "Plans",
    "Prediction",
    "Profile",
    "SkipProfile",
    "TieProfile",
    "balance_by_size",
    "balance_by_time",
    "plan",
    "predict",
    "profile",
]

Device = torch.device | int | str


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
    layer's name, if a layer fails, e.g. because the device's memory runs out.

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
    sample, micro_batches = micro_batch_of(model, input, chunks)
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
    checkpoint: Checkpoints = "except_last",
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
    scheduling = _C.Scheduling(*checks.check_scheduling("" if schedule is None else schedule, placement, len(cut)))
    return _C.predict(profile, cut, _C.RunOptions(chunks, checkpoint, bandwidth, copies, scheduling))


@checks.checks_arguments
def plan(
    model: nn.Module | Sequence[Profile],
    example: Any,
    devices: Sequence[Device] | int | None = None,
    *,
    memory: Memory | None = None,
    stages: int | None = None,
    balance: Iterable[int] | None = None,
    chunks: Any = None,
    checkpoint: Checkpoints | None = None,
    schedule: str = "auto",
    placement: Iterable[int] | str | None = None,
    replicas: int | None = 1,
    hosts: int = 1,
    bandwidth: float = 0.0,
    between: float | None = None,
    pilots: int = 3,
    seconds: float = 60.0,
    intraop_threads: int = 0,
    param_scale: float = 4.0,
    progress: Callable[[float], None] | None = None,
) -> Plans:
    """Plans how to train a model: the schedule, the placement, the number of micro-batches, the cut, and which layers are
    recomputed. Chooses what is fastest within the memory, except what is given. Returns the best plan of each schedule and
    number of micro-batches, best first; if none fits, also the device, the missing bytes and what would help.

    Measures the layers for micro-batches of several sizes, simulates, and runs the ``pilots`` best plans for a few steps.
    Leaves the model and the random state unchanged. Errors as for :func:`gpipe.balance.profile`.

    Args:
        model: the model; or profiles of it, for micro-batches of several sizes, if it is not to be measured.
        example: a mini-batch; its number of samples, if the model is given by profiles.
        devices: one per worker, or a number of devices that are like the first. Default: the GPUs, or two CPU workers. The
            model is measured on the first; the others are assumed to be equally fast.
        memory: the most bytes on each device, such as ``"6GiB"``, or a list of them; each CPU worker counts as a device.
        stages, balance, chunks, checkpoint, schedule, placement: what is given, as for :class:`gpipe.GPipe`. Several
            ``chunks`` are tried; default: 4, 8, 2, 16, 1 and 32, as far as the samples and the time allow. With a
            ``balance``, each stage is recomputed as a whole or not.
        replicas: the number of pipelines that share the devices and the mini-batch; ``None`` to choose it.
        hosts: each has an equal share of the devices, one after the other.
        bandwidth, between: bytes per second between two devices of a host, and of different hosts; 0 for no delay. Default
            of ``between``: ``bandwidth``.
        pilots: 0 to run no plan, as where the devices are elsewhere.
        seconds: approximate time limit for all measurements.
        param_scale: as for :func:`gpipe.balance.profile`.
    """
    few = checks.check_whole(devices, "devices", bits=16) if isinstance(devices, int) else None
    if few:
        placed = [_device(None)] * few
    elif devices is None or few == 0:
        placed = checks.arrange_workers(None, torch.cuda.device_count() or 2).devices
    elif not (placed := checks.check_devices(devices)):
        raise ValueError("devices is empty; give at least one device")
    if hosts < 1 or len(placed) % hosts:
        raise ValueError(f"hosts is {hosts}, which does not divide the {len(placed)} devices")
    per_host = len(placed) // hosts
    own = few is not None or placed[0].type == "cpu"  # each worker has its memory
    names = [f"{each} {i if own else i // per_host if hosts > 1 else ''}".strip() for i, each in enumerate(placed)]
    counts = checks.check_list(chunks, "chunks") if isinstance(chunks, Iterable) else [] if chunks is None else [chunks]
    counts = [checks.check_chunks(number) for number in counts]
    cut = [] if balance is None else list(balance)
    checks.check_text(schedule, "schedule")
    place: list[int] = []
    if placement is not None:
        wanted = stages or len(cut) or len(placed) * (2 if placement == "v" else 1)
        place = checks.check_scheduling(schedule, placement, wanted)[1] or [i % len(placed) for i in range(wanted)]
    schedulings = [_C.Scheduling(schedule, place)] if schedule != "auto" or place else []
    limits = [] if memory is None else checks.check_memory(memory)
    profiles = model if isinstance(model, (list, tuple)) else ()
    for each in profiles:
        checks.check_is(each, "model", Profile, "a model, or Profiles, as gpipe.balance.profile() returns")
    samples = checks.check_whole(example, "example", bits=63) if profiles else 1
    network = per_host, bandwidth, bandwidth if between is None else between, placed[0].type != "cpu"
    options = _C.PlanOptions(
        samples, names, limits, replicas or 0, *network, counts, cut, checkpoint, stages or 0, schedulings
    )
    if isinstance(model, (list, tuple)):
        return _C.plan_profiles(model, options)
    profiling = _C.ProfileOptions(1, intraop_threads, seconds, 9, param_scale, _progress(progress))
    with _measured(cast(nn.Module, model), example, placed[0]) as (layers, batch):
        return _C.plan_model(layers, batch, placed, options, counts, pilots if replicas == 1 else 0, profiling)


def micro_batch_of(model: nn.Module, input: Any, chunks: int) -> tuple[Any, int]:
    """Returns the first micro-batch of a model's input, and the number of micro-batches."""
    batch_dim = model.batch_dim if isinstance(model, ConvertedSequence) else 0
    sample, micro_batches = first_micro_batch(batch_first(input, batch_dim), chunks)
    return batch_first(sample, batch_dim), micro_batches


def _progress(function: object) -> Callable[[float], None] | None:
    return None if function is None else checks.check_function(function, "progress", "the completed share")


def _checked_model(partitions: int, module: nn.Module, input: Any) -> nn.Sequential:
    model = as_sequential(module, input)
    verify_module(model)
    _C.check_stages(partitions, len(model))
    return model


def _device(device: Device | None) -> torch.device:
    return checks.arrange_workers(None, 1).devices[0] if device is None else torch.device(device)


@contextmanager
def _measured(module: nn.Module, sample: object, device: torch.device) -> Iterator[tuple[list[Any], Any]]:
    """Gives a block the layers of a model in training mode, and a sample with its tensors on a device. Restores modes, and
    attributes, parameters and buffers that layers replaced."""
    model = as_sequential(module, sample)
    verify_module(model)
    tensors, structure = take_apart(entering(model, sample))
    with unchanged(vars(model).get("module", model).modules()):
        moved = (tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in tensors)
        with mode(model, True):
            yield layers_of(model), structure.build(moved)
    for each in model.modules():
        if isinstance(each, DeferredBatchNorm):
            each.reset()
