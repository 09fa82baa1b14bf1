"""``python -m gpipe print``, ``draw`` and ``check``: a schedule as text, as a picture, and simulated."""

from __future__ import annotations

import argparse
import json
import re

from gpipe import _C

__all__ = ["V_SCHEDULES", "check", "draw", "print_"]

V_SCHEDULES = [name for name, _, is_v in _C.schedule_rules() if is_v]


def print_(options: argparse.Namespace) -> tuple[str, int]:
    return str(_schedule(options)), 0


def draw(options: argparse.Namespace) -> tuple[str, int]:
    return _simulate(_schedule(options), options).timeline.to_svg(), 0


def check(options: argparse.Namespace) -> tuple[str, int]:
    made = _schedule(options)
    ran = _simulate(made, options)
    edges = made.edges(_skips(made, options), options.capacity)
    peaks = list(zip(ran.peak_cells, ran.timeline.peak_bytes()))
    if options.json:
        fields: dict[str, object] = {"workers": made.workers, "stages": made.stages, "micro_batches": made.chunks}
        fields |= {"makespan": ran.makespan, "bubble": ran.bubble}
        fields |= {"peak_cells": [cells for cells, _ in peaks], "peak_bytes": [size for _, size in peaks]}
        names = ("name", "from", "to", "capacity", "least_capacity")
        return json.dumps(fields | {"edges": [dict(zip(names, edge)) for edge in edges]}, indent=2) + "\n", 0
    lines = [f"The schedule runs: {made.workers} workers, {made.stages} stages, {made.chunks} micro-batches."]
    lines += [f"{name}, stage {start} to {end}: capacity {most}, least {least}" for name, start, end, most, least in edges]
    lines += [f"makespan {ran.makespan:g} s, bubble {ran.bubble:.1%}", "worker  peak cells  peak bytes"]
    lines += [f"{worker:6}  {cells:10}  {size:10}" for worker, (cells, size) in enumerate(peaks)]
    return "\n".join(lines) + "\n", 0


def _schedule(options: argparse.Namespace) -> _C.Schedule:
    name = options.schedule
    if name.startswith("@"):
        _refuse(options, "a schedule from a file", "workers", "stages", "placement", "chunks", "checkpoint")
        return _C.Schedule.read(name[1:])
    kind = options.placement or ("v" if name in V_SCHEDULES else "looped")
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


def _skips(made: _C.Schedule, options: argparse.Namespace) -> list[tuple[int, int]]:
    last = made.stages - 1
    found = [(text, re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)) for text in options.skip]
    for text, ends in found:
        if not ends or not int(ends[1]) < int(ends[2]) <= last:
            raise ValueError(f"--skip {text}: give two of the stages 0 to {last}, ascending, such as 0:{last}")
    return [(int(ends[1]), int(ends[2])) for _, ends in found if ends]


def _simulate(made: _C.Schedule, options: argparse.Namespace) -> _C.Simulation:
    given = options.input_gradient, options.weight_gradient
    halves = [options.backward / 2 if each is None else each for each in given]
    seconds = [options.forward, options.forward, options.backward, *halves]  # of F, R, B, I and W
    return made.simulate(_skips(made, options), options.capacity, seconds, options.graph_bytes, options.input_bytes)
