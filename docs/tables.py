"""Writes the tables of the pages, all from the library's simulator: `python docs/tables.py`, with gpipe installed.

A page has a table between `<!-- table NAME -->` and `<!-- end -->`. With `--draw`, writes the timelines that only the web
pages show into docs/figures/web.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

from gpipe import _C
from gpipe.balance import Candidate, Cluster, ClusterPlan, Profile, plan_cluster
from published import UNet

DOCS = Path(__file__).parent


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    header = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns) + "\n"
    return header + "".join("| " + " | ".join(row) + " |\n" for row in rows)


# Schedules

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


def gallery() -> str:
    """Returns what the web pages show of every schedule: its picture, and the bubble for m micro-batches."""
    text = "## All schedules in pictures\n\nA number is a micro-batch. A worker's later stages are paler.\n"
    for row in ROWS:
        name = f"`{row[0]}`" + (", V" if row[2] == "in a V" else "") + (", v = 2" if row[1] > 1 else "")
        bubbles = ", ".join(f"{100 * simulate(row, chunks).bubble:.1f} % for m = {chunks}" for chunks in (4, 8, 16, 32))
        text += f"\n### {name}\n\n![{row[0]}](figures/web/{file_of(row)})\n\nBubble: {bubbles}.\n"
    return text


def file_of(row: Row) -> str:
    return f"schedule_{row[0]}{'_v' if row[2] == 'in a V' else ''}.svg"


def draw() -> None:
    """Draws the schedules, and the steps that how_it_works.md explains."""
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
        (folder / file_of(row)).write_text(simulate(row).timeline.to_svg())
    (folder / "borders.svg").write_text(borders())


def borders() -> str:
    """Draws the bytes that cross each border of the U-Net, with the borders between hosts of two plans."""
    profile = measured()
    count, height, width = len(profile.layers) - 1, 160, 8
    crossing = [bytes_ or 0 for bytes_ in profile.cut_bytes()][:count]
    skips = [
        sum(each.bytes for each in profile.skips if each.from_layer <= border < max(each.reader_layers))
        for border in range(count)
    ]
    scale = height / max(crossing)
    parts = []
    for border, (total, of_skips) in enumerate(zip(crossing, skips)):
        for top, bytes_, color in ((total, total - of_skips, "#1f77b4"), (of_skips, of_skips, "#bbbbbb")):
            place = f'x="{40 + width * border}" y="{height + 30 - top * scale:.1f}" width="{width - 1}"'
            parts.append(f'<rect {place} height="{bytes_ * scale:.1f}" fill="{color}"/>')
    for name, cuts, y in (("looped", (20, 42, 57), height + 50), ("V", (24, 46), height + 70)):
        parts.append(f'<text x="0" y="{y}">{name}</text>')
        parts += [f'<text x="{40 + width * (cut - 1)}" y="{y}">▲</text>' for cut in cuts]
    label = "bytes that cross a border: the activation (blue) and skips (grey, on one host in the V)"
    parts.append(f'<text x="40" y="16">{label}</text>')
    size = f'width="{60 + width * count}" height="{height + 80}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'


# Clusters

INSIDE = {"bandwidth": 5e9, "latency": 2e-6}
BETWEEN = {"bandwidth": 0.15e9, "latency": 50e-6}  # a device's share of a card with 10 Gbit/s
COLUMNS = ["replicas × workers", "stages", "schedule", "checkpoint", "m", "step", "samples/s", "bubble", "sums", "memory"]

V_ONLY = [name for name, _, is_v in _C.schedule_rules() if is_v]


def measured() -> Profile:
    return Profile.from_json((DOCS / "cluster_study" / "unet.json").read_text())


def plan(devices: int, samples: int) -> ClusterPlan:
    hosts = {"hosts": devices // 8, "devices_per_host": 8, "memory": 2 << 30, "inside": INSIDE, "between": BETWEEN}
    return plan_cluster(Cluster.from_json(json.dumps(hosts)), [measured()], samples)


def cells_of(candidate: Candidate, samples: int) -> list[str]:
    in_v = candidate.placement[-1] == 0 < max(candidate.placement)
    return [
        f"{candidate.replicas} × {len(candidate.bytes)}",
        str(len(candidate.balance)),
        f"`{candidate.schedule}`" + (", V" if in_v and candidate.schedule not in V_ONLY else ""),
        f"`{candidate.checkpoint}`",
        str(candidate.chunks),
        f"{candidate.seconds:.2f} s",
        f"{samples / candidate.seconds:.1f}",
        f"{100 * candidate.bubble:.0f} %",
        f"{candidate.reduction:.2f} s",
        f"{max(candidate.bytes) / 2**20:.0f} MiB" + ("" if candidate.fits else ", too large"),
    ]


def best() -> str:
    profile = measured()
    alone = sum(layer.forward + layer.backward for layer in profile.layers) / profile.samples
    rows = [["1, measured", "4", "1 × 1", "1", "", "`never`", "1", f"{4 * alone:.2f} s", f"{1 / alone:.1f}", "", "", ""]]
    for devices, samples in [(8, 64), (64, 512), (1024, 8192), (1024, 1024)]:
        rows.append([str(devices), str(samples), *cells_of(plan(devices, samples).best, samples)])
    return table(["devices", "samples", *COLUMNS], rows)


def thousand() -> str:
    return table(COLUMNS, [cells_of(each, 8192) for each in plan(1024, 8192).candidates])


def unet() -> str:
    rows: list[list[str]] = []
    for run, speed in UNet().predict():
        error = f"{100 * (speed / run.speed - 1):+.0f} %" if rows else "calibrated"
        rows.append([str(len(run.balance)), f"{run.speed:.1f}", f"{speed:.1f}", error])
    return table(["GPUs", "published samples/s", "predicted samples/s", "error"], rows)


TABLES: dict[str, Callable[[], str]] = {"steps": steps, "best": best, "thousand": thousand, "unet": unet}


def fill(page: str, tables: dict[str, Callable[[], str]], check: bool = False) -> bool:
    """Writes tables into a page, unless they are to be checked only. Returns whether the page was out of date."""
    path = DOCS / page
    text = path.read_text()
    wanted = re.sub(
        r"(<!-- table (\w+) -->)\n.*?<!-- end -->",
        lambda found: f"{found[1]}\n\n{tables[found[2]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )
    if not check:
        path.write_text(wanted)
    return text != wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is not up to date")
    parser.add_argument("--draw", action="store_true", help="draw the timelines instead")
    parser.add_argument("pages", nargs="*", default=["schedules.md", "cluster_study.md"])
    options = parser.parse_args()
    if options.draw:
        return draw()
    for page in options.pages:
        if fill(page, TABLES, options.check) and options.check:
            sys.exit(f"out of date: {page}; run docs/tables.py")


if __name__ == "__main__":
    main()
