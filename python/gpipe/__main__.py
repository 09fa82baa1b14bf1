"""``python -m gpipe``: suggestions and profiles for a model, and pictures and simulations of schedules."""

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import gpipe
from gpipe import _C, balance
from gpipe.exported.conversion import as_sequential, converted
from gpipe.report import Report

Options = argparse.Namespace
Output = tuple[str, object, int]  # what a command prints, what it prints with --json, and the exit status
_MODES = ("never", "except_last", "always")
_FIELDS = "seconds measured bubble bytes fits crossing".split()
_OF_NAMES = ["workers", "stages", "placement", "chunks", "checkpoint"]  # flags of a schedule that is given by its name


def draw(options: Options) -> Output:
    made = _schedule(options)
    return str(made) if options.text else _simulate(made, options).timeline.to_html(), None, 0


def report(options: Options) -> Output:
    found = Report.read(options.lines)
    with _file(options.output) as path:
        if path:
            path.write_text(found.to_html())
    return str(found), found.parts, 0


def check(options: Options) -> Output:
    made = _schedule(options)
    ran = _simulate(made, options)
    lines = [f"The schedule runs: {made.workers} workers, {made.stages} stages, {made.chunks} micro-batches."]
    lines += [f"makespan {ran.makespan:g} s, bubble {ran.bubble:.1%}", "worker  peak cells"]
    lines += [f"{worker:6}  {count:10}" for worker, count in enumerate(ran.peak_cells)]
    fields = {"placement": made.placement, "makespan": ran.makespan, "bubble": ran.bubble, "peak_cells": ran.peak_cells}
    return "\n".join(lines) + "\n", fields, 0


def _schedule(options: Options) -> _C.Schedule:
    name, place = options.schedule, options.placement
    if name.startswith("@"):
        _refuse(options, "a schedule from a file", _OF_NAMES)
        return _C.Schedule.read(name[1:])
    workers, stages = options.workers or 2, options.stages or 0
    place = [*map(int, place.split(","))] if place not in (None, "looped", "v") else place
    if place == "v" or (place is None and any(is_v for rule, _, is_v in _C.schedule_rules() if rule == name)):
        place = _C.v_placement(stages or 2 * workers)
    elif place in (None, "looped"):
        place = [stage % workers for stage in range(stages or workers)]
    if stages not in (0, len(place)) or options.workers not in (None, len(set(place))):
        raise ValueError(f"the placement {place} is not of {stages} stages on {workers} workers; leave one of them out")
    return _C.Schedule(name, place, options.chunks or 4, options.checkpoint or "never")


def _refuse(options: Options, what: str, flags: Sequence[str]) -> None:
    if given := [flag for flag in flags if getattr(options, flag)]:
        raise ValueError(f"--{given[0]} does not apply to {what}")


def _simulate(made: _C.Schedule, options: Options) -> _C.Simulation:
    forward, backward = options.forward, options.backward
    return made.simulate([forward, forward, backward, backward / 2, backward / 2])  # of F, R, B, I and W


def profile(options: Options) -> Output:
    with _file(options.output) as path:
        model, batch, _ = _loaded(options)
        (first, *_), cpus = _devices(options), _devices(options).count("cpu")
        limits = {"seconds": options.seconds, "param_scale": options.param_scale, "progress": _show}
        sample = balance.micro_batch_of(model, batch, options.chunks)[0]
        measured = balance.profile(model, sample, device=first, workers=cpus if first == "cpu" else 1, **limits)
        if path:
            path.write_text(measured.to_json())
    return str(measured), json.loads(measured.to_json()), 0


