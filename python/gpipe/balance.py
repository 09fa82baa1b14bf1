"""Where to cut a model: measures what its layers cost, cuts it optimally, and says what a step will take.

    from gpipe.balance import balance_by_time
    balance = balance_by_time(2, model, sample)          # the sample is one micro-batch

    from gpipe.balance import suggest
    best = suggest(model, batch, ["cuda:0", "cuda:1"]).best
    pipe = gpipe.GPipe(model, best.balance, chunks=best.chunks, checkpoint=best.checkpoint)

A model is left as it was found: parameters, gradients, buffers, devices, modes and random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpipe import _C
from gpipe._C import Candidate, LayerProfile, Prediction, Profile, SkipProfile, Suggestion
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.checks import check_balance, check_checkpoint, check_chunks, check_devices, check_number, check_whole, place
from gpipe.pipeline import layers_of, verify_module
from gpipe.skip import verify_skippables
from gpipe.structure import take_apart

__all__ = [
    "Candidate",
    "LayerProfile",
    "Prediction",
    "Profile",
    "SkipProfile",
    "Suggestion",
    "balance_by_size",
    "balance_by_time",
    "predict",
    "profile",
    "suggest",
]

Device = torch.device | int | str
_REPEATS = 9


def profile(
    module: nn.Sequential,
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
    """Measures every layer of a model, in training mode, for micro-batches of the sample's size.

    Args:
        module: the model; it must not be used meanwhile.
        sample: one micro-batch, as the pipeline's input.
        device: where to measure; without, a GPU if there is one, else the CPU.
        workers: stages that will run at the same time on that device: CPU stages slow each other.
        intraop_threads: threads that one operator of a CPU layer may use; 0: an equal share, as in a pipeline.
        seconds: after so many no further run is begun.
        repeats: runs that count, at most.
        param_scale: bytes that training needs for each byte of a parameter: 2 for plain SGD, 3 with momentum, 4 for
            Adam.
        progress: told what part of the work is done, from 0 to 1.

    Raises:
        ValueError: for options or a sample that make no sense.
        RuntimeError: when a layer fails, which it names, or does not fit the device alone.
    """
    options = _options(workers, intraop_threads, seconds, repeats, param_scale, progress)
    layers = _layers(module)
    with _training(module):
        return _C.profile(layers, _on(sample, _device(device)), options)


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """The balance whose slowest stage is fastest, where nothing is recomputed.

    Args:
        partitions: the number of stages.
        module: the model.
        sample: one micro-batch: its size moves the figures.
        timeout: seconds that measuring may take, about.
        device: where to measure; without, a GPU if there is one, else the CPU, with as many stages at once.

    Raises:
        ValueError: for fewer layers than partitions.
        RuntimeError: as :func:`profile`.
    """
    partitions = _check_partitions(partitions, module)
    where = _device(device)
    workers = partitions if where.type == "cpu" else 1
    measured = profile(module, sample, device=where, workers=workers, seconds=timeout)
    return measured.balance_by_time(partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    checkpoint: str = "except_last",
) -> list[int]:
    """The balance whose largest stage needs the fewest bytes, skips included.

    Args:
        partitions: the number of stages.
        module: the model.
        input: a mini-batch.
        chunks: micro-batches that it is cut into.
        param_scale: bytes that training needs for each byte of a parameter: 2 to 3 for SGD, 4 to 5 for Adam, 4 for
            Adadelta, 3 for Adagrad, 3 to 5 for RMSprop.
        device: where to measure; without, a GPU if there is one, else the CPU.
        checkpoint: the mode of the pipeline.

    Raises:
        ValueError: for fewer layers than partitions.
        RuntimeError: as :func:`profile`.
    """
    partitions = _check_partitions(partitions, module)
    chunks = check_chunks(chunks)
    checkpoint = check_checkpoint(checkpoint)
    tensors, structure = take_apart(input)
    parts = [tensor.chunk(chunks) for tensor in tensors]
    sample = structure.build(of_tensor[0] for of_tensor in parts)
    # What operators allocate depends on their threads: those that a stage will have.
    threads = max(1, torch.get_num_threads() // partitions)
    measured = profile(
        module, sample, device=device, intraop_threads=threads, seconds=0.0, repeats=1, param_scale=param_scale
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
) -> Prediction:
    """What a step will cost: forward and backward of one mini-batch, simulated.

    Args:
        profile: of micro-batches of the size that ``chunks`` makes.
        balance: how many layers each stage has.
        chunks: micro-batches of a mini-batch.
        checkpoint: the mode of the pipeline.
        bandwidth: bytes a second between devices; 0: what is sent is there at once, as between CPU stages.
        copies: what is sent is copied to the receiver's device, as between GPUs.

    Raises:
        ValueError: for a balance that does not cut the profile's layers, or options that make no sense.
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"expected a Profile, as gpipe.balance.profile() returns, but got {type(profile)}")
    options = _C.RunOptions(
        check_chunks(chunks), check_checkpoint(checkpoint), check_number(bandwidth, "bandwidth"), copies
    )
    return _C.predict(profile, check_balance(balance, len(profile.layers)), options)


