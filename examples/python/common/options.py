"""The flags of the training programs, the same as in C++."""

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
from common.files import remove_empty_directories
from common.processes import joined_processes
from gpipe.checks import place_stages

_MAX_COUNT = 1 << 20  # the upper limit of several flags


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, as the C++ programs do. A message that begins with "must" continues the flag's name."""

    def error(self, message: str) -> NoReturn:
        message = re.sub("^argument (-./)?", "", message).replace(": must ", " must ", 1)
        self.exit(2, f"error: {message}\n")


def make_parser(description: str) -> Parser:
    return Parser(
        description=description,
        usage="%(prog)s [OPTIONS]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=120),
        allow_abbrev=False,
    )


def add_training_options(parser: Parser, **defaults: Any) -> None:
    """The flags of every training program."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("-b", "--batch-size", type=integer(1, _MAX_COUNT), metavar="N", help=f"images per mini-batch {default}")
    add("-o", "--output", type=path_name, metavar="DIR", help=f"folder for the output files {default}")
    add(
        "--overwrite",
        action="store_true",
        help="replace an earlier training in --output; otherwise it is refused",
    )
    add("-e", "--epochs", type=integer(1, 1_000_000), metavar="N", help=f"passes over the training images {default}")
    add("-l", "--learning-rate", type=positive, metavar="X", help=f"learning rate of Adam at the start {default}")
    add(
        "--learning-rate-schedule",
        choices=("cosine", "plateau"),
        default="cosine",
        help="learning rate by epoch: cosine falls towards 0 after the last epoch; plateau divides by 10 whenever the "
        f"validation score has not risen for 5 epochs {default}",
    )
    add("--clip", type=non_negative, default=0.0, metavar="X", help=f"largest norm of the gradient; 0 for no limit {default}")
    add("--amp", action="store_true", help="compute in bfloat16 where that is safe (autocast)")
    add(
        "--seed",
        type=integer(0, 2**64 - 1),
        default=0,
        metavar="N",
        help=f"seed of weights, order and drawn data {default}",
    )
    add(
        "--resume",
        type=path_name,
        metavar="FILE",
        help="snapshot to continue from, as if the run had never stopped; --epochs can be higher. auto: the latest one in "
        "--output, or a new training if there is none",
    )
    add(
        "--snapshot-every",
        type=integer(0, _MAX_COUNT),
        default=0,
        metavar="N",
        help="write latest.snapshot also after every so many steps of an epoch; 0: only after each epoch "
        f"{default}",
    )
    add(
        "-f",
        "--load",
        type=path_name,
        metavar="FILE",
        help="snapshot to take the weights from; ignored if the run resumes",
    )
    add = parser.add_argument_group("pipeline").add_argument
    add(
        "--stages",
        type=integer(1, 1024),
        metavar="N",
        help="number of stages that the model is cut into (default: 2)",
    )
    add(
        "--balance",
        default="by-time",
        metavar="HOW",
        help="how to cut: by-time or by-size, into stages of equal measured time or memory; auto, the fastest of all "
        f"balances, chunks and checkpoint modes; or layers per stage, such as 20,35 {default}",
    )
    add("--chunks", type=integer(1, _MAX_COUNT), default=2, metavar="N", help=f"micro-batches per mini-batch {default}")
    add(
        "--replicas",
        type=integer(1, 2**20),
        default=1,
        metavar="N",
        help="number of equal pipelines, over processes that torchrun starts; each trains on its part of a mini-batch, of "
        f"--chunks micro-batches, and their gradients are summed {default}",
    )
    add(
        "--devices",
        metavar="LIST",
        help="one per worker, such as cuda:0,cuda:1, or one for all; by default the GPUs in turn, or the CPU",
    )
    add(
        "--schedule",
        type=_schedule,
        default="gpipe",
        metavar="NAME",
        help=f"order of forwards and backwards on each worker: {', '.join(gpipe.SCHEDULES)}; @FILE, with one line of "
        f"actions per worker (see gpipe-schedule); or auto, with --balance auto, for the fastest on --stages workers {default}",
    )
    add(
        "--stages-per-worker",
        type=integer(1, 1024),
        default=1,
        metavar="N",
        help="number of stages on each worker; with p workers, stage s is on worker s mod p, and --devices has p "
        f"{default}",
    )
    add(
        "--checkpoint",
        choices=("never", "except_last", "always"),
        default="except_last",
        help=f"which micro-batches recompute their activations instead of storing them {default}",
    )
    add("--reuse-memory", action="store_true", help="keep freed memory of CPU tensors for reuse")
    add("--trace", type=path_name, metavar="FILE", help="file for the timeline of one training step, for ui.perfetto.dev")
    add("--profile", action="store_true", help="print the measured costs of each layer, and all plans that were compared")
    parser.set_defaults(**defaults)


def parse(parser: Parser) -> argparse.Namespace:
    """Parses the command line. Adds the ``layers`` per stage, if given, and the list of ``devices``, one per worker."""
    options = parser.parse_args()
    try:
        options.layers = None if options.balance in ("by-time", "by-size", "auto") else _layers(options.balance)
        cuts = len(options.layers) if options.layers else options.stages or 2
        if options.stages not in (None, cuts):
            raise ValueError(
                f"--balance must have as many stages as --stages, but has {cuts}, and --stages is {options.stages}; "
                "give one of the two"
            )
        options.stages = cuts
        workers = _count_workers(options)
        options.devices = _devices(options.devices, workers, "stage" if workers == cuts else "worker")
    except ValueError as error:
        parser.error(str(error))
    return options


def run_program(train: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a program, which returns its exit code. Adds the ``ranks`` that train together to its options.

    Errors become one line on standard error and a non-zero exit code. A
    program that fails leaves no empty folders behind."""
    gpipe.reuse_cpu_memory(options.reuse_memory)
    try:
        with joined_processes(options.replicas) as options.ranks:
            code = train(options)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        remove_empty_directories()
        return 130
    except (IndexError, OSError, RuntimeError, ValueError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.strerror}: '{error.filename}'"
        if "in DataLoader worker process" in text:  # the message is a traceback
            text = text.strip().splitlines()[-1].partition(": ")[2] or text
    print(f"error: {text}", file=sys.stderr)
    remove_empty_directories()
    return 1


