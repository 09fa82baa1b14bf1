"""Writes the table of schedules in guide.md, by the library's simulator: `python docs/tables.py`, with gpipe installed.

The table is between `<!-- table steps -->` and `<!-- end -->`. With `--draw`, writes the timelines that only the web
pages show into docs/figures/web.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from gpipe import _C

DOCS = Path(__file__).parent


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    header = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns) + "\n"
    return header + "".join("| " + " | ".join(row) + " |\n" for row in rows)


WORKERS = 4
Row = tuple[str, int, str, str]  # name, stages per worker, how stages are placed, how backwards run
ROWS: list[Row] = [
    ("gpipe", 1, "any", "whole"),
    ("1f1b", 1, "1", "whole"),
    ("looped_bfs", 2, "v ≥ 2", "whole"),
    ("interleaved_1f1b", 2, "v ≥ 2", "whole"),
    ("zb_h1", 1, "1", "split"),
    ("zb_h2", 1, "1", "split"),
    ("interleaved_zb", 2, "v ≥ 2", "split"),
    ("zb_v", 2, "2, in a V", "split"),
    ("v_half", 2, "2, in a V", "split"),
    ("v_min", 2, "2, in a V", "split"),
    ("dualpipe_v", 2, "2, in a V", "split or whole"),
    ("greedy", 1, "any", "split"),
    ("greedy", 2, "in a V", "split"),
]


def simulate(row: Row, chunks: int = 8) -> _C.Simulation:
    """Simulates a step: 10 ms for F, I and W of a worker."""
    name, per_worker, placed, _ = row
    stages = WORKERS * per_worker
    placement = _C.v_placement(stages) if "in a V" in placed else [stage % WORKERS for stage in range(stages)]
    seconds = [part / 100 / per_worker for part in (1, 1, 2, 1, 1)]  # of F, R, B, I and W
    return _C.Schedule(name, placement, chunks, "never").simulate(seconds)


def most_skips(simulation: _C.Simulation) -> int:
    """Returns the most micro-batches whose skip is in memory: from F of the first stage to its B or I."""
    actions = [each["args"] for each in json.loads(simulation.timeline.to_chrome_json())["traceEvents"] if each.get("cat") == "action"]
    return max(accumulate({"F": 1, "W": 0}.get(each["kind"], -1) for each in actions if each["stage"] == 0))


def steps() -> str:
    def line(row: Row) -> list[str]:
        found = simulate(row)
        cells = max(found.peak_cells) / row[1]
        numbers = [f"{1000 * found.makespan:.0f} ms", f"{100 * found.bubble:.1f} %", f"{cells:g}", str(most_skips(found))]
        return [f"`{row[0]}`", *row[2:], *numbers]

    return table(["schedule", "stages per worker", "backwards", "step", "bubble", "memory", "skips"], map(line, ROWS))


def draw() -> None:
    """Draws four schedules, and the steps that how_it_works.md explains."""
    folder = DOCS / "figures" / "web"
    folder.mkdir(exist_ok=True)
    for name, milliseconds, chunks, checkpoint in [
        ("one_micro_batch", 40, 1, "never"),
        ("four_micro_batches", 10, 4, "never"),
        ("recompute", 10, 4, "always"),
    ]:
        seconds = [milliseconds / 1000 * part for part in (1, 1, 2, 1, 1)]
        simulation = _C.Schedule("gpipe", range(WORKERS), chunks, checkpoint).simulate(seconds)
        (folder / f"{name}.svg").write_text(simulation.timeline.to_svg())
    for row in ROWS:
        if row[0] in ("gpipe", "1f1b", "interleaved_1f1b", "zb_v"):
            (folder / f"{row[0]}.svg").write_text(simulate(row).timeline.to_svg())


def fill(page: Path, check: bool = False) -> bool:
    """Writes the table into a page, unless it is to be checked only. Returns whether the page was out of date."""
    text = page.read_text()
    pattern = r"(<!-- table steps -->)\n.*?<!-- end -->"
    wanted = re.sub(pattern, lambda found: f"{found[1]}\n\n{steps()}\n<!-- end -->", text, flags=re.DOTALL)
    if not check:
        page.write_text(wanted)
    return text != wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is not up to date")
    parser.add_argument("--draw", action="store_true", help="draw the timelines instead")
    options = parser.parse_args()
    if options.draw:
        return draw()
    if fill(DOCS / "guide.md", options.check) and options.check:
        sys.exit("out of date: guide.md; run docs/tables.py")


if __name__ == "__main__":
    main()