def suggest(
    module: nn.Sequential,
    sample: Any,
    devices: Sequence[Device],
    *,
    chunks: Sequence[int] = (),
    checkpoints: Sequence[str] = ("never", "except_last", "always"),
    memory_limit: int = 0,
    bandwidth: float = 0.0,
    seconds: float = 60.0,
    intraop_threads: int = 0,
    param_scale: float = 2.0,
    progress: Callable[[float], None] | None = None,
) -> Suggestion:
    """Measures a model at several micro-batch sizes and searches balance, chunks and checkpoint mode for the fastest
    way to train it.

    Args:
        module: the model.
        sample: a mini-batch.
        devices: one for each stage; it is measured on the first, to which the others are taken to be alike.
        chunks: the numbers of chunks to try; without, 1, 2, 4, .. 32, as far as that is possible.
        checkpoints: the modes to try.
        memory_limit: the most bytes on one device, CPU stages counted as one each; 0: as many as it may take.
        bandwidth: bytes a second between devices; 0: what is sent is there at once.
        seconds: that all measuring may take, about.
        intraop_threads, param_scale, progress: as for :func:`profile`.

    Returns:
        The candidates, the best first; or why nothing fits: which device, how many bytes are missing, what would make
        it fit.

    Raises:
        ValueError: for options that make no sense, and for fewer layers than devices.
        RuntimeError: as :func:`profile`.
    """
    placed = check_devices(devices)
    if not placed:
        raise ValueError("give at least one device")
    for name, listed in (("chunks", chunks), ("checkpoints", checkpoints)):
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise TypeError(f"{name} must be a list, of those to try, but is {listed!r}")
    options = _options(1, intraop_threads, seconds, _REPEATS, param_scale, progress)
    layers = _layers(module)
    with _training(module):
        return _C.suggest(
            layers,
            _on(sample, placed[0]),
            [str(device) for device in placed],
            [check_chunks(number) for number in chunks],
            [check_checkpoint(mode) for mode in checkpoints],
            check_whole(memory_limit, "memory_limit"),
            check_number(bandwidth, "bandwidth"),
            options,
        )


def _check_partitions(partitions: object, module: nn.Sequential) -> int:
    number = check_whole(partitions, "partitions")
    if number < 1:
        raise ValueError(f"partitions must be a positive integer, but is {number}")
    verify_module(module)
    if len(module) < number:
        raise ValueError(f"sequence is shorter than intended partitions: {len(module)} layers, {number} partitions")
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
        progress,
    )


def _layers(module: nn.Sequential) -> list[Any]:
    verify_module(module)
    verify_skippables(module)
    return layers_of(module)


def _device(device: Device | None) -> torch.device:
    return place(None, 1)[0] if device is None else torch.device(device)


def _on(value: object, device: torch.device) -> Any:
    tensors, structure = take_apart(value)
    return structure.build(tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in tensors)


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """In training mode, which is undone. Tensors that layers replace by others come back."""
    states = [(each, each.training, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    module.train()
    try:
        yield
    finally:
        for each, training, parameters, buffers in states:
            each.training = training
            if not isinstance(each, torch.jit.ScriptModule):  # cannot replace them
                each._parameters.update(parameters)
                each._buffers.update(buffers)
            if isinstance(each, DeferredBatchNorm):
                each.reset()
