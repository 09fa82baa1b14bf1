"""Counts the processor time and the calls of epoll_wait per step of two processes. Gloo waits by epoll_wait, so many calls
tell of a process that spins while it waits.

    python processor.py --ours BUILD_FOLDER

Each repeat runs a job of many steps and one of few, and divides the difference by the steps. Prints one JSON line per model and
contestant, then a table, with the medians of the repeats. Needs perf, and the right to count system calls.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from run import CUTS, Row, contestants, output_of

EVENTS = {"milliseconds": "task-clock", "epoll_wait": "syscalls:sys_enter_epoll_wait"}
CONTESTANTS = ["gpipe ranks 1f1b", "gpipe ranks 1f1b reuse", "distributed 1f1b"]
FEW = 2  # steps


def counts(command: list[object]) -> dict[str, float]:
    """Runs a job and counts the events of all its processes."""
    with tempfile.NamedTemporaryFile("r") as file:
        output_of(["perf", "stat", "-x", ",", "-o", file.name, "-e", ",".join(EVENTS.values()), *command], "0,1")
        lines = [line.split(",") for line in file if "," in line]
    values = {line[2]: float(line[0]) for line in lines}
    return {name: values[event] for name, event in EVENTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True, help="the build folder of this project")
    parser.add_argument("--models", nargs="+", default=["tiny", "mlp", "unet"], choices=["tiny", *CUTS])
    parser.add_argument("--repeats", type=int, default=5, help="pairs of jobs per model and contestant")
    args = parser.parse_args()
    lines = []
    for model in args.models:
        tiny = model == "tiny"
        row = Row("overhead", model, [8, 8], 8, "never") if tiny else Row("speed", model, CUTS[model], 8, "never")
        many = 202 if tiny else 12
        few_steps, many_steps = contestants(row, args.ours, FEW), contestants(row, args.ours, many)
        values: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.repeats):
            for name in CONTESTANTS:
                if name not in few_steps:  # the overhead benchmark has no reuse
                    continue
                print(f"{model} {name}", file=sys.stderr)
                few, more = counts(few_steps[name]), counts(many_steps[name])
                values.setdefault(name, []).append({event: (more[event] - few[event]) / (many - FEW) for event in EVENTS})
        for name, each in values.items():
            medians = {event: statistics.median(value[event] for value in each) for event in EVENTS}
            print(json.dumps({"bench": "processor", "model": model, "peer": name, **medians, "repeats": len(each)}), flush=True)
            lines.append(f"| {model} | {name} | {medians['milliseconds']:.1f} | {medians['epoll_wait']:.0f} |")
    print("| model | contestant | ms of processor time per step | calls of epoll_wait per step |")
    print("| --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
