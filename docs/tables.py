"""Writes the tables and timelines of the pages, all from the library's simulator: `python docs/tables.py`, with gpipe installed.

A page has a table between `<!-- table NAME -->` and `<!-- end -->`. docs/build also shows `gallery()` and what `--draw` draws
into docs/figures/web.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from gpipe.balance import Candidate, Cluster, ClusterPlan, Prediction, Profile, plan_cluster, predict
from profiles import PCIE, AmoebaNetD, Layer, UNet, make_profile

DOCS = Path(__file__).parent


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


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


def step(row: Row, chunks: int = 8, checkpoint: str = "never", costs: tuple[int, int, int] = (10, 10, 10)) -> Prediction:
    """Simulates a step on four workers: F, I and W of a worker in ms, and a skip from the first stage to the last."""
    name, per_worker, placed, _ = row
    stages = WORKERS * per_worker
    f, i, w = (each / 1000 / per_worker for each in costs)
    profile = make_profile([Layer("stage", f, i + w, 0, i, w)] * stages, [("skip", 0, stages - 1, 1)])
    in_v = "in a V" in placed
    return predict(
        profile,
        [1] * stages,
        chunks,
        checkpoint,
        schedule=name,
        stages_per_worker=1 if in_v else per_worker,
        placement="v" if in_v and name == "greedy" else "looped",
    )


def peaks(row: Row, prediction: Prediction) -> tuple[float, int, float]:
    """Returns the most cells of a worker, divided by its stages; the most micro-batches whose skip is in memory; and the
    most MB of a worker, whose intermediate results of a micro-batch take 100 MB and whose stored inputs take 10 MB."""
    trace = json.loads(prediction.timeline.to_chrome_json())["traceEvents"]
    events = [each["args"] | {"worker": each["tid"]} for each in trace if each.get("cat") == "action"]
    last = {(each["stage"], each["micro_batch"]): each["kind"] for each in events}
    recomputed = {(each["stage"], each["micro_batch"]) for each in events if each["kind"] == "R"}
    cells, size, skips = [0] * WORKERS, [0.0] * WORKERS, 0
    most_cells, most_skips, most_bytes = 0, 0, 0.0
    for each in events:
        worker, kind, cell = each["worker"], each["kind"], (each["stage"], each["micro_batch"])
        if kind == "F":
            cells[worker] += 1
            size[worker] += 10 * row[1] if cell in recomputed else 100
            skips += each["stage"] == 0
        elif kind == "R":
            size[worker] += 100 - 10 * row[1]
        most_cells, most_skips = max(most_cells, *cells), max(most_skips, skips)
        most_bytes = max(most_bytes, *size)
        skips -= each["stage"] == 0 and kind in "BI"
        if kind == last[cell]:
            cells[worker] -= 1
            size[worker] -= 100
    return most_cells / row[1], most_skips, most_bytes / row[1]


def name_of(row: Row) -> str:
    return f"`{row[0]}`" + (", V" if row[2] == "in a V" else "") + (", v = 2" if row[1] > 1 else "")


def milliseconds(prediction: Prediction) -> str:
    return f"{1000 * prediction.seconds:.1f}".removesuffix(".0") + " ms"


def steps() -> str:
    def line(row: Row) -> list[str]:
        prediction = step(row)
        cells, skips, _ = peaks(row, prediction)
        numbers = [milliseconds(prediction), f"{100 * prediction.bubble:.1f} %", f"{cells:g}", str(skips)]
        return [f"`{row[0]}`", row[2], row[3], *numbers]

    return table(["schedule", "stages per worker", "backwards", "step", "bubble", "memory", "skips"], map(line, ROWS))


def bubbles() -> str:
    chunks = (2, 4, 8, 16, 32, 64)
    lines = ([name_of(row), *(f"{100 * step(row, each).bubble:.1f} %" for each in chunks)] for row in ROWS)
    return table(["schedule", *(f"m = {each}" for each in chunks)], lines)


def unequal() -> str:
    costs = [(10, 10, 10), (10, 8, 12), (10, 13, 7), (10, 16, 4)]
    rows = [row for row in ROWS if row[0] not in ("gpipe", "looped_bfs")]
    lines = ([name_of(row), *(milliseconds(step(row, 16, costs=each)) for each in costs)] for row in rows)
    return table(["schedule", *("F = {}, I = {}, W = {}".format(*each) for each in costs)], lines)


def checkpointing() -> str:
    def cell(row: Row, mode: str) -> str:
        prediction = step(row, checkpoint=mode)
        return f"{milliseconds(prediction)}, {peaks(row, prediction)[2]:.0f} MB"

    modes = ["never", "except_last", "always"]
    lines = ([name_of(row), *(cell(row, each) for each in modes)] for row in ROWS)
    return table(["schedule", *(f"`{each}`" for each in modes)], lines)


def gallery() -> str:
    """Returns what the web pages show of every schedule: pictures and tables."""
    pictures = "\n".join(f"### {name_of(row)}\n\n![{row[0]}](figures/web/{file_of(row)})\n" for row in ROWS)
    return f"""## All schedules in pictures and numbers

In the pictures, a number is a micro-batch, and I and W mark the two parts of a split backward. A worker's later stages are
paler.

{pictures}
### The bubble for m micro-batches

{bubbles()}
### Other times in ms, 16 micro-batches

{unequal()}
### Checkpointing

