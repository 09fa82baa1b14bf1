"""Draws the schedules of docs/schedule_gallery.md and writes the tables of numbers in the pages about schedules.

All come from the simulator: `python docs/schedule_pages.py PROGRAM`, where PROGRAM is gpipe-schedule. `--check` changes
nothing, and fails if a figure or a number is not up to date. Needs neither torch nor gpipe.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from picture import FOLDER, RED, Picture

DOCS = Path(__file__).parent
PAGES = ("schedules.md", "schedule_gallery.md", "how_it_works.md")
WORKERS = 4
# Name, stages per worker, placement.
Row = tuple[str, int, str]
ROWS: list[Row] = [
    ("gpipe", 1, ""),
    ("1f1b", 1, ""),
    ("looped_bfs", 2, ""),
    ("interleaved_1f1b", 2, ""),
    ("zb_h1", 1, ""),
    ("zb_h2", 1, ""),
    ("interleaved_zb", 2, ""),
    ("zb_v", 2, ""),
    ("v_half", 2, ""),
    ("v_min", 2, ""),
    ("dualpipe_v", 2, ""),
    ("greedy", 1, ""),
    ("greedy", 2, "v"),
]


class Simulator:
    def __init__(self, program: str) -> None:
        self.program = program

    def run(
        self,
        verb: str,
        row: Row,
        chunks: int = 8,
        checkpoint: str = "never",
        costs: tuple[float, float, float] = (10, 10, 10),
    ) -> str:
        """Calls the program for the example: four workers, F, I and W of a worker in ms, and a skip from end to end."""
        schedule, stages_per_worker, placement = row
        forward, inputs, weights = (f"{each / 1000 / stages_per_worker}" for each in costs)
        stages = WORKERS * stages_per_worker
        command = [self.program, verb, schedule, "--workers", f"{WORKERS}", "--stages", f"{stages}"]
        command += ["--chunks", f"{chunks}", "--checkpoint", checkpoint, "--skip", f"0:{stages - 1}"]
        command += ["--forward", forward, "--backward", f"{(costs[1] + costs[2]) / 1000 / stages_per_worker}"]
        command += ["--input-gradient", inputs, "--weight-gradient", weights]
        command += ["--placement", placement] if placement else []
        if verb == "simulate":
            graph = 100 * 10**6 // stages_per_worker  # the inputs of a stage do not shrink
            command += ["--graph-bytes", f"{graph}", "--input-bytes", f"{10 * 10**6}", "--json"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def step(self, row: Row, *args: Any, **named: Any) -> dict[str, Any]:
        step: dict[str, Any] = json.loads(self.run("simulate", row, *args, **named))
        return step


def name(row: Row) -> str:
    schedule, stages_per_worker, placement = row
    return f"`{schedule}`" + (", V" if placement else "") + (f", v = {stages_per_worker}" if stages_per_worker > 1 else "")


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def milliseconds(step: dict[str, Any]) -> str:
    return f"{number(1000 * step['makespan'])} ms"


def percent(step: dict[str, Any]) -> str:
    return f"{100 * step['bubble']:.1f} %"


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def steps(simulator: Simulator) -> str:
    def line(row: Row) -> list[str]:
        step = simulator.step(row)
        (skip,) = (edge for edge in step["edges"] if edge["name"].startswith("skip"))
        cells = ", ".join(map(str, step["peak_cells"]))
        memory = number(max(step["peak_cells"]) / row[1])
        return [name(row), milliseconds(step), percent(step), cells, memory, str(skip["capacity"])]

    columns = ["schedule", "time of a step", "bubble", "most cells on workers 0, 1, 2, 3", "memory", "skips"]
    return table(columns, map(line, ROWS))


def bubbles(simulator: Simulator) -> str:
    chunks = (2, 4, 8, 16, 32, 64)
    lines = ([name(row), *(percent(simulator.step(row, chunks=each)) for each in chunks)] for row in ROWS)
    return table(["schedule", *(f"m = {each}" for each in chunks)], lines)


def unequal(simulator: Simulator) -> str:
    costs = [(10, 10, 10), (10, 8, 12), (10, 13, 7), (10, 16, 4)]
    rows = [row for row in ROWS if row[0] not in ("gpipe", "looped_bfs")]
    lines = ([name(row), *(milliseconds(simulator.step(row, chunks=16, costs=each)) for each in costs)] for row in rows)
    return table(["schedule", *("F = {}, I = {}, W = {}".format(*each) for each in costs)], lines)


def checkpointing(simulator: Simulator) -> str:
    def cell(row: Row, mode: str) -> str:
        step = simulator.step(row, checkpoint=mode)
        return f"{milliseconds(step)}, {number(max(step['peak_bytes']) / 1e6)} MB"

    modes = ["never", "except_last", "always"]
    lines = ([name(row), *(cell(row, mode) for mode in modes)] for row in ROWS)
    return table(["schedule", *(f"`{mode}`" for mode in modes)], lines)


TABLES: dict[str, Callable[[Simulator], str]] = {
    "steps": steps,
    "bubbles": bubbles,
    "unequal": unequal,
    "checkpointing": checkpointing,
}


def with_skip(svg: str, stages: int) -> str:
    """Adds the way of micro-batch 0 along a skip from the first stage to the last, that of its gradient back, and a
    legend below."""
    picture = Picture(0, 0)

    def cell(kinds: str, stage: int) -> tuple[float, float, float, float]:
        """Outlines an action of micro-batch 0. Returns its left edge, right edge, top and bottom."""
        title = rf"<title>(?:{kinds}) of micro-batch 0 on stage {stage}: [^<]*</title>"
        found = re.search(title + r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
        assert found
        x, y, width, height = map(float, found.groups())
        picture.path(f"M{x:g} {y:g} h{width:g} v{height:g} h{-width:g} z", RED, 2.2)
        return x, x + width, y, y + height

    def arrow(kinds: str, sender: int, receiver: int, dash: str = "") -> None:
        left, right = cell(kinds, sender), cell(kinds, receiver)
        x1, x2 = left[1] - 4, right[0] + 4
        if left[2] == right[2]:  # on one worker
            y1, y2, bends = left[3], right[3], (26, 26)
        elif left[2] < right[2]:
            y1, y2, bends = left[3], right[2], (40, -40)
        else:
            y1, y2, bends = left[2], right[3], (-40, 40)
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + bends[0]:g} {x2:g} {y2 + bends[1]:g} {x2:g} {y2:g}"
        picture.path(path, "#ffffff", 5)
        picture.path(path, RED, 2.2, arrow=True, dash=dash)

    arrow("forward", 0, stages - 1)
    arrow("backward|input gradient", stages - 1, 0, dash="6 3")
    size = re.search(r'viewBox="0 0 (\d+) (\d+)" width="\d+" height="\d+"', svg)
    assert size
    width, height = int(size[1]), int(size[2]) + 22
    for x, text, dash in ((72.0, "skip of micro-batch 0", ""), (270.0, "its gradient", "6 3")):
        picture.path(f"M{x:g} {height - 17:g} h28", RED, 2.2, arrow=True, dash=dash)
        picture.text(x + 36, height - 12, text, "start", size=13)
    head = (
        f'<defs><marker id="{RED[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{RED}"/></marker></defs>\n'
    )
    label = re.compile(r"(?:<text [^>]*>[IW]</text>)?<text [^>]*>\d+</text>(?=</g>)")  # moved to the top of the arrows
    parts = picture.parts + label.findall(svg)
    svg = svg.replace(size[0], f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"')
    return label.sub("", svg).replace("</svg>", head + "\n".join(parts) + "\n</svg>")


def figures(simulator: Simulator) -> dict[Path, str]:
    drawn = {
        FOLDER / f"schedule_{row[0]}.svg": with_skip(simulator.run("draw", row), WORKERS * row[1])
        for row in ROWS
        if row != ("greedy", 1, "")
    }
    drawn[FOLDER / "schedule_recompute.svg"] = simulator.run("draw", ("1f1b", 1, ""), checkpoint="always")
    return drawn


def page(simulator: Simulator, text: str, drawn: dict[Path, str]) -> str:
    """Writes the tables between `<!-- table NAME -->` and `<!-- end -->`, and the times in the texts of figures."""

    def numbers(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{TABLES[found[2]](simulator)}\n<!-- end -->"

    def times(found: re.Match[str]) -> str:
        shown = re.search(r">([\d.]+ ms, \d+ % idle)<", drawn[FOLDER / found[3]])
        assert shown
        return f"{found[1]}{shown[1]}{found[2]}{found[3]})"

    text = re.sub(r"(<!-- table (\w+) -->)\n.*?<!-- end -->", numbers, text, flags=re.DOTALL)
    return re.sub(r"(!\[[^\]]*?)[\d.]+ ms, \d+ % idle([^\]]*\]\(figures/)(schedule_\w+\.svg)\)", times, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="gpipe-schedule")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not up to date")
    options = parser.parse_args()
    simulator = Simulator(options.program)
    wanted = figures(simulator)
    wanted |= {DOCS / each: page(simulator, (DOCS / each).read_text(), wanted) for each in PAGES}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if options.check:
        if stale:
            sys.exit("out of date: " + ", ".join(path.name for path in stale) + "; run docs/schedule_pages.py")
        return
    for path in stale:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