def suggest(options: Options) -> Output:
    with _file(options.output) as path:
        model, batch, code = _loaded(options)
        layers, devices = as_sequential(model, batch), _devices(options)
        if layers is not model:
            stars = "**" if isinstance(batch, dict) else "*" if isinstance(batch, tuple) else ""
            code += f"model = gpipe.to_sequential(model, {stars}batch)\n"
        limits = {name: getattr(options, name) for name in ("chunks", "memory", "seconds", "param_scale", "schedule")}
        found = gpipe.plan(layers, batch, devices, progress=_show, **limits)
        best = found.plans[0]
        if path and found.fits:
            best.save(path)
    written = {name: f'"""{value}"""' if "\n" in str(value) else repr(value) for name, value in best.arguments.items()}
    arguments = ", ".join(f"{name}={value}" for name, value in written.items())
    code += f"pipe = gpipe.GPipe(model, devices={devices}, {arguments})\n"
    code += "# per mini-batch: loss = pipe.step(batch, targets, loss_function)"
    fields: dict[str, object] = {"reason": found.reason, "code": code if found.fits else None}
    fields["plans"] = [each.arguments | {name: getattr(each, name) for name in _FIELDS} for each in found.plans]
    return _C.plan_table(found, 5) + (f"\n{code}\n" if found.fits else ""), fields, int(not found.fits)


def export(options: Options) -> Output:
    with _file(options.output) as path:
        model, batch, _ = _loaded(options)
        sequence = converted(model, batch, native=True)
        gpipe.export_model(sequence, path)
    return f"{options.output} has {len(sequence)} layers\n", None, 0


@contextlib.contextmanager
def _file(name: str | None) -> Iterator[Any]:
    """Gives a block the path of a new file, which gets its name after the block. Leaves no file if the block fails."""
    path = Path(name or "")
    if name is None or (path.exists() and not path.is_file()):  # a device, or a folder, which cannot be written
        yield name and path
        return
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        new.touch()  # refuses a folder that cannot be written before the block measures
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _loaded(options: Options) -> tuple[nn.Module, Any, str]:
    """Makes the model and the mini-batch of MODULE:FUNCTION. Returns code that does so."""
    module, _, call = options.factory.partition(":")
    if not (module and call):
        raise ValueError(f"'{options.factory}' is not of the form MODULE:FUNCTION")
    try:
        made = eval(call, vars(importlib.import_module(module)))
        if not isinstance(made, (nn.Module, tuple)):
            made, call = made(), f"({call})()"
    except Exception as error:
        raise ValueError(f"cannot load '{options.factory}': {type(error).__name__}: {error}") from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{options.factory} must be a function that returns a module, or a tuple (module, mini-batch)")
    code = f"import gpipe\nimport torch\nfrom {module} import *\n\n"
    code += f"{'model, batch' if isinstance(made, tuple) else 'model'} = {call}\n"
    if options.input is not None:
        batch = torch.randn(options.input)
        code += f"batch = torch.randn{tuple(options.input)}\n"
    if batch is None:
        raise ValueError(f"{options.factory} returns no mini-batch; give its shape with --input")
    return model, batch, code


def _devices(options: Options) -> list[str]:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return options.devices.split(",") if options.devices else gpus or ["cpu", "cpu"]


