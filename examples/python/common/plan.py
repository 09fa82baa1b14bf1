"""How to cut and run a model, and the predicted cost of a step."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import gpipe
from common.autocast import autocast
from common.processes import is_first, part_sizes
from common.progress import show_percent
from common.units import bytes_to_text, seconds_to_text
from gpipe.balance import Prediction, Profile, Suggestion, predict, profile, suggest
from gpipe.checks import arrange_workers, place_stages
from gpipe.ranks import core_of

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
    profile: Profile | None = None  # none in processes that have not measured
    prediction: Prediction | None = None  # none also for micro-batches of a single image, which are measured as two
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
    _try_steps(pipe, options, options.batch_size)


def check_last_mini_batch(options: Namespace, training_images: int) -> None:
    """Checks that the schedule fits the last mini-batch of an epoch, which can have fewer micro-batches.

    Raises:
        ValueError: if it does not.
    """
    rest = training_images % options.batch_size
    if rest == 0:
        return
    stand_in = nn.Sequential(*(nn.Identity() for _ in range(options.stages)))
    chunks = len(torch.empty(part_sizes(options.ranks, options.batch_size)[0]).chunk(options.chunks))
    pipe = gpipe.GPipe(stand_in, [1] * len(stand_in), chunks=chunks, **_pipe_options(options))
    try:
        _try_steps(pipe, options, rest)
    except ValueError as error:
        raise ValueError(
            f"the last mini-batch of an epoch has {rest} of {options.batch_size} images: {error}"
        ) from None


def _try_steps(pipe: gpipe.GPipe, options: Namespace, images: int) -> None:
    for part in part_sizes(options.ranks, images):
        _try_step(pipe, max(1, part))  # an empty part has one micro-batch too


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
    """Measures the model, and plans. Keeps the options' chunks and checkpoint mode, unless the balance is "auto". The first
    process measures, as if it had all workers. The others get how to cut and run, without costs.

    Args:
        example: an input of the model with a single image.
    """
    shared = ("balance", "chunks", "checkpoint", "schedule", "placement")
    if not is_first(options.ranks):
        return Plan(**json.loads(options.ranks.share("")))
    plan = _measure(model, options, example)
    if options.ranks:
        options.ranks.share(json.dumps({name: getattr(plan, name) for name in shared}))
    return plan


def _measure(model: nn.Sequential, options: Namespace, example: Any) -> Plan:
    devices = options.devices
    copies = len(set(devices)) > 1
    images = part_sizes(options.ranks, options.batch_size)[0]
    scheduling = {"schedule": options.schedule, "stages_per_worker": options.stages_per_worker}
    with autocast(options.amp, devices[:1]):
        if options.balance == "auto":
            batch = _repeated(example, images)
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

        sizes = [len(part) for part in torch.empty(images).chunk(options.chunks)]
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
    if options.ranks:
        placement = plan.placement or place_stages(options.schedule, options.stages, options.stages_per_worker)
        workers = arrange_workers(None, options.stages, placement=placement, ranks=core_of(options.ranks))
        here = [rank == options.ranks.rank for rank in workers.ranks]
        arguments |= {"group": options.ranks, "devices": list(compress(options.devices, here))}
    if plan.placement:
        arguments |= {"schedule": plan.schedule, "placement": plan.placement}
    return gpipe.GPipe(
        model,
        plan.balance,
        chunks=plan.chunks,
        checkpoint=plan.checkpoint,
        deferred_batch_norm=True,  # so that scores depend neither on the replicas nor on the first one's images
        **arguments,
    )


def print_plan(name: str, model: nn.Sequential, pipe: gpipe.GPipe, plan: Plan, details: bool) -> None:
    """Prints the plan: balance, micro-batches, checkpoint mode, and the predicted time and memory per stage. With
    `details` it also prints the costs of each layer, and all plans that were compared. `model` has the layers of all
    processes. Prints nothing in a process that has not measured."""
    if plan.profile is None:
        return
    if details:
        print("costs of each layer:")
        print(plan.profile.table(plan.balance), end="")
        if plan.suggestion:
            print(f"plans compared, as predicted:\n{plan.suggestion}", end="")
    balance = ",".join(map(str, plan.balance))
    print(f"plan: balance {balance} ({plan.choice}), {plan.chunks} micro-batches, checkpoint {plan.checkpoint}, "
        f"schedule {plan.schedule}")
    print(f"model: {name}, {len(model)} layers, {_count(model)} parameters")
    one_per_worker = pipe.placement == list(range(len(pipe.placement)))
    layers = iter(model)
    for number, (count, worker) in enumerate(zip(pipe.balance, pipe.placement, strict=True)):
        stage = nn.ModuleList(islice(layers, count))
        line = f"stage {number}: {count} layers, {_count(stage)} parameters, on "
        device = pipe.devices[worker] if len(pipe.partitions[number]) else "another process"  # type: ignore[arg-type]
        line += f"{device}" if one_per_worker else f"worker {worker}, {device}"
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
