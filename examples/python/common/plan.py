"""How to cut and run a model, and the predicted cost of a step."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import gpipe
from common.autocast import autocast
from common.progress import show_percent
from common.units import bytes_to_text, seconds_to_text
from gpipe.balance import Prediction, Profile, Suggestion, predict, profile, suggest

# The time that profiling takes.
_SECONDS = 5.0
_AUTO_SECONDS = 40.0

_ADAM = 4.0  # bytes that training needs per byte of a parameter


@dataclass
class Plan:
    balance: list[int]
    chunks: int
    checkpoint: str
    schedule: str  # a name, or @FILE
    profile: Profile
    prediction: Prediction | None  # none for micro-batches of a single image, which are measured as two
    suggestion: Suggestion | None = None  # the plans that --balance auto compared
    choice: str = "auto"  # how the balance was chosen, such as "by-time"
    placement: list[int] | None = None  # with --schedule auto; else as the options say


def check_pipeline(model: nn.Sequential, options: Namespace) -> None:
    """Checks devices, stages and layers as a pipeline does, before anything is written or measured.

    Raises:
        ValueError: for what a pipeline refuses.
    """
    if options.stages > len(model):
        raise ValueError(f"--stages is {options.stages}, but the model has {len(model)} layers")
    if options.layers and sum(options.layers) != len(model):
        raise ValueError(f"--balance sums to {sum(options.layers)}, but the model has {len(model)} layers")
    stand_in = nn.Sequential(*(nn.Identity() for _ in range(options.stages)))
    pipe = gpipe.GPipe(stand_in, [1] * len(stand_in), chunks=options.chunks, **_pipe_options(options))
    _try_step(pipe, options.batch_size)


def check_last_mini_batch(options: Namespace, training_images: int) -> None:
    """Checks that the schedule fits the last mini-batch of an epoch, which can have fewer micro-batches.

    Raises:
        ValueError: if it does not.
    """
    rest = training_images % options.batch_size
    if rest == 0:
        return
    stand_in = nn.Sequential(*(nn.Identity() for _ in range(options.stages)))
    chunks = len(torch.empty(options.batch_size).chunk(options.chunks))
    pipe = gpipe.GPipe(stand_in, [1] * len(stand_in), chunks=chunks, **_pipe_options(options))
    try:
        _try_step(pipe, rest)
    except ValueError as error:
        raise ValueError(
            f"the last mini-batch of an epoch has {rest} of {options.batch_size} images: {error}"
        ) from None


def _try_step(pipe: gpipe.GPipe, images: int) -> None:
    with torch.random.fork_rng(devices=[]):  # a step draws a seed
        input = torch.zeros(images, requires_grad=True)
        pipe.step(input, input.detach(), lambda output, target: output.sum(), reduction="sum")


def _pipe_options(options: Namespace) -> dict[str, Any]:
    """The arguments of GPipe that place stages on workers and devices. Without the schedule if it is to be chosen."""
    if options.schedule == "auto":
        return {"devices": options.devices}
    return {
        "devices": options.devices,
        "schedule": options.schedule,
        "stages_per_worker": options.stages_per_worker,
    }


def make_plan(model: nn.Sequential, options: Namespace, example: Any) -> Plan:
    """Measures the model, and plans. Keeps the options' chunks and checkpoint mode, unless the balance is "auto".

    Args:
        example: an input of the model with a single image.
    """
    devices = options.devices
    copies = len(set(devices)) > 1
    scheduling = {"schedule": options.schedule, "stages_per_worker": options.stages_per_worker}
    with autocast(options.amp, devices[:1]):
        if options.balance == "auto":
            batch = _repeated(example, options.batch_size)
            suggestion = suggest(
                model,
                batch,
                devices,
                seconds=_AUTO_SECONDS,
                param_scale=_ADAM,
                progress=show_percent,
                **scheduling,
            )
            best = suggestion.best
            measured = suggestion.profile_of(best)
            scheduling = {"schedule": best.schedule, "placement": best.placement}
            predicted = predict(measured, best.balance, best.chunks, best.checkpoint, copies=copies, **scheduling)
            choice = f"auto: the fastest of {len(suggestion.candidates)} plans"
            placement = best.placement if options.schedule == "auto" else None
            return Plan(
                best.balance,
                best.chunks,
                best.checkpoint,
                best.schedule,
                measured,
                predicted,
                suggestion,
                choice,
                placement,
            )

        sizes = [len(part) for part in torch.empty(options.batch_size).chunk(options.chunks)]
        samples = max(2, sizes[0])  # batch norm can need two
        sample = _repeated(example, samples)
        measured = profile(
            model,
            sample,
            device=devices[0],
            workers=sum(device.type == "cpu" for device in devices) or 1,
            seconds=_SECONDS,
            param_scale=_ADAM,
            progress=show_percent,
        )
    balance = options.layers
    if options.balance == "by-time":
        balance = measured.balance_by_time(options.stages, len(sizes), options.checkpoint, copies=copies)
    elif options.balance == "by-size":
        balance = measured.balance_by_size(options.stages, len(sizes), options.checkpoint, copies=copies)
    prediction = None
    if samples == sizes[0]:
        prediction = predict(measured, balance, len(sizes), options.checkpoint, copies=copies, **scheduling)
    choice = "as given" if options.layers else options.balance
    return Plan(
        balance, len(sizes), options.checkpoint, options.schedule, measured, prediction, choice=choice
    )


def _repeated(example: Any, count: int) -> Any:
    """An input of `count` equal images."""
    return tree_map(lambda tensor: tensor.repeat_interleave(count, dim=0), example)


def make_pipe(model: nn.Sequential, options: Namespace, plan: Plan) -> gpipe.GPipe:
    """The pipeline of a plan."""
    arguments = _pipe_options(options)
    if plan.placement:
        arguments |= {"schedule": plan.schedule, "placement": plan.placement}
    return gpipe.GPipe(model, plan.balance, chunks=plan.chunks, checkpoint=plan.checkpoint, **arguments)


def print_plan(name: str, pipe: gpipe.GPipe, plan: Plan, details: bool) -> None:
    """Prints the plan: balance, micro-batches, checkpoint mode, and the predicted time and memory per stage. With
    `details` it also prints the costs of each layer, and all plans that were compared."""
    if details:
        print("costs of each layer:")
        print(plan.profile.table(plan.balance), end="")
        if plan.suggestion:
            print(f"plans compared, as predicted:\n{plan.suggestion}", end="")
    balance = ",".join(map(str, plan.balance))
    print(f"plan: balance {balance} ({plan.choice}), {plan.chunks} micro-batches, checkpoint {plan.checkpoint}, "
        f"schedule {plan.schedule}")
    print(f"model: {name}, {len(pipe)} layers, {_count(pipe)} parameters")
    one_per_worker = pipe.placement == list(range(len(pipe.placement)))
    for number, (stage, worker) in enumerate(zip(pipe.partitions, pipe.placement, strict=True)):
        line = f"stage {number}: {pipe.balance[number]} layers, {_count(stage)} parameters, on "
        line += f"{pipe.devices[worker]}" if one_per_worker else f"worker {worker}, {pipe.devices[worker]}"
        if plan.prediction:
            line += f"; predicted: {seconds_to_text(plan.prediction.stages[number])} per micro-batch"
            if one_per_worker:
                line += f", {bytes_to_text(plan.prediction.bytes[number])}"
        print(line)
    if plan.prediction and not one_per_worker:
        print("predicted memory per worker:", ", ".join(map(bytes_to_text, plan.prediction.bytes)))
    if plan.prediction:
        bubble = f"bubble {100 * plan.prediction.bubble:.0f} %"
        print(f"predicted step: {seconds_to_text(plan.prediction.seconds)}, {bubble}", flush=True)
    else:
        print("no prediction: a micro-batch has a single image", flush=True)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
