"""``python -m gpipe suggest MODULE:FUNCTION``: profiles a model and prints the fastest way to run it, on devices or a cluster."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpipe
from gpipe.balance import Candidate, Cluster, ClusterPlan, Profile, Suggestion, plan_cluster, profile, suggest
from gpipe.exported.conversion import as_sequential
from gpipe.structure import take_apart

Progress = Callable[[float], None] | None

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers, such as 8,16")
    return [int(part) for part in text.split(",")]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+\.?\d*)\s*([KMGT]?I?)B?", text.strip().upper())
    if not found or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size, such as 6GB or 6GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpipe", description="Profiles models and finds the fastest way to run them."
    )
    parser.add_argument("--version", action="version", version=gpipe.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("suggest", help="find the fastest balance, chunks and checkpoint mode")
    command.add_argument(
        "factory",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="returns a module, or a tuple of it and a mini-batch; left out with --profile",
    )
    command.add_argument(
        "--input", type=_numbers, metavar="N,..", help="shape of a random mini-batch, e.g. 64,3,224,224"
    )
    command.add_argument(
        "--devices", metavar="LIST", help="one per worker, e.g. cuda:0,cuda:1; default: the GPUs, or 2 CPU workers"
    )
    command.add_argument(
        "--chunks", type=_numbers, default=[], metavar="N,..", help="numbers to try; default: 1, 2, 4, .. 32"
    )
    command.add_argument("--memory-limit", type=_bytes, default=0, metavar="SIZE", help="per device, e.g. 6GB or 6GiB")
    command.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S", help="between devices, in GB/s")
    command.add_argument(
        "--schedule",
        default="auto",
        help="of step(): gpipe, 1f1b, ... or @FILE; forward: a forward, then its backward; auto: try all (default: auto)",
    )
    command.add_argument("--stages-per-worker", type=int, default=1, metavar="N", help="default: 1")
    command.add_argument("--seconds", type=float, default=60.0, help="approximate time for measuring (default: 60)")
    command.add_argument(
        "--param-scale",
        type=float,
        default=4.0,
        help="bytes per byte of a parameter, with gradient and optimizer state: SGD 2, Adam 4 (default: 4)",
    )
    command.add_argument("--layers", action="store_true", help="also print the profile of each layer")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--cluster", metavar="FILE", help="JSON file of a cluster: also choose the number of replicas, for all its devices"
    )
    command.add_argument(
        "--batch-size", type=int, metavar="N", help="with --cluster: samples per mini-batch; default: those of the mini-batch"
    )
    command.add_argument(
        "--micro-batch",
        type=_numbers,
        metavar="N,..",
        help="with --cluster: numbers of samples per micro-batch to measure and try; default: 1, 2, 4, .. 32",
    )
    command.add_argument(
        "--profile",
        type=lambda text: text.split(","),
        metavar="FILE,..",
        help="with --cluster: files written by Profile.to_json() or gpipe-balance, one per size of micro-batch; use them "
        "instead of measuring",
    )
    command.set_defaults(parser=command)
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuses flags that do not go together."""
    command: argparse.ArgumentParser = options.parser

    def given(*flags: str) -> list[str]:
        names = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
        return [flag for flag in flags if getattr(options, names[flag]) != command.get_default(names[flag])]

    def exclude(flag: str, *flags: str) -> None:
        for other in given(*flags):
            command.error(f"{flag} excludes {other}")

    if options.cluster:
        exclude("--cluster", "--chunks", "--memory-limit", "--bandwidth", "--stages-per-worker", "--layers")
        if options.devices and "," in options.devices:
            command.error(f"--cluster needs one device to measure on, but --devices is {options.devices}")
    else:
        for flag in given("--batch-size", "--micro-batch", "--profile"):
            command.error(f"{flag} requires --cluster")
    if options.profile:
        exclude("--profile", "--input", "--micro-batch", "--devices", "--seconds", "--param-scale")
        if options.factory:
            command.error(f"--profile excludes {options.factory}")
        if options.batch_size is None:
            command.error("--profile requires --batch-size")
    elif not options.factory:
        command.error("the following arguments are required: MODULE:FUNCTION")


def _load(factory: str) -> tuple[nn.Module, Any]:
    module_name, colon, function_name = factory.partition(":")
    if not (module_name and colon and function_name):
        raise SystemExit(f"error: '{factory}' is not of the form MODULE:FUNCTION")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"error: cannot load '{factory}': {error}") from None
    model = function() if callable(function) and not isinstance(function, nn.Module) else None
    model, batch = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(model, nn.Module):
        raise SystemExit(f"error: {factory} must be a function that returns a module, or a tuple (module, mini-batch)")
    return model, batch


