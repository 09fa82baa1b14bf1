"""Where the time of a pipeline's steps goes: in words, as lines of JSON, as a page, and live in a terminal."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from torch.utils._pytree import tree_leaves

from gpipe import _C
from gpipe.checks import Memory, check_is

__all__ = ["Report", "watch"]

_KINDS = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Of each part of a step, its color in a page, and what it is. The palette of Okabe and Ito is distinguishable with color blindness.
_PARTS = {
    "work": ("#bbbbbb", "typical time of the actions without recomputes, divided by the workers"),
    "recompute": ("#f0e442", "forwards that run again: checkpoint='never' if the memory suffices, or a smaller number"),
    "imbalance": ("#d55e00", "workers have unequal work: move layers to workers that wait"),
    "schedule": ("#0072b2", "workers fill and drain: more chunks, or another schedule"),
    "wires": ("#cc79a7", "data goes from worker to worker"),
    "locks": ("#000000", "threads sleep in an action, as at the interpreter's lock, which Python code of another layer holds"),
    "cores": ("#e69f00", "threads wait for a core: fewer workers or threads, or fewer other processes"),
    "jitter": ("#009e73", "actions of one kind take unequal times"),
    "caller": ("#56b4e9", "between steps: optimizer, loader, and the preparation of the call"),
}
# When advice with such a word holds.
_CONDITIONS = {
    "core": "",
    "balance=": ", if its bytes fit and each layer has the same share of its stage's forwards and backwards",
    "chunks=": ", if the mini-batch has as many samples, its bytes fit, and a micro-batch takes as long per sample",
}


class Report:
    """What the steps of a timeline did: :meth:`gpipe.GPipe.report` makes it. ``print(report)`` says in words where the
    time went, and what each worker waited for.

    Attributes:
        steps: a dict per step: ``parts`` has the seconds of each cause, which sum to ``end - start``; ``waits`` what
            each worker waited for; ``spans`` the actions.
    """

    def __init__(self, lines: str, room: Sequence[int] = ()) -> None:
        """``room``: the most bytes that a page shows for each worker."""
        try:
            self.steps: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines() if line.strip()]
            for each in self.steps:
                each["parts"], each["waits"], each["workers"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("these are not the lines of a report; write them with Report.write()") from error
        self._lines = lines
        if room:
            self.steps = [each | {"room": room} for each in self.steps]
            self._lines = "".join(json.dumps(each) + "\n" for each in self.steps)

    @staticmethod
    def read(path: str | Path) -> Report:
        """Reads what :meth:`write`, ``Timeline.to_json_lines()``, or in C++ ``gpipe::to_json_lines()`` has written."""
        return Report(Path(path).read_text())

    def write(self, path: str | Path) -> None:
        """Writes a line of JSON per step, for ``python -m gpipe report``."""
        Path(path).write_text(self._lines)

    def to_html(self) -> str:
        """Returns a page that needs no other file: actions, what each wait was for, bytes, and a history of steps."""
        return to_page(self._lines)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each cause in the median step, the largest first after ``"work"``, which no change saves."""
        names = {name for step in self.steps for name in step["parts"]}
        medians = {name: median(step["parts"].get(name, 0.0) for step in self.steps) for name in names}
        return dict(sorted(medians.items(), key=lambda part: (part[0] != "work", -part[1])))

    @property
    def advice(self) -> dict[str, tuple[float, float, float]]:
        """What other arguments would save in a step, the best first, such as ``{"balance=[3, 5]": (seconds, low, high)}``: the
        median of simulations with the measured times of each step, and the range without a tenth of the steps at each end.
        Only what saves at least 1 % of a step in all of this range."""
        saving = [step["advice"] for step in self.steps if "advice" in step][-1:]
        return {change: (seconds, low, high) for each in saving for change, seconds, low, high in each}

    @property
    def first(self) -> str:
        """The cause that costs most, such as ``"imbalance"``; ``""`` if none costs anything."""
        costs = {name: seconds for name, seconds in self.parts.items() if name != "work"}
        return max(costs, key=lambda name: costs[name]) if any(seconds > 0 for seconds in costs.values()) else ""

    @property
    def busiest(self) -> int:
        """The stage on which the workers' own work takes longest, over all steps; of segments, the longest."""
        work: dict[int, float] = defaultdict(float)
        for step in self.steps:
            for _, stage, _, _, start, end, lead, queued, blocked, *_ in step["spans"]:
                work[stage] += end - start + lead - queued - blocked
        return max(work, key=lambda stage: work[stage]) if work else -1

    def __str__(self) -> str:
        if not self.steps:
            return "No complete step has been traced: call pipe.trace(gpipe.Timeline()) before the steps.\n"
        walls = [step["end"] - step["start"] for step in self.steps]
        wall = median(walls)
        count = f"{len(walls)} step{'s' * (len(walls) != 1)}"
        count += f", median {_time(wall)}, {_time(min(walls))} to {_time(max(walls))}"
        lines = [f"{count}. Where the time goes, and from step to step:"]
        for name, seconds in self.parts.items():
            text = _PARTS[name][1]
            if name == "imbalance":
                text += f"; stage {self.busiest} takes longest{self._heaviest}"
            low, high = _range(step["parts"].get(name, 0.0) for step in self.steps)
            if name == "work" or (low > 0 and seconds >= 0.005 * wall):
                share = f"{seconds / wall:5.0%}  {low / wall:4.0%} to {high / wall:.0%}"
                lines.append(f"  {name:10}{_time(seconds):>9} {share}  {text}")
        lines.append("worker  waits  for")
        for worker in range(self.steps[0]["workers"]):
            waited = self._waited(worker)
            total = sum(waited.values())
            most = sorted(waited.items(), key=lambda each: -each[1])[:3]
            why = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in most)
            lines.append(f"{worker:6} {total / sum(walls):6.0%}  {why}")
        for change, (seconds, low, high) in list(self.advice.items())[:3]:
            interval = f"{low / wall:.1%} to {high / wall:.1%}"
            condition = next((text for word, text in _CONDITIONS.items() if word in change), ", if its bytes fit")
            change = change if "=" in change else change.capitalize()
            lines.append(f"{change} would save {_time(seconds)} of a step ({interval}){condition}.")
        cost = [-step["gains"]["checkpoint='always'"] for step in self.steps if "checkpoint='always'" in step["gains"]]
        if cost and median(cost) > 0:
            text = f"{_time(median(cost))} of a step ({median(cost) / wall:.1%})"
            lines.append(f"checkpoint='always' would cost {text}, and save memory.")
        gains = sorted(self.steps[-1].get("slack") or (), key=lambda each: -each[3])
        for stage, kind, slower, gain in [each for each in gains if each[3] > 0.005 * wall][:3]:
            lines.append(f"A tenth less {_KINDS[kind]} on stage {stage} saves {_time(gain)} ({gain / wall:.1%}).")
        for stage, kind, slower, _ in gains:
            if 0.02 <= slower < 0.99:
                lines.append(f"The {_KINDS[kind]} of stage {stage} may be {slower:.0%} slower at no cost.")
        return "\n".join(lines) + "\n"

    @property
    def _heaviest(self) -> str:
        """Which layer takes more than half of the forwards of the busiest stage."""
        layers = self.steps[-1].get("layers") or []
        times = [seconds for stage, seconds in layers if stage == self.busiest]
        if len(times) < 2 or max(times) < 0.5 * sum(times):
            return ""
        heaviest = [stage for stage, _ in layers].index(self.busiest) + times.index(max(times))
        name = "the loss" if heaviest == len(layers) - 1 else f"layer {heaviest}"
        return f", {max(times) / sum(times):.0%} of its forwards in {name}"

    def _waited(self, worker: int) -> dict[str, float]:
        """Returns what a worker waited for, in seconds over all steps."""
        waited: dict[str, float] = defaultdict(float)
        for step in self.steps:
            for cause, of, stage, kind, _, edge, seconds in (
                piece for waiting, _, _, pieces in step["waits"] if waiting == worker for piece in pieces
            ):
                data = step["edges"][edge] if cause == "wire" and edge >= 0 else None
                action = f"{_KINDS[kind]} on stage {stage}"
                names = {
                    "work": action,
                    "queued": f"a core for the {action}",
                    "blocked": f"a lock or sleep in the {action}",
                    "wire": f"data between stages {data[0]} and {data[1]}" if data else f"hand-overs in worker {of}",
                }
                waited[names.get(cause, "the caller")] += seconds
        return waited


