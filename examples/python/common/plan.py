"""How a model is to be cut and run, and what a step is predicted to cost."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

import gpipe
from common.autocast import autocast
from common.progress import show_percent
from gpipe.balance import Prediction, Profile, Suggestion, predict, profile, suggest

# That measuring may take.
_SECONDS = 5.0
_AUTO_SECONDS = 40.0

_ADAM = 4.0  # bytes that training needs for each byte of a parameter


@dataclass
class Plan:
    balance: list[int]
    chunks: int
    checkpoint: str
    profile: Profile
    prediction: Prediction | None  # none for micro-batches of a single image, which are measured as two
    suggestion: Suggestion | None = None  # what was compared, if anything


def check_pipeline(model: nn.Sequential, options: Namespace) -> None:
    """Refuses, before anything is written or measured, what a pipeline would refuse."""
    if options.stages > len(model):
        raise ValueError(f"--stages is {options.stages}, but the model has {len(model)} layers")
    if options.layers and sum(options.layers) != len(model):
        raise ValueError(f"--balance sums to {sum(options.layers)}, but the model has {len(model)} layers")
    stand_in = nn.Sequential(*(nn.Identity() for _ in options.devices))
    gpipe.GPipe(stand_in, [1] * len(stand_in), devices=options.devices)


def make_plan(model: nn.Sequential, options: Namespace, image_shape: Sequence[int]) -> Plan:
    """Measures the model for images (C, H, W) and plans. The options' chunks and checkpoint mode are kept, unless the
    balance is "auto"."""
    devices = options.devices
    copies = len(set(devices)) > 1
    with autocast(options.amp, devices[:1]):
        if options.balance == "auto":
            batch = torch.full((options.batch_size, *image_shape), 0.5)
            suggestion = suggest(
                model, batch, devices, seconds=_AUTO_SECONDS, param_scale=_ADAM, progress=show_percent
            )
            best = suggestion.best
            measured = suggestion.profile_of(best)
            predicted = predict(measured, best.balance, best.chunks, best.checkpoint, copies=copies)
            return Plan(best.balance, best.chunks, best.checkpoint, measured, predicted, suggestion)

        sizes = [len(part) for part in torch.empty(options.batch_size).chunk(options.chunks)]
        samples = max(2, sizes[0])  # batch norm may need two
        sample = torch.full((samples, *image_shape), 0.5)
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
        prediction = predict(measured, balance, len(sizes), options.checkpoint, copies=copies)
    return Plan(balance, len(sizes), options.checkpoint, measured, prediction)


def make_pipe(model: nn.Sequential, options: Namespace, plan: Plan) -> gpipe.GPipe:
    """The pipeline that was planned."""
    return gpipe.GPipe(model, plan.balance, devices=options.devices, chunks=plan.chunks, checkpoint=plan.checkpoint)


def print_plan(name: str, pipe: gpipe.GPipe, plan: Plan) -> None:
    """The profile, what was compared if anything, the cut, the prediction."""
    print(f"each layer, for a micro-batch of {plan.profile.samples} on {plan.profile.device}:")
    print(plan.profile.table(plan.balance), end="")
    if plan.suggestion:
        print(f"ways to run it, as predicted:\n{plan.suggestion}", end="")
    print(f"model: {name}, {len(pipe)} layers, {_count(pipe)} parameters")
    for number, (stage, device) in enumerate(zip(pipe.partitions, pipe.devices, strict=True)):
        print(f"stage {number}: {pipe.balance[number]} layers, {_count(stage)} parameters, on {device}")
    if plan.prediction is None:
        print("no prediction for micro-batches of a single image", flush=True)
        return
    print(f"prediction, for {plan.chunks} micro-batches, checkpoint {plan.checkpoint}:")
    print(plan.prediction, end="", flush=True)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