def _devices(text: str | None) -> list[str]:
    if text:
        return text.split(",")
    gpus = torch.cuda.device_count()
    return [f"cuda:{index}" for index in range(gpus)] or ["cpu", "cpu"]


def _print(suggestion: Suggestion, devices: list[str], layers: bool) -> None:
    first = suggestion.candidates[0]
    if layers:
        print(suggestion.profile_of(first).table(first.balance))
    print(suggestion, end="")
    if suggestion.fits:
        schedule = f", schedule={first.schedule!r}" if first.schedule else ""
        stages_per_worker = len(first.placement) // len(first.bytes)
        placed = {"stages_per_worker": f", stages_per_worker={stages_per_worker}", "v": ", placement='v'", "placement": f", placement={first.placement}"}
        schedule += placed.get(first.placed_by, "")
        print(
            f"\npipe = gpipe.GPipe(model, {first.balance}, devices={devices}, chunks={first.chunks}, "
            f"checkpoint={first.checkpoint!r}{schedule})"
        )


def _fields(candidate: Candidate) -> dict[str, Any]:
    names = ("balance", "chunks", "checkpoint", "schedule", "placement", "seconds", "bubble", "bytes", "fits", "crossing")
    return {name: getattr(candidate, name) for name in (*names, "replicas", "reduction")}


def _print_json(found: Suggestion | ClusterPlan) -> None:
    fields: dict[str, Any] = {"reason": found.reason, "candidates": [_fields(candidate) for candidate in found.candidates]}
    if isinstance(found, Suggestion):
        fields["unpartitioned"] = _fields(found.unpartitioned) if found.unpartitioned else None
    print(json.dumps(fields))


def _progress(part: float) -> None:
    print(f"\rmeasuring {part:4.0%}", end="" if part < 1 else "\r\033[K", file=sys.stderr, flush=True)


def _schedule(options: argparse.Namespace) -> str | None:
    return None if options.schedule == "forward" else str(options.schedule)


def _model_and_batch(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    model, batch = _load(options.factory)
    if options.input is not None:
        batch = torch.randn(options.input)
    if batch is None:
        raise SystemExit(f"error: {options.factory} returns no mini-batch; give its shape with --input")
    return model, batch


def _suggest(options: argparse.Namespace, model: nn.Module, batch: Any, progress: Progress) -> bool:
    devices = _devices(options.devices)
    suggestion = suggest(
        model,
        batch,
        devices,
        chunks=options.chunks,
        memory_limit=options.memory_limit,
        bandwidth=options.bandwidth * 1e9,
        schedule=_schedule(options),
        stages_per_worker=options.stages_per_worker,
        seconds=options.seconds,
        param_scale=options.param_scale,
        progress=progress,
    )
    if options.json:
        _print_json(suggestion)
    else:
        _print(suggestion, devices, options.layers)
    return suggestion.fits


def _profiles(options: argparse.Namespace, model: nn.Module, batch: Any, progress: Progress) -> list[Profile]:
    """Measures the model for micro-batches of the sizes to try."""
    tensors, structure = take_apart(batch)
    samples = len(tensors[0])
    sizes = options.micro_batch or [size for size in (1, 2, 4, 8, 16, 32) if size <= samples]
    for size in sizes:
        if not 1 <= size <= samples:
            raise ValueError(f"--micro-batch must be from 1 to the mini-batch's {samples} samples, but is {size}")
    sequential = as_sequential(model, batch)
    return [
        profile(
            sequential,
            structure.build(tensor[:size] for tensor in tensors),
            device=_devices(options.devices)[0],
            seconds=options.seconds / len(sizes),
            param_scale=options.param_scale,
            progress=progress,
        )
        for size in sizes
    ]


def _plan(options: argparse.Namespace, model: nn.Module, batch: Any, progress: Progress) -> bool:
    cluster = Cluster.from_json(Path(options.cluster).read_text())
    if options.profile:
        profiles = [Profile.from_json(Path(path).read_text()) for path in options.profile]
    else:
        profiles = _profiles(options, model, batch, progress)
    samples = len(take_apart(batch)[0][0]) if options.batch_size is None else options.batch_size
    plan = plan_cluster(cluster, profiles, samples, schedule=_schedule(options))
    if options.json:
        _print_json(plan)
    else:
        print(plan, end="")
    return plan.fits


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    model, batch = _model_and_batch(options) if options.factory else (nn.Identity(), None)
    run = _plan if options.cluster else _suggest
    try:
        return 0 if run(options, model, batch, _progress if sys.stderr.isatty() else None) else 1
    except (AssertionError, IndexError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
