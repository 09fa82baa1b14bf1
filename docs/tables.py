"""Writes the table of schedules in guide.md, by the library's simulator: `python docs/tables.py`, with gpipe installed.

The table is between `<!-- table steps -->` and `<!-- end -->`. With `--draw`, writes the page of schedules that only the
web pages show into docs/figures/web.
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
from gpipe.report import to_page

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
    """Makes a page of the schedules of the table, and of the steps that how_it_works.md explains."""
    shown = [(row[0], simulate(row)) for row in ROWS]
    shown += [(f"{row[0]}, 16 micro-batches", simulate(row, 16)) for row in ROWS if row[1] == 1]
    for name, milliseconds, chunks, checkpoint in [
        ("one micro-batch", 40, 1, "never"),
        ("four micro-batches", 10, 4, "never"),
        ("recomputed", 10, 4, "always"),
    ]:
        seconds = [milliseconds / 1000 * part for part in (1, 1, 2, 1, 1)]
        shown.append((name, _C.Schedule("gpipe", range(WORKERS), chunks, checkpoint).simulate(seconds)))
    lines = [json.dumps(json.loads(each.timeline.to_json_lines()) | {"name": name}) for name, each in shown]
    folder = DOCS / "figures" / "web"
    folder.mkdir(exist_ok=True)
    (folder / "schedules.html").write_text(to_page("\n".join(lines)))


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
