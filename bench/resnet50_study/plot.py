"""Draws the results of resnet50_study and compares them with predictions and published results.

    python plot.py FOLDER      # a folder with runs.csv and hardware.txt; needs matplotlib

Writes all.png and a README.md that shows it into the folder. If there is a folder FOLDER/processes, of a study in four
processes, also draws its variants, and adds them to README.md.
"""

import argparse
import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

# Time relative to a single device in PyTorch's tutorial "Single-Machine Model Parallel Best Practices", on two GPUs. By
# variant and split size.
PUBLISHED = {("model parallel", 0): 1.07, ("pipeline", 20): 1 / 1.49, ("pipeline", 12): 1 / 1.54}

ABOUT = """\
Measured by [resnet50_study](../../bench/resnet50_study/main.cpp), drawn by its plot.py. Training uses one-hot
targets over 1000 classes, mean squared error and SGD, without checkpointing. The memory of freed tensors is kept. The
variants take turns. Predictions cover forward and backward only. They were made from profiles before the runs. Published
results are those of PyTorch's tutorial "Single-Machine Model Parallel Best Practices".

A percentage is given only if the runs support it: at least {runs} runs of both variants, standard deviations of at most
{spread:.0f} % of the mean, and means that differ by more than twice the standard error of their difference.
"""

OVER_PROCESSES = """Measured by the program in four processes (`torchrun --no-python --nproc-per-node 4 resnet50_study`). On another machine
than above, only ratios can be compared. *Data parallel* has two threads in one process, *data parallel over processes*
has two processes. *Data × pipeline* has two replicas of two stages in four processes. If these are more than the cores,
they share them, also while the profile for the prediction is measured. Predictions count no time for what processes
send each other.
"""

MIN_RUNS = 3
MAX_SPREAD = 0.15

# Predictions are drawn as diamonds, to tell them from the error bars of measurements.
PREDICTED: dict[str, Any] = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 8,
    "markerfacecolor": "#e07b39",
    "markeredgecolor": "black",
}


class Result(NamedTuple):
    variant: str
    split: int
    runs: int
    mean: float  # seconds
    deviation: float
    predicted: float

    @property
    def label(self) -> str:
        name = "" if self.variant == "pipeline" else self.variant
        return ", ".join(part for part in (name, f"split {self.split}" if self.split else "") if part)

    @property
    def is_steady(self) -> bool:
        return self.runs >= MIN_RUNS and self.deviation <= MAX_SPREAD * self.mean


def read(path: Path) -> list[Result]:
    runs: dict[tuple[str, int], list[float]] = defaultdict(list)
    predicted = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["variant"], int(row["split_size"])
            runs[key].append(float(row["seconds"]))
            predicted[key] = float(row["predicted_seconds"])
    if not runs:
        raise SystemExit(f"{path} has no runs")
    return [
        Result(
            *key, len(times), statistics.mean(times), statistics.stdev(times) if len(times) > 1 else 0, predicted[key]
        )
        for key, times in runs.items()
    ]


def bars(folder: Path, results: list[Result], title: str) -> None:
    figure, axes = pyplot.subplots(figsize=(max(4, 0.9 * len(results)), 4.5))
    places = range(len(results))
    deviations = [r.deviation for r in results]
    axes.bar(places, [r.mean for r in results], yerr=deviations, capsize=4, color="#8fb3d4", label="mean ± std. dev.")
    shifted = [place + 0.25 for place in places]  # does not hide the error bars
    axes.plot(shifted, [r.predicted for r in results], label="predicted", **PREDICTED)
    slanted = {"rotation": 40, "ha": "right"} if len(results) > 3 else {}
    axes.set_xticks(places, [r.label for r in results], **slanted)
    axes.set_ylabel("seconds per run")
    axes.set_title(title)
    axes.set_ylim(top=1.25 * max(max(r.mean + r.deviation, r.predicted) for r in results))  # room for the legend
    axes.legend(ncols=2, loc="upper center")
    figure.tight_layout()
    figure.savefig(folder / "all.png", dpi=72)
    pyplot.close(figure)


def compared(ratio: float) -> str:
    """Compares a time with a single device's, given their ratio."""
    slower = round(100 * (ratio - 1))
    faster = round(100 * (1 / ratio - 1))
    return f"{slower} % slower" if slower > 0 else f"{faster} % faster" if faster > 0 else "as fast"


def differ(a: Result, b: Result) -> bool:
    """Whether the runs support a percentage. The README states the rule."""
    error = math.sqrt(a.deviation**2 / a.runs + b.deviation**2 / b.runs)
    return a.is_steady and b.is_steady and abs(a.mean - b.mean) > 2 * error


def sentence(result: Result, single: Result) -> str:
    way = "The pipeline" if result.variant == "pipeline" else result.variant.capitalize()
    way += f" with split size {result.split}" if result.split else ""
    measured = compared(result.mean / single.mean)
    notes = []
    if differ(result, single) and "%" in measured:
        text = f"{way} was {measured} than a single device"
        notes.append(f"predicted: {compared(result.predicted / single.predicted)}")
    else:
        text = f"{way} was neither clearly faster nor clearly slower than a single device"
    published = PUBLISHED.get((result.variant, result.split))
    if published:
        notes.append(f"published, on two GPUs: {compared(published)}")
    return text + (f" ({'; '.join(notes)})." if notes else ".")


def table(results: list[Result]) -> str:
    lines = ["| variant | seconds per run | standard deviation | predicted |", "|---|---|---|---|"]
    lines += [f"| {r.label} | {r.mean:.2f} | {r.deviation:.2f} | {r.predicted:.2f} |" for r in results]
    return "\n".join(lines)


def section(folder: Path, results: list[Result]) -> str:
    """The hardware, the table and what it says."""
    hardware = "\n".join("    " + line for line in (folder / "hardware.txt").read_text().splitlines())
    single = next(r for r in results if r.variant == "single")
    sentences = "\n".join(f"- {sentence(r, single)}" for r in results if r is not single)
    return f"{hardware}\n\n{table(results)}\n\n{sentences}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    results = read(folder / "runs.csv")
    bars(folder, results, "ResNet-50: all variants")
    about = ABOUT.format(runs=MIN_RUNS, spread=100 * MAX_SPREAD)
    page = f"# ResNet-50: ways to train on two devices\n\n{about}\n{section(folder, results)}\n![all](all.png)\n"
    processes = folder / "processes"
    if processes.exists():
        results = read(processes / "runs.csv")
        bars(processes, results, "ResNet-50: threads and processes")
        page += f"\n## Over processes\n\n{OVER_PROCESSES}\n{section(processes, results)}\n![all](processes/all.png)\n"
    (folder / "README.md").write_text(page)
    print(page, end="")


if __name__ == "__main__":
    main()
