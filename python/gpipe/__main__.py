"""``python -m gpipe suggest module:factory``: measures a model of yours and says how to run it."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import gpipe
from gpipe.balance import Suggestion, suggest

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+)\s*([KMGT]?I?)B?", text.strip().upper())
    if not found or found[2] not in _UNITS:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[found[2]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpipe", description="Measures models and says how to run them.")
    parser.add_argument("--version", action="version", version=gpipe.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("suggest", help="the fastest balance, chunks and checkpoint mode of a model")
    command.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="returns the model, a nn.Sequential; or the model and a mini-batch, as the pipeline's input",
    )
    command.add_argument(
        "--input", type=_numbers, metavar="N,..", help="shape of a mini-batch of random numbers, as 64,3,224,224"
    )
    command.add_argument("--devices", metavar="LIST", help="one a stage: cuda:0,cuda:1; default: the GPUs, or 2 CPUs")
    command.add_argument("--chunks", type=_numbers, default=[], metavar="N,..", help="to try; default: 1, 2, 4, .. 32")
    command.add_argument("--memory-limit", type=_bytes, default=0, metavar="SIZE", help="of a device, as 6GB")
    command.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S", help="between devices")
    command.add_argument("--seconds", type=float, default=60.0, help="that measuring may take, about (default: 60)")
    command.add_argument(
        "--param-scale", type=float, default=4.0, help="bytes for each of a parameter: SGD 2, Adam 4 (default: 4)"
    )
    command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _load(factory: str) -> tuple[nn.Sequential, Any]:
    module_name, colon, function_name = factory.partition(":")
    if not (module_name and colon and function_name):
        raise SystemExit(f"error: '{factory}' is not MODULE:FUNCTION")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"error: cannot load '{factory}': {error}") from None
    made = function()
    return made if isinstance(made, tuple) else (made, None)


def _devices(text: str | None) -> list[str]:
    if text:
        return text.split(",")
    gpus = torch.cuda.device_count()
    return [f"cuda:{index}" for index in range(gpus)] or ["cpu", "cpu"]


def _print(suggestion: Suggestion, as_json: bool) -> None:
    if not as_json:
        print(suggestion, end="")
        return
    names = ("balance", "chunks", "checkpoint", "seconds", "bubble", "bytes", "fits")
    candidates = [{name: getattr(candidate, name) for name in names} for candidate in suggestion.candidates]
    print(json.dumps({"candidates": candidates, "reason": suggestion.reason}))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, batch = _load(options.factory)
    if options.input is not None:
        batch = torch.randn(options.input)
    if batch is None:
        raise SystemExit(f"error: {options.factory} returns no mini-batch; give --input")
    devices = _devices(options.devices)

    def progress(part: float) -> None:
        print(f"\rmeasuring {part:4.0%}", end="" if part < 1 else "\r\033[K", file=sys.stderr, flush=True)

    try:
        suggestion = suggest(
            model,
            batch,
            devices,
            chunks=options.chunks,
            memory_limit=options.memory_limit,
            bandwidth=options.bandwidth * 1e9,
            seconds=options.seconds,
            param_scale=options.param_scale,
            progress=progress if sys.stderr.isatty() else None,
        )
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    _print(suggestion, options.json)
    return 0 if suggestion.fits else 1


if __name__ == "__main__":
    sys.exit(main())