def _range(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest value without a tenth at each end."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return ordered[tenth], ordered[-1 - tenth]


def to_page(lines: str) -> str:
    """Returns the page that shows lines of a report. A line may have a ``name``."""
    page = (Path(__file__).parent / "report.html").read_text()
    page = page.replace("@PARTS@", json.dumps(_PARTS)).replace("@KINDS@", json.dumps(_KINDS))
    return page.replace("@DATA@", lines.replace("</", "<\\/"))  # which JSON allows


@contextmanager
def watch(pipe: Any, *, out: TextIO | None = None, memory: Memory | None = None) -> Iterator[None]:
    """Shows each :meth:`gpipe.GPipe.step` within a ``with`` block: a lane per worker in a terminal, a line elsewhere.

        with gpipe.report.watch(pipe):
            train(pipe)

    Traces the steps, so it cannot be used with :meth:`gpipe.GPipe.trace`. Over ranks, all call it, and rank 0 shows. Writes
    to the standard error stream unless given another. ``memory`` is as in :meth:`gpipe.GPipe.report`."""
    check_is(pipe, "pipe", torch.nn.Module, "a gpipe.GPipe")
    stream, step, shows = out or sys.stderr, pipe.step, pipe.ranks is None or pipe.ranks.rank == 0
    room = pipe._room(memory)
    view, timeline, count, before = _C.Watch(), _C.Timeline(), 0, time.perf_counter()

    def watched(input: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count, before
        timeline.clear()
        pipe.trace(timeline)
        result = step(input, *args, **kwargs)
        gathered = pipe.team.gather_timeline(timeline)
        now, count = time.perf_counter(), count + 1
        seconds, before = now - before, now
        if shows:
            loss = result[0] if isinstance(result, tuple) else result
            sizes = [leaf.shape[0] for leaf in tree_leaves(input) if isinstance(leaf, torch.Tensor) and leaf.dim()]
            text = f"step {count}: {_time(seconds)}, loss {float(loss):.4g}"
            text += f", {max(sizes, default=0) / seconds:.4g} samples/s"
            columns = max(10, shutil.get_terminal_size().columns - 1) if stream.isatty() else 0
            stream.write(view.show(gathered, text, columns, room))
            stream.flush()
        return result

    vars(pipe)["step"] = watched
    try:
        yield
    finally:
        vars(pipe).pop("step", None)
        pipe.trace(None)


def _time(seconds: float) -> str:
    for unit, factor in (("µs", 1e-6), ("ms", 1e-3)):
        if abs(seconds) < 999.5 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"