def to_flag(value: float) -> str:
    """A number as the C++ programs write it: with all its digits, in the shorter notation."""
    fixed = np.format_float_positional(value, trim="-")
    return min(fixed, np.format_float_scientific(value, trim="-", exp_digits=2), key=len)


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number from low to high."""

    def parse_integer(text: str) -> int:
        if not re.fullmatch("-?[0-9]+", text):
            raise _refusal("a whole number", f"'{text}'")
        value = int(text[:40])  # enough digits to compare
        if text.startswith("-") or value < low:
            raise _refusal(f"at least {low}", text)
        if value > high:
            raise _refusal(f"at most {high}", text)
        return value

    return parse_integer


def real(low: float, high: float) -> Callable[[str], float]:
    """A number from low to high."""

    def parse_real(text: str) -> float:
        value = _to_number(text)
        if value < low:
            raise _refusal(f"at least {low:g}", text)
        if value > high:
            raise _refusal(f"at most {high:g}", text)
        return value

    return parse_real


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _to_number(text)
    if value > 0:
        return value
    raise _refusal("above 0", text)


def non_negative(text: str) -> float:
    """A finite number of at least 0."""
    value = _to_number(text)
    if value >= 0:
        return value
    raise _refusal("at least 0", text)


def path_name(text: str) -> Path:
    """The path of a file or a folder."""
    if text:
        return Path(text)
    raise _refusal("a path", "''")


def image_size_text(text: str) -> tuple[int, int]:
    """Width and height."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if found:
        return int(found[1]), int(found[2])
    raise _refusal("a size such as 192x128", f"'{text}'")


def _refusal(requirement: str, value: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {requirement}, but is {value}")


def _to_number(text: str) -> float:
    if re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) and math.isfinite(float(text)):
        return float(text)
    raise _refusal("a finite number", f"'{text}'")


def _layers(text: str) -> list[int]:
    for part in text.split(","):
        if not (part.isascii() and part.isdecimal() and 1 <= int(part) <= _MAX_COUNT):
            raise ValueError(
                f"--balance must be auto, by-time, by-size or layers per stage such as 20,35, but has '{part}'"
            )
    return [int(part) for part in text.split(",")]


def _schedule(text: str) -> str:
    if text == "auto" or text in gpipe.SCHEDULES or text.startswith("@"):
        return text
    raise _refusal(f"auto, @FILE or one of {', '.join(gpipe.SCHEDULES)}", f"'{text}'")


def _count_workers(options: argparse.Namespace) -> int:
    """Checks the options of the schedule, and returns the number of workers that it needs."""
    per_worker, from_file = options.stages_per_worker, options.schedule.startswith("@")
    if from_file and per_worker != 1:
        raise ValueError(
            f"--stages-per-worker must be 1 with a schedule from a file, which places the stages, but is {per_worker}"
        )
    if options.schedule == "auto":
        if options.balance != "auto":
            names = ", ".join(gpipe.SCHEDULES)
            raise ValueError(f"--schedule must not be auto without --balance auto; choose one of {names}")
        if per_worker != 1:
            raise ValueError(
                f"--stages-per-worker must be 1 with --schedule auto, which chooses it, but is {per_worker}"
            )
        stages: int = options.stages
        return stages
    if options.stages % per_worker:
        raise ValueError(
            f"--stages-per-worker must divide the number of stages, which is {options.stages}, but is {per_worker}"
        )
    if from_file and options.balance == "auto":
        raise ValueError(
            "--balance must not be auto with a schedule from a file, which has one number of micro-batches; give "
            "by-time, by-size or layers per stage"
        )
    return max(place_stages(options.schedule, options.stages, per_worker)) + 1


def _devices(text: str | None, count: int, unit: str) -> list[torch.device]:
    if text is None:
        gpus = torch.cuda.device_count()
        return [torch.device("cuda", worker % gpus) if gpus else torch.device("cpu") for worker in range(count)]
    devices = []
    for part in text.split(","):
        try:
            devices.append(torch.device(part))
        except RuntimeError:
            raise ValueError(f"--devices must be cpu, cuda or cuda:N, but has '{part}'") from None
    if len(devices) == 1:
        devices *= count
    if len(devices) != count:
        raise ValueError(
            f"--devices must be one per {unit}, or one for all, but there are {len(devices)} for {count} {unit}s"
        )
    return devices