def _show(part: float) -> None:
    """Shows the completed share of a measurement on a terminal."""
    if sys.stderr.isatty():
        print("\r\033[K" + f"measuring {part:4.0%}" * (part < 1), end="", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _value(what: str, convert: Callable[[str], Any], fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Returns a function that converts the text of a flag."""

    def value(text: str) -> Any:
        with contextlib.suppress(AttributeError, KeyError, OverflowError, ValueError):
            if fits(found := convert(text)):
                return found
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}")

    return value


_whole = _value("a whole number from 1 to 65536", int, lambda number: bool(1 <= number <= 2**16))
_number = _value("a number from 0", float, lambda number: bool(0 <= number < 1e18))
_numbers = _value("a list of numbers, such as 8,16", lambda text: [*map(int, text.split(","))], lambda all_: min(all_) > 0)
# Flags by the first letters of the commands that have them.
_FLAGS: list[tuple[str, str, dict[str, Any]]] = [
    ("psE", "factory", {"metavar": "MODULE:FUNCTION", "help": "or a call; returns a module, or it and a mini-batch"}),
    ("psE", "--input", {"type": _numbers, "metavar": "N,..", "help": "shape of a random mini-batch, e.g. 64,3,224,224"}),
    ("p", "--output", {"metavar": "FILE", "help": "for the profile, as JSON"}),
    ("E", "--output", {"metavar": "FILE", "required": True, "help": "such as model.gpipe"}),
    ("r", "lines", {"metavar": "FILE", "help": "that Report.write() or gpipe::to_json_lines() made"}),
    ("r", "--output", {"metavar": "FILE", "help": "for a page that shows the steps, such as report.html"}),
    ("ps", "--devices", {"metavar": "LIST", "help": "one per worker, such as cuda:0,cuda:1"}),
    ("ps", "--seconds", {"type": _number, "default": 10.0, "help": "to measure; default: 10"}),
    ("ps", "--param-scale", {"type": _number, "default": 4.0, "help": "bytes per byte of a parameter; default: 4"}),
    ("p", "--chunks", {"type": _whole, "default": 4, "help": "micro-batches per mini-batch; default: 4"}),
    ("s", "--chunks", {"type": _numbers, "default": [], "help": "numbers to try, e.g. 4,8"}),
    ("s", "--memory", {"help": "per device, e.g. 6GiB"}),
    ("s", "--schedule", {"default": "auto", "help": "or @FILE"}),
    ("s", "--output", {"metavar": "FILE", "help": "for the best plan, which from_module(plan=FILE) reads"}),
    ("dc", "schedule", {"help": f"@FILE, or {', '.join(gpipe.SCHEDULES)}"}),
    ("dc", "--workers", {"type": _whole, "help": "default: 2"}),
    ("dc", "--stages", {"type": _whole, "help": "default: one per worker, two in a V"}),
    ("dc", "--placement", {"help": "looped, v, or the worker of each stage, such as 0,1,1,0"}),
    ("dc", "--chunks", {"type": _whole, "help": "micro-batches; default: 4"}),
    ("dc", "--checkpoint", {"choices": _MODES, "help": "micro-batches to recompute; default: never"}),
    ("dc", "--forward", {"type": _number, "default": 1.0, "help": "seconds of a stage's forward; default: 1"}),
    ("dc", "--backward", {"type": _number, "default": 2.0, "help": "of which I and W have half each; default: 2"}),
    ("d", "--text", {"action": "store_true", "help": "print a line of actions per worker instead"}),
    ("pscr", "--json", {"action": "store_true", "help": "print JSON"}),
]
_COMMANDS = {
    "s": (suggest, "find the fastest way to run a model"),
    "p": (profile, "measure each layer of a model"),
    "d": (draw, "print a page that shows a schedule"),
    "c": (check, "check that a schedule runs; print time, bubble and memory"),
    "r": (report, "say where the time of traced steps goes"),
    "E": (export, "write a model as a file that C++ trains"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="python -m gpipe", description=__doc__.partition(": ")[2], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for letter, (run, help_) in _COMMANDS.items():
        command = commands.add_parser(run.__name__, help=help_, description=help_, allow_abbrev=False)
        command.set_defaults(run=run)
        for letters, flag, settings in _FLAGS:
            if letter in letters:
                command.add_argument(*(("-o",) if flag == "--output" else ()), flag, **settings)
    try:
        options = parser.parse_args((sys.argv[1:] if arguments is None else arguments) or ["--help"])
        text, fields, status = options.run(options)
        print(json.dumps(fields) + "\n" if getattr(options, "json", False) else text, end="", flush=True)
    except BrokenPipeError:  # the reader has all that it wants, such as "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        return 0
    except (AssertionError, IndexError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error).partition("\n")[0])
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
