"""Compares this project, in C++ and in Python, with torchgpipe, torch.distributed.pipelining and
DistributedDataParallel.

    python -m venv --system-site-packages VENV      # of a Python that has torch and scikit-build-core
    VENV/bin/pip install torchgpipe==0.0.7
    VENV/bin/pip install ../..
    VENV/bin/python run.py --ours BUILD_FOLDER

A process measures one row for one contestant. The contestants take turns, so that disturbances of the machine affect
all of them. Every stage has one thread. Overhead is measured on one core, so that parallel work does not hide it;
everything else is measured on two cores.

Prints one JSON line per row and contestant: the median of its processes' medians, their minimum and their maximum. Then
prints a table of the medians, and the ratios of processes that ran in the same turn: their median and quartiles.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# Balances for two stages. No stage begins with an in-place layer, because in the peers a stage must not change its
# input.
CUTS = {"mlp": [8, 8], "unet": [43, 28], "resnet18": [44, 27], "resnet50": [103, 80]}


# The unit of a figure, its factor, and the cores that a process may use.
BENCHES = {
    "overhead": ("us/cell", 1e6, "0"),
    "speed": ("ms", 1e3, "0,1"),
    "replicas": ("ms", 1e3, "0,1"),  # over processes
}

SCHEDULES = ["gpipe", "1f1b", "auto"]  # only this project has "auto"
OURS = [f"{library} {schedule}" for library in ["gpipe", "gpipe python", "gpipe ranks"] for schedule in SCHEDULES]
PEERS = ["torchgpipe", "distributed gpipe", "distributed 1f1b"]
# The plain model: a loop over the micro-batches on one thread and on two, and the whole mini-batch on two.
PLAIN = {"loop on 1": [], "loop on 2": ["--threads", 2], "whole on 2": ["--threads", 2, "--whole"]}


class Row(NamedTuple):
    bench: str
    model: str
    balance: list[int]
    chunks: int  # of all replicas
    checkpoint: str
    replicas: int = 1


def rows(short: bool) -> list[Row]:
    few, more = ([4], [8]) if short else ([4, 8, 16], [8, 32])
    every = [
        Row("overhead", "tiny", [16 // stages] * stages, chunks, checkpoint)
        for stages, chunks, checkpoint in itertools.product([2, 4], more, ["never", "always"])
    ]
    for model, chunks, checkpoint in itertools.product(CUTS, few, ["never", "always"]):
        every.append(Row("speed", model, CUTS[model], chunks, checkpoint))
    for model in ["mlp", "unet", "resnet50"]:
        every.append(Row("replicas", model, [sum(CUTS[model])], 2, "never", replicas=2))
        every += [Row("replicas", model, CUTS[model], 8, "never", replicas=replicas) for replicas in (1, 2)]
    return every


def contestants(row: Row, ours: Path, steps: int) -> dict[str, list[object]]:
    """Returns the commands that measure the row, by contestant."""
    balance = ",".join(map(str, row.balance))
    flags = ["--model", row.model, "--balance", balance, "--chunks", row.chunks]
    flags += ["--checkpoint", row.checkpoint, "--repeats", steps]
    processes = ["--nproc-per-node", row.replicas * len(row.balance), "--master-port", 29511]
    job = [sys.executable, "-m", "torch.distributed.run", "--no-python", *processes]
    program = [ours / "bench" / "steps", *flags]
    python = [sys.executable, HERE / "steps.py", *flags, "--library"]
    if row.bench == "replicas":
        more = ["--schedule", "1f1b" if len(row.balance) > 1 else "gpipe", "--replicas", row.replicas]
        ranks = [*job, *program, "--over-ranks", *more]
        return {f"gpipe ranks {more[1]}": ranks, f"distributed {more[1]}": [*python, "distributed", *more]}
    own = {"gpipe python": [*python, "gpipe"]}
    if program[0].exists():
        own |= {"gpipe": program, "gpipe ranks": [*job, *program, "--over-ranks"]}
    commands = {f"{name} {each}": [*command, "--schedule", each] for each in SCHEDULES for name, command in own.items()}
    commands["torchgpipe"] = [*python, "torchgpipe"]
    if row.checkpoint == "never":
        for schedule in ("gpipe", "1f1b"):
            commands[f"distributed {schedule}"] = [*python, "distributed", "--schedule", schedule]
    if row.bench == "speed" and row.checkpoint == "never":
        commands |= {name: [*python, "plain", *more] for name, more in PLAIN.items()}
    return commands


def output_of(command: list[object], cores: str) -> str:
    """Runs a program with one thread per operator on these cores, and returns its standard output."""
    done = subprocess.run(
        ["taskset", "-c", cores, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\n{done.args} failed")
    return done.stdout


def figure(row: Row, command: list[object]) -> float:
    """Runs one process and returns the median of its measurements."""
    _, factor, cores = BENCHES[row.bench]
    lines = output_of(command, cores).splitlines()
    found = json.loads(next(line for line in lines if line.startswith("{")))  # Gloo prints lines too
    if row.bench != "overhead":
        return factor * statistics.median(found["seconds"])
    cells = row.chunks * len(row.balance)
    return factor * statistics.median(step - plain for step, plain in zip(found["seconds"], found["plain"])) / cells


def measure(row: Row, names: list[str], ours: Path, steps: int, repeats: int) -> dict[str, list[float]]:
    commands = {name: command for name, command in contestants(row, ours, steps).items() if name in names}
    values: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            print(f"{row.bench} {row.model} {row.chunks} {row.checkpoint} {name}", file=sys.stderr)
            values[name].append(figure(row, command))
    return values


def line(row: Row, peer: str, values: list[float]) -> str:
    summary = {"value": statistics.median(values), "min": min(values), "max": max(values), "values": values}
    return json.dumps({**row._asdict(), "peer": peer, "unit": BENCHES[row.bench][0], **summary})


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def ratio(theirs: list[float], ours: list[float]) -> str:
    """Returns the median and the quartiles of the ratios of processes that ran in the same turn."""
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


def table(results: list[tuple[Row, dict[str, list[float]]]]) -> str:
    measured = {name for _, values in results for name in values}
    names = [name for name in [*OURS, *PEERS, *PLAIN] if name in measured]
    compared = [name for name in names if name.startswith("gpipe python")]
    others = ["best peer", *(name for name in PLAIN if name in measured)]
    ratios = [f"{other} / {name}" for name in compared for other in others]
    lines = []
    for row, values in results:
        medians = {name: statistics.median(each) for name, each in values.items()}
        peers = [name for name in medians if name in PEERS]
        theirs = {name: values[name] for name in PLAIN if name in values}
        if peers:
            theirs["best peer"] = values[min(peers, key=medians.__getitem__)]
        cells = [row.model, str(row.replicas), str(len(row.balance)), str(row.chunks), row.checkpoint, BENCHES[row.bench][0]]
        cells += [f"{medians[name]:.4g}" if name in medians else "" for name in names]
        for name, other in itertools.product(compared, others):
            comparable = other in theirs and medians.get(name, 0) > 0
            cells.append(ratio(theirs[other], values[name]) if comparable else "")
        lines.append(cells)
    return markdown(["model", "replicas", "stages", "chunks", "checkpoint", "unit", *names, *ratios], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True, help="the build folder of this project")
    for flag, choices in {
        "models": ["tiny", *CUTS],
        "benches": list(BENCHES),
        "chunks": [2, 4, 8, 16, 32],
        "checkpoints": ["never", "except_last", "always"],
        "contestants": [*OURS, *PEERS, *PLAIN],
    }.items():
        parser.add_argument(f"--{flag}", nargs="+", type=type(choices[0]), default=choices, choices=choices)
    parser.add_argument("--repeats", type=int, default=5, help="processes per row and contestant")
    parser.add_argument("--short", action="store_true", help="few rows and steps, to try it out")
    args = parser.parse_args()
    if args.short:
        args.repeats = 1
    results = []
    for row in rows(args.short):
        asked = row.model in args.models and row.bench in args.benches
        if not asked or row.chunks not in args.chunks or row.checkpoint not in args.checkpoints:
            continue
        steps = 3 if args.short else 41 if row.bench == "overhead" else 5
        values = measure(row, args.contestants, args.ours, steps, args.repeats)
        results.append((row, values))
        for peer, each in values.items():
            print(line(row, peer, each), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
