"""The commands of ``python -m gpipe``."""

import argparse
import ast
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipe import _C, balance
from gpipe.balance import Candidate, Cluster, Profile
from gpipe.exported.conversion import ExportedSequential, as_sequential, converted
from gpipe.exported.model_file import export_model
from gpipe.structure import first_micro_batch, take_apart

_V_SCHEDULES = [name for name, _, is_v in _C.schedule_rules() if is_v]
_FIELDS = "balance chunks checkpoint schedule placement seconds bubble bytes fits crossing replicas reduction".split()


class Output(NamedTuple):
    """What a command prints, and its exit status."""

    text: str
    fields: Callable[[], object] = lambda: None  # returns what --json prints instead
    status: int = 0


def progress_line(work: str = "measuring") -> Callable[[float], None] | None:
    """Returns a function that shows the completed share of work that takes over two seconds; ``None`` without a terminal."""
    if not sys.stderr.isatty():
        return None
    start = time.monotonic()

    def tell(part: float) -> None:
        if time.monotonic() - start > 2:
            show(f"{work} {part:4.0%}" if part < 1 else "")

    return tell


def show(text: str) -> None:
    """Shows a line on the terminal, in place of the previous one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# Schedules: as text, as a picture, and simulated.


def print_(options: argparse.Namespace) -> Output:
    made = _schedule(options)
    text = str(made)

    def fields() -> object:
        return _sizes(made) | {"placement": made.placement, "actions": list(map(str.split, text.splitlines()))}

    return Output(text, fields)


def draw(options: argparse.Namespace) -> Output:
    return Output(_simulate(_schedule(options), options).timeline.to_svg())


def check(options: argparse.Namespace) -> Output:
    made = _schedule(options)
    ran = _simulate(made, options)
    cells, sizes = ran.peak_cells, ran.timeline.peak_bytes()
    fields = {"makespan": ran.makespan, "bubble": ran.bubble, "peak_cells": cells, "peak_bytes": sizes}
    lines = [f"The schedule runs: {made.workers} workers, {made.stages} stages, {made.chunks} micro-batches."]
    lines += [f"makespan {ran.makespan:g} s, bubble {ran.bubble:.1%}", "worker  peak cells  peak bytes"]
    lines += [f"{worker:6}  {count:10}  {size:10}" for worker, (count, size) in enumerate(zip(cells, sizes))]
    return Output("\n".join(lines) + "\n", lambda: _sizes(made) | fields)


def _sizes(made: _C.Schedule) -> dict[str, Any]:
    return {"workers": made.workers, "stages": made.stages, "micro_batches": made.chunks}


def _schedule(options: argparse.Namespace) -> _C.Schedule:
    name = options.schedule
    if name.startswith("@"):
        _refuse(options, "a schedule from a file", "workers", "stages", "placement", "chunks", "checkpoint")
        return _C.Schedule.read(name[1:])
    kind = options.placement or ("v" if name in _V_SCHEDULES else "looped")
    if kind not in ("looped", "v"):
        _refuse(options, "a list of workers", "workers", "stages")
    placement = _placement(kind, options.workers or 2, options.stages)
    return _C.Schedule(name, placement, options.chunks or 4, options.checkpoint or "never")


def _refuse(options: argparse.Namespace, what: str, *flags: str) -> None:
    for flag in flags:
        if getattr(options, flag) is not None:
            raise ValueError(f"--{flag} does not apply to {what}")


def _placement(kind: str, workers: int, stages: int | None) -> list[int]:
    if kind == "v" and stages in (None, 2 * workers):
        return _C.v_placement(2 * workers)
    if kind == "looped" and (stages or workers) >= workers:
        return [stage % workers for stage in range(stages or workers)]
    if kind in ("looped", "v"):
        needed = f"at least {workers}" if kind == "looped" else f"a V of {2 * workers}"
        raise ValueError(f"--stages is {stages}, but {workers} workers need {needed}; leave --stages out")
    try:
        return [int(worker) for worker in kind.split(",")]
    except ValueError:
        raise ValueError(f"--placement {kind}: give looped, v, or the worker of each stage, such as 0,1,1,0") from None


def _simulate(made: _C.Schedule, options: argparse.Namespace) -> _C.Simulation:
    given = options.input_gradient, options.weight_gradient
    halves = [options.backward / 2 if each is None else each for each in given]
    seconds = [options.forward, options.forward, options.backward, *halves]  # of F, R, B, I and W
    return made.simulate(seconds, options.graph_bytes, options.input_bytes)


# How to run a model, on devices or a cluster.


def profile(options: argparse.Namespace) -> Output:
    if options.output:
        Path(options.output).open("a").close()  # refuses a path that cannot be written before it measures
    measured, _ = _profile(options, options.chunks, options.seconds)
    if options.output:
        Path(options.output).write_text(measured.to_json())
    return Output(str(measured), lambda: json.loads(measured.to_json()))


def cut(options: argparse.Namespace) -> Output:
    if options.schedule == "auto" or "," in options.schedule:
        raise ValueError(f"cut takes one schedule, but --schedule is {options.schedule}")
    measured, chunks = _profile(options, options.chunks, options.seconds)
    (scheduling,) = _schedulings(options, len(measured.layers))
    link = options.bandwidth * 1e9, len(set(_devices(options))) > 1
    best = measured.balance_by_time if options.by == "time" else measured.balance_by_size
    layers = best(len(scheduling.placement), chunks, options.checkpoint, *link)
    run = _C.RunOptions(chunks, options.checkpoint, *link, scheduling)
    found = _C.predict(measured, layers, run)
    text = measured.table(layers) + "\n" if options.layers else ""
    text += f"balance {','.join(map(str, layers))}; {chunks} chunks, checkpoint {options.checkpoint}:\n{found}"
    names = ("balance", "seconds", "bubble", "stages", "placement", "bytes")
    return Output(text, lambda: {name: getattr(found, name) for name in names})


def sweep(options: argparse.Namespace) -> Output:
    tried = options.chunks or [2, 4, 8]
    profiles = [_profile(options, chunks, options.seconds / len(tried)) for chunks in tried]
    found = []
    for chunks, measured in {chunks: measured for measured, chunks in profiles}.items():
        found += _C.candidates(measured, chunks, _schedulings(options, len(measured.layers)), options.near, _search(options))
    found.sort(key=lambda candidate: (not candidate.fits, candidate.seconds))
    return Output(_C.candidate_table(found), lambda: list(map(_fields, found)))


def suggest(options: argparse.Namespace) -> Output:
    if options.cluster:
        return _plan(options)
    model, batch, code = _model_and_batch(options)
    devices = _devices(options)
    found = balance.suggest(
        model,
        batch,
        devices,
        chunks=options.chunks,
        memory_limit=options.memory_limit,
        bandwidth=options.bandwidth * 1e9,
        schedule=options.schedule or None,
        stages_per_worker=2 if options.schedule in _V_SCHEDULES else options.stages_per_worker,
        seconds=options.seconds,
        param_scale=options.param_scale,
        progress=progress_line(),
    )
    measured = []
    if options.refine and found.fits:
        measured = balance.refine(model, batch, devices, found, options.refine, progress=progress_line("running"))
    best = measured[0][0] if measured else found.candidates[0]
    schedule = best.schedule
    if options.save_schedule and found.fits:
        own = found._tailored(best, _search(options))
        if own and own[1] < best.seconds:
            Path(options.save_schedule).write_text(own[0])
            schedule = f"@{options.save_schedule}"
        else:
            print(f"no schedule for the measured times is faster; {options.save_schedule} is not written", file=sys.stderr)
    code += f"pipe = {_pipeline(best, schedule, devices)}\n"
    code += "# per mini-batch: " + ("loss = pipe.step(batch, targets, loss_function)" if schedule else "output = pipe(batch)")

    def fields() -> object:
        return {
            "reason": found.reason,
            "code": code if found.fits else None,
            "candidates": list(map(_fields, found.candidates)),
            "measured": [_fields(candidate) | {"measured_seconds": seconds} for candidate, seconds in measured],
            "unpartitioned": found.unpartitioned and _fields(found.unpartitioned),
        }

    text = found.profile_of(best).table(best.balance) + "\n" if options.layers else ""
    text += _C.candidate_table(found.candidates, found.unpartitioned, options.rows)
    for each, seconds in measured:
        text += f"measured {seconds:.3g} s per step: {_pipeline(each, each.schedule, devices)}\n"
    return Output(text + (f"\n{code}\n" if found.fits else f"{found.reason}\n"), fields, not found.fits)


def _plan(options: argparse.Namespace) -> Output:
    cluster = Cluster.from_json(_read(options.cluster))
    samples = options.batch_size
    if options.profile:
        profiles = [Profile.from_json(_read(path)) for path in options.profile.split(",")]
    else:
        model, batch, _ = _model_and_batch(options)
        tensors, structure = take_apart(batch)
        most = len(tensors[0])
        samples = samples or most
        sizes = options.micro_batch or [size for size in (1, 2, 4, 8, 16, 32) if size <= most]
        if max(sizes) > most:
            raise ValueError(f"--micro-batch must be at most the mini-batch's {most} samples, but is {max(sizes)}")
        samples_of = [structure.build(tensor[:size] for tensor in tensors) for size in sizes]
        profiles = [_measure(options, model, sample, options.seconds / len(sizes)) for sample in samples_of]
    plan = balance.plan_cluster(cluster, profiles, samples, schedule=options.schedule or None)

    def fields() -> object:
        return {"reason": plan.reason, "candidates": list(map(_fields, plan.candidates))}

    return Output(str(plan), fields, not plan.fits)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read(2**24)  # no cluster or profile is larger


def _model_and_batch(options: argparse.Namespace) -> tuple[nn.Sequential, Any, str]:
    """Makes the model and the mini-batch of MODULE:FUNCTION, and turns the model into layers. Returns code that does so."""
    model, batch, code = _loaded(options)
    if not isinstance(model, nn.Sequential):
        stars = "**" if isinstance(batch, dict) else "*" if isinstance(batch, tuple) else ""
        code += f"model = gpipe.to_sequential(model, {stars}batch)\n"
    layers = as_sequential(model, batch)
    show("")
    return layers, batch, code


def _loaded(options: argparse.Namespace) -> tuple[nn.Module, Any, str]:
    """Makes the model and the mini-batch of MODULE:FUNCTION. Returns code that does so."""
    text = options.factory
    show("loading the model")
    module, _, call = text.partition(":")
    if not (module and call):
        raise ValueError(f"'{text}' is not of the form MODULE:FUNCTION")
    try:
        known = vars(importlib.import_module(module))
        names = {node.id for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)} & known.keys()
        made = eval(call, known)
        if not isinstance(made, (nn.Module, tuple)):
            made = made()
            call = f"{call}()" if call.isidentifier() else f"({call})()"
    except Exception as error:
        raise ValueError(f"cannot load '{text}': {type(error).__name__}: {error}") from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{text} must be a function that returns a module, or a tuple (module, mini-batch)")
    code = "import gpipe\nimport torch\n" + (f"from {module} import {', '.join(sorted(names))}\n" if names else "")
    code += f"\n{'model, batch' if isinstance(made, tuple) else 'model'} = {call}\n"
    if options.input is not None:
        batch = torch.randn(options.input)
        code += f"batch = torch.randn{tuple(options.input)}\n"
    if batch is None:
        raise ValueError(f"{text} returns no mini-batch; give its shape with --input")
    return model, batch, code


def _profile(options: argparse.Namespace, chunks: int, seconds: float) -> tuple[Profile, int]:
    """Returns the profile, which it measures or reads, and the number of micro-batches."""
    if getattr(options, "profile", None):
        return Profile.from_json(_read(options.profile)), chunks
    model, batch, _ = _model_and_batch(options)
    sample, micro_batches = first_micro_batch(batch, chunks)
    return _measure(options, model, sample, seconds), micro_batches


def _measure(options: argparse.Namespace, model: nn.Sequential, sample: Any, seconds: float) -> Profile:
    devices = _devices(options)
    return balance.profile(
        model,
        sample,
        device=devices[0],
        workers=devices.count("cpu") if devices[0] == "cpu" and not options.cluster else 1,
        seconds=seconds,
        param_scale=options.param_scale,
        progress=progress_line(),
    )


def _devices(options: argparse.Namespace) -> list[str]:
    if options.devices:
        return list(options.devices.split(","))
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu", "cpu"]


def _search(options: argparse.Namespace) -> _C.SearchOptions:
    return _C.SearchOptions(list(map(torch.device, _devices(options))), options.memory_limit, options.bandwidth * 1e9)


def _schedulings(options: argparse.Namespace, layers: int) -> list[_C.Scheduling]:
    """Returns the schedules to try, with their placements."""
    workers, wanted = len(_devices(options)), options.stages_per_worker
    found = []
    for name in options.schedule.split(","):
        if name == "auto":
            every = _C.all_schedulings(workers, layers)
            found += [each for each in every if wanted in (1, len(each.placement) // workers)]
        elif name.startswith("@"):
            found.append(_C.Scheduling(name, 1, _C.Schedule.read(name[1:]).placement))
        else:
            per_worker = 2 if name in _V_SCHEDULES else wanted
            placement = _C.place_stages(name or "gpipe", workers * per_worker, per_worker, [])
            found.append(_C.Scheduling(name, 1, placement))
    return found


def _fields(candidate: Candidate) -> dict[str, Any]:
    return {name: getattr(candidate, name) for name in _FIELDS}


def _pipeline(candidate: Candidate, schedule: str, devices: list[str]) -> str:
    """Returns the code that makes a pipeline."""
    placed = {
        "stages_per_worker": f", stages_per_worker={len(candidate.placement) // len(candidate.bytes)}",
        "v": ", placement='v'",
        "placement": f", placement={candidate.placement}",
    }
    text = f"gpipe.GPipe(model, {candidate.balance}, devices={devices}, chunks={candidate.chunks}, "
    text += f"checkpoint={candidate.checkpoint!r}" + (f", schedule={schedule!r}" if schedule else "")
    return text + ("" if schedule.startswith("@") else placed.get(candidate.placed_by, "")) + ")"


# Files.


def export(options: argparse.Namespace) -> Output:
    Path(options.output).open("ab").close()  # refuses a path that cannot be written before it converts
    model, batch, _ = _loaded(options)
    sequence = model if isinstance(model, ExportedSequential) else converted(model, batch)
    show("")
    export_model(sequence, options.output)
    layers = len(sequence)
    return Output(f"{options.output} has {layers} layers\n", lambda: {"target": options.output, "layers": layers})