Time of a step, and memory of the fullest worker, if its intermediate results for one micro-batch take 100 MB and the stored
inputs 10 MB. Intermediate results are counted until W; in a real step, I frees those that W does not need.

{checkpointing()}"""


def file_of(row: Row) -> str:
    return f"schedule_{row[0]}{'_v' if row[2] == 'in a V' else ''}.svg"


def draw() -> None:
    """Draws the schedules, and the steps that how_it_works.md explains."""
    folder = DOCS / "figures"
    (folder / "web").mkdir(exist_ok=True)
    steps = [("web/one_micro_batch", 4, 1, "never"), ("four_micro_batches", 1, 4, "never"), ("web/recompute", 1, 4, "always")]
    for name, part, chunks, checkpoint in steps:
        stages = make_profile([Layer("stage", 0.01 * part, 0.02 * part, 0)] * 4, [])
        (folder / f"{name}.svg").write_text(predict(stages, [1] * 4, chunks, checkpoint).timeline.to_svg())
    for row in ROWS:
        (folder / "web" / file_of(row)).write_text(step(row).timeline.to_svg())


# Clusters

INSIDE = {"bandwidth": 5e9, "latency": 2e-6}
BETWEEN = {"bandwidth": 0.15e9, "latency": 50e-6}  # a device's share of a card with 10 Gbit/s
COLUMNS = ["replicas × workers", "stages", "schedule", "checkpoint", "m", "step", "samples/s", "bubble", "sums", "memory"]


def measured() -> Profile:
    return Profile.from_json((DOCS / "cluster_study" / "unet.json").read_text())


def plan(devices: int, samples: int) -> ClusterPlan:
    hosts = {"hosts": devices // 8, "devices_per_host": 8, "memory": 2 << 30, "inside": INSIDE, "between": BETWEEN}
    return plan_cluster(Cluster.from_json(json.dumps(hosts)), [measured()], samples)


def cells_of(candidate: Candidate, samples: int) -> list[str]:
    return [
        f"{candidate.replicas} × {len(candidate.bytes)}",
        str(len(candidate.balance)),
        f"`{candidate.schedule}`" + (", V" if candidate.placed_by == "v" else ""),
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


# GPUs, published samples/s, batch, chunks, balance, checkpoint mode. The first calibrates the model.
Published = tuple[str, float, int, int, list[int], str]
OF_UNET: list[Published] = [
    ("1", 24.456, 80, 2, [241], "except_last"),
    ("2", 35.502, 512, 32, [104, 137], "except_last"),
    ("4", 67.042, 512, 16, [30, 66, 84, 61], "except_last"),
    ("8", 88.497, 640, 40, [16, 27, 31, 44, 22, 57, 27, 17], "except_last"),
]
OF_AMOEBANET: list[Published] = [
    ("2, m = 1", 26.733, 96, 1, [7, 17], "always"),
    ("2, m = 4", 41.133, 256, 4, [9, 15], "except_last"),
    ("2, m = 32", 47.386, 1280, 32, [9, 15], "except_last"),
    ("4, m = 1", 26.827, 160, 1, [3, 4, 5, 12], "always"),
    ("4, m = 4", 44.543, 360, 4, [3, 6, 7, 8], "except_last"),
    ("4, m = 32", 72.412, 1152, 32, [3, 6, 7, 8], "except_last"),
    ("8, m = 1", 24.918, 196, 1, [2, 2, 2, 2, 2, 3, 4, 7], "always"),
    ("8, m = 4", 70.065, 480, 4, [2, 2, 2, 3, 3, 4, 4, 4], "except_last"),
    ("8, m = 32", 132.413, 1280, 32, [2, 2, 2, 3, 3, 4, 4, 4], "except_last"),
]


def published(model: UNet | AmoebaNetD, runs: list[Published]) -> str:
    def speed_of(run: Published, scale: float) -> float:
        _, _, samples, chunks, balance, mode = run
        profile = make_profile(model.layers, model.skips, samples / chunks, scale)
        return samples / predict(profile, balance, chunks, mode, bandwidth=PCIE, copies=True).seconds

    scale = speed_of(runs[0], 1) / runs[0][1]
    rows = []
    for run in runs:
        speed = speed_of(run, scale)
        error = f"{100 * (speed / run[1] - 1):+.0f} %" if rows else "calibrated"
        rows.append([run[0], f"{run[1]:.1f}", f"{speed:.1f}", error])
    return table(["GPUs", "published samples/s", "predicted samples/s", "error"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "steps": steps,
    "best": best,
    "thousand": thousand,
    "unet": lambda: published(UNet(), OF_UNET),
    "amoebanet": lambda: published(AmoebaNetD(), OF_AMOEBANET),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is not up to date")
    parser.add_argument("--draw", action="store_true", help="draw the timelines instead")
    options = parser.parse_args()
    if options.draw:
        return draw()
    for page in (DOCS / "schedules.md", DOCS / "cluster_study.md"):
        text = page.read_text()
        wanted = re.sub(
            r"(<!-- table (\w+) -->)\n.*?<!-- end -->",
            lambda found: f"{found[1]}\n\n{TABLES[found[2]]()}\n<!-- end -->",
            text,
            flags=re.DOTALL,
        )
        if options.check and text != wanted:
            sys.exit(f"out of date: {page.name}; run docs/tables.py")
        page.write_text(wanted)


if __name__ == "__main__":
    main()
