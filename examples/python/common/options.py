"""Flags: those of examples/common's programs."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

import gpipe


_MAX_COUNT = 1 << 20  # more than anybody needs


class Parser(argparse.ArgumentParser):
    """Refuses in one line, which begins as those of the C++ programs do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {re.sub('^argument (-./)?', '', message)}\n")


def make_parser(description: str) -> Parser:
    return Parser(
        description=description,
        usage="%(prog)s [OPTIONS]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=120),
        allow_abbrev=False,
    )


def add_training_options(parser: Parser, **defaults: Any) -> None:
    """What every training program can be told."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("-b", "--batch-size", type=integer(1, _MAX_COUNT), metavar="N", help=f"images in a mini-batch {default}")
    add("-o", "--output", type=path_name, metavar="DIR", help=f"directory for what the run writes {default}")
    add(
        "--overwrite",
        action="store_true",
        help="replace an earlier training in --output; without it that is refused",
    )
    add("-e", "--epochs", type=integer(1, 1_000_000), metavar="N", help=f"passes over the training images {default}")
    add("-l", "--learning-rate", type=positive, metavar="X", help=f"of Adam, at the start {default}")
    add(
        "--schedule",
        choices=("cosine", "plateau"),
        default="cosine",
        help="of the learning rate, by epoch: cosine, falling towards 0 after the last; plateau, a tenth whenever the "
        f"validation score has not risen for 5 {default}",
    )
    add("--clip", type=non_negative, default=0.0, metavar="X", help=f"largest norm of the gradient; 0 for any {default}")
    add("--amp", action="store_true", help="compute in bfloat16 where that is safe (autocast)")
    add(
        "--seed",
        type=integer(0, 2**64 - 1),
        default=0,
        metavar="N",
        help=f"of weights, order and what is drawn {default}",
    )
    add(
        "--resume",
        type=path_name,
        metavar="FILE",
        help="snapshot to go on from, as if it had never stopped; --epochs may be more",
    )
    add(
        "-f",
        "--load",
        type=path_name,
        metavar="FILE",
        help="snapshot to take the weights of, when there is none to resume",
    )
    add = parser.add_argument_group("pipeline").add_argument
    add(
        "--stages",
        type=integer(1, 1024),
        metavar="N",
        help="parts that the model is cut into, one a device (default: 2)",
    )
    add(
        "--balance",
        default="by-time",
        metavar="HOW",
        help="by-time, by-size: stages of equal time or memory, as measured; auto: the fastest of all balances, chunks "
        f"and checkpoint modes; or layers in each stage, as 20,35 {default}",
    )
    add("--chunks", type=integer(1, _MAX_COUNT), default=2, metavar="N", help=f"micro-batches in a mini-batch {default}")
    add(
        "--devices",
        metavar="LIST",
        help="one a stage, as cuda:0,cuda:1, or one for all; without it the GPUs in turn, or the CPU",
    )
    add(
        "--checkpoint",
        choices=("never", "except_last", "always"),
        default="except_last",
        help=f"micro-batches that recompute instead of storing {default}",
    )
    add("--reuse-memory", action="store_true", help="keep the memory of CPU tensors for the next")
    add("--trace", type=path_name, metavar="FILE", help="write the timeline of one training step, for ui.perfetto.dev")
    parser.set_defaults(**defaults)


def parse(parser: Parser) -> argparse.Namespace:
    """The command line, with ``layers`` of each stage, if given, and a list of ``devices``."""
    options = parser.parse_args()
    try:
        options.layers = None if options.balance in ("by-time", "by-size", "auto") else _layers(options.balance)
        cuts = len(options.layers) if options.layers else options.stages or 2
        if options.stages not in (None, cuts):
            raise ValueError(f"--balance: has {cuts} stages, but --stages is {options.stages}; give one of them")
        options.stages = cuts
        options.devices = _devices(options.devices, cuts)
    except ValueError as error:
        parser.error(str(error))
    return options


def run_program(train: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs what returns the exit code. Errors become a line."""
    gpipe.reuse_cpu_memory(options.reuse_memory)
    try:
        code = train(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (IndexError, OSError, RuntimeError, ValueError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.strerror}: '{error.filename}'"
        if "in DataLoader worker process" in text:  # and a traceback
            text = text.strip().splitlines()[-1].partition(": ")[2] or text
    print(f"error: {text}", file=sys.stderr)
    return 1


def to_flag(value: float) -> str:
    """A number as the C++ programs write it: all its digits, in the shorter notation."""
    fixed = np.format_float_positional(value, trim="-")
    return min(fixed, np.format_float_scientific(value, trim="-", exp_digits=2), key=len)


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number from low to high."""

    def parse_integer(text: str) -> int:
        if text.isascii() and text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")

    return parse_integer


def real(low: float, high: float) -> Callable[[str], float]:
    """A number from low to high."""

    def parse_real(text: str) -> float:
        value = _to_number(text)
        if low <= value <= high:
            return value
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low:g} to {high:g}")

    return parse_real


def positive(text: str) -> float:
    value = _to_number(text)
    if 0 < value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a finite number above 0")


def non_negative(text: str) -> float:
    value = _to_number(text)
    if 0 <= value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a finite number of at least 0")


def path_name(text: str) -> Path:
    if text:
        return Path(text)
    raise argparse.ArgumentTypeError("'' is not a path")


def _to_number(text: str) -> float:
    """Not a number for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _layers(text: str) -> list[int]:
    for part in text.split(","):
        if not (part.isascii() and part.isdecimal() and 1 <= int(part) <= _MAX_COUNT):
            raise ValueError(
                f"--balance: '{part}' is neither auto, by-time or by-size nor a number of layers from 1 to "
                f"{_MAX_COUNT}; give those as 20,35"
            )
    return [int(part) for part in text.split(",")]


def _devices(text: str | None, stages: int) -> list[torch.device]:
    if text is None:
        gpus = torch.cuda.device_count()
        return [torch.device("cuda", stage % gpus) if gpus else torch.device("cpu") for stage in range(stages)]
    devices = []
    for part in text.split(","):
        try:
            devices.append(torch.device(part))
        except RuntimeError:
            raise ValueError(f"--devices: '{part}' is not a device; give cpu, cuda or cuda:N") from None
    if len(devices) == 1:
        devices *= stages
    if len(devices) != stages:
        raise ValueError(f"--devices: has {len(devices)} for {stages} stages; give one a stage, or one for all")
    return devices
