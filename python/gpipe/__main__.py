# PYTHON_ARGCOMPLETE_OK
"""``python -m gpipe``: schedules as text, pictures and simulations; profiles, cuts and suggestions for a model."""

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import gpipe
from gpipe import _C, balance, commands as run
from gpipe.commands import show

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_EXCLUDED = {
    "cluster": "chunks memory_limit bandwidth stages_per_worker rows layers refine save_schedule",
    "profile": "factory input micro_batch seconds param_scale",
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # --chunk is a mistake, not --chunks

    def error(self, message: str) -> NoReturn:
        self.fail(2, f"error: {message}")

    def fail(self, code: int, message: str) -> NoReturn:
        show("")
        self.exit(code, f"{message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        _write(message, file or sys.stderr)


def _write(text: str, file: Any) -> None:
    try:
        print(text, end="", file=file, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # Python flushes again at exit
        if not isinstance(error, BrokenPipeError):  # the reader has all that it wants, such as "| head"
            raise OSError(f"cannot write the output: {error}") from None


def _value(what: str, convert: Callable[[str], Any], fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Returns a function that converts the text of a flag."""

    def converted(text: str) -> Any:
        try:
            if fits(value := convert(text)):
                return value
        except (AttributeError, KeyError, OverflowError, ValueError):
            pass
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}")

    return converted


def _whole(least: int, most: int = 2**16) -> Callable[[str], int]:
    return _value(f"a whole number from {least} to {most}", int, lambda number: bool(least <= number <= most))


def _to_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+\.?\d*)\s*([KMGT]?I?)B?", text.strip().upper()).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS[unit])


_numbers = _value("a list of numbers, such as 8,16", lambda text: list(map(int, text.split(","))), lambda all_: min(all_) > 0)
_number = _value("a number from 0", float, lambda number: bool(0 <= number < 1e18))
_bytes = _value("a size, such as 6GB or 6GiB", _to_bytes, lambda size: bool(size < 2**63))


def _schedules(text: str) -> str:
    for name in text.split(","):
        if name not in (*gpipe.SCHEDULES, "forward", "auto") and not name.startswith("@"):
            raise argparse.ArgumentTypeError(f"unknown schedule '{name}'; known: {', '.join(gpipe.SCHEDULES)}")
    return ",".join("" if name == "forward" else name for name in text.split(","))


def _add_schedule_command(commands: Any, name: str, run: Any, help_: str) -> None:
    rules = "\n".join(f"  {rule:18} {summary}" for rule, summary, _ in _C.schedule_rules())
    shown_as_it_is = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=help_, epilog=f"schedules:\n{rules}", formatter_class=shown_as_it_is)
    command.set_defaults(run=run)
    add = command.add_argument
    add("schedule", help="a name, or @FILE with one line of actions per worker")
    add("--workers", type=_whole(1), metavar="N", help="default: 2")
    add("--stages", type=_whole(1), metavar="N", help="default: one per worker, two in a V")
    add("--placement", metavar="WORKERS", help="looped, v, or the worker of each stage, such as 0,1,1,0")
    add("--chunks", type=_whole(1), metavar="N", help="micro-batches; default: 4")
    add("--checkpoint", choices=balance.MODES, help="micro-batches to recompute; default: never")
    if name != "draw":
        add("--json", action="store_true", help="print JSON")
    if name == "print":
        return
    add("--forward", type=_number, default=1.0, metavar="S", help="seconds of a stage's forward; default: 1")
    add("--backward", type=_number, default=2.0, metavar="S", help="default: 2")
    add("--input-gradient", type=_number, metavar="S", help="seconds of an I; default: half of --backward")
    add("--weight-gradient", type=_number, metavar="S", help="seconds of a W; default: half of --backward")
    add("--graph-bytes", type=_bytes, default=0, metavar="SIZE", help="of a cell's graph, held until B or W")
    add("--input-bytes", type=_bytes, default=0, metavar="SIZE", help="that a recomputed cell stores")


def _add_model_command(commands: Any, name: str, run: Any, help_: str, schedule: str = "forward", seconds: int = 10) -> Any:
    command = commands.add_parser(name, help=help_)
    command.set_defaults(run=run, parser=command, cluster=None)
    add = command.add_argument
    add("factory", nargs="?", metavar="MODULE:FUNCTION", help="or a call; returns a module, or a tuple of it and a mini-batch")
    add("--input", type=_numbers, metavar="N,..", help="shape of a random mini-batch, e.g. 64,3,224,224")
    add("--devices", metavar="LIST", help="one per worker, e.g. cuda:0,cuda:1; default: the GPUs, or 2 CPU workers")
    add("--seconds", type=_number, default=seconds, help=f"approximate time for measuring; default: {seconds}")
    add("--param-scale", type=_number, default=4.0, help="bytes for training per byte of a parameter; default: 4, as for Adam")
    add("--json", action="store_true", help="print JSON")
    if name in ("profile", "cut"):
        add("--chunks", type=_whole(1), default=4, metavar="N", help="micro-batches per mini-batch; default: 4")
    else:
        add("--chunks", type=_numbers, default=[], metavar="N,..", help="numbers to try; default: up to 32; sweep: 2, 4, 8")
        add("--memory-limit", type=_bytes, default=0, metavar="SIZE", help="per device, e.g. 6GB or 6GiB")
    if name != "profile":
        help_ = "of step(): a name or @FILE; forward: a forward, then its backward; auto: all that fit; default: " + schedule
        add("--schedule", type=_schedules, default=schedule, help=help_)
        add("--stages-per-worker", type=_whole(1), default=1, metavar="N", help="default: 1")
        add("--bandwidth", type=_number, default=0.0, metavar="GB/S", help="between devices; default: no delay")
    return command.add_argument


def _add_commands(commands: Any) -> None:
    _add_schedule_command(commands, "print", run.print_, "print a schedule's actions, a line per worker")
    _add_schedule_command(commands, "draw", run.draw, "print a drawing of a schedule, as SVG")
    _add_schedule_command(commands, "check", run.check, "check that a schedule runs; print time, bubble, memory")
    add = _add_model_command(commands, "profile", run.profile, "measure each layer")
    add("-o", "--output", metavar="FILE", help="file for the profile, as JSON, for cut --profile")
    add = _add_model_command(commands, "cut", run.cut, "find the best balance for a number of chunks")
    add("--profile", metavar="FILE", help="of profile --output; used instead of measuring")
    add("--checkpoint", choices=balance.MODES, default="except_last", help="default: except_last")
    add("--by", choices=("time", "size"), default="time", help="what stages have equal; default: time")
    add("--layers", action="store_true", help="also print the profile of each layer")
    add = _add_model_command(commands, "sweep", run.sweep, "predict all balances near the best")
    add("--near", type=_whole(0), default=4, metavar="N", help="layers to move a cut by; default: 4")
    add = _add_model_command(commands, "suggest", run.suggest, "find the fastest way to run a model", "auto", 60)
    add("--rows", type=_whole(1), default=5, metavar="N", help="candidates to print; default: 5")
    add("--layers", action="store_true", help="also print the profile of each layer")
    add("--refine", type=_whole(0, 100), default=0, metavar="N", help="candidates to run and time; default: 0")
    add("--save-schedule", metavar="FILE", help="for a schedule made for the measured times, if it is faster")
    add("--cluster", metavar="FILE", help="JSON file of a cluster: also choose the number of replicas, for all its devices")
    add("--batch-size", type=_whole(1, 2**31), metavar="N", help="with --cluster: samples per mini-batch")
    add("--micro-batch", type=_numbers, metavar="N,..", help="with --cluster: sizes to try; default: 1, 2, 4, .. 32")
    add("--profile", metavar="FILE,..", help="with --cluster: of profile --output, one per size; used instead of measuring")
    command = commands.add_parser("export", help="write a model as a file that C++ trains")
    command.add_argument("factory", metavar="MODULE:FUNCTION", help="returns a module, or a tuple of it and a mini-batch")
    command.add_argument("--input", type=_numbers, metavar="N,..", help="shape of a random mini-batch, e.g. 4,3,224,224")
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="such as model.gpipe")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run.export)


def _check(options: argparse.Namespace) -> None:
    """Refuses flags of the commands for models that do not go together."""
    error = options.parser.error
    given = {name: value for name, value in vars(options).items() if value != options.parser.get_default(name)}
    flags = {name: f"--{name.replace('_', '-')}" for name in given} | {"factory": options.factory}
    for flag in given.keys() & _EXCLUDED.keys():
        for other in _EXCLUDED[flag].split():
            if other in given:
                error(f"--{flag} excludes {flags[other]}")
    for flag in ("batch_size", "micro_batch", *(["profile"] if options.command == "suggest" else [])):
        if flag in given and "cluster" not in given:
            error(f"{flags[flag]} requires --cluster")
    if "cluster" in given and "devices" in given and ("profile" in given or "," in options.devices):
        error(f"--cluster needs one device to measure on, or --profile, but --devices is {options.devices}")
    if "cluster" in given and "profile" in given and "batch_size" not in given:
        error("--profile requires --batch-size")
    if not given.keys() & {"factory", "profile"}:
        error("the following arguments are required: MODULE:FUNCTION")


def main(arguments: Sequence[str] | None = None) -> int:
    completion = "Tab completes after: pip install argcomplete; activate-global-python-argcomplete"
    parser = _Parser(prog="python -m gpipe", description=__doc__.partition(": ")[2], epilog=completion)
    parser.add_argument("--version", action="version", version=gpipe.__version__)
    _add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    with contextlib.suppress(ImportError):
        importlib.import_module("argcomplete").autocomplete(parser)
    try:
        options = parser.parse_args((sys.argv[1:] if arguments is None else arguments) or ["--help"])
        if "parser" in options:
            _check(options)
        output = options.run(options)
        _write(json.dumps(output.fields()) + "\n" if getattr(options, "json", False) else output.text, sys.stdout)
    except (AssertionError, IndexError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error).partition("\n")[0])
    except KeyboardInterrupt:
        parser.fail(130, "interrupted")
    return int(output.status)


if __name__ == "__main__":
    sys.exit(main())
