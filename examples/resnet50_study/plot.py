"""Draws what resnet50_study measured, and says it beside what was published and predicted.

    python plot.py FOLDER      # with runs.csv and hardware.txt; needs matplotlib

Writes model_parallel, all and split_size, each as .png and .svg, and README.md, which shows them, into the folder.
"""

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

# Time over that of a single device, by PyTorch's tutorial "Single-Machine Model Parallel Best Practices", on two GPUs.
# By variant, or split size.
PUBLISHED = {"model parallel": 1.07, 20: 1 / 1.49, 12: 1 / 1.54}

ABOUT = """\
Made by [resnet50_study](../../examples/resnet50_study/main.cpp) and its plot.py. One-hot targets over 1000 classes, mean
squared error, SGD; nothing is recomputed, and the memory of tensors is kept for the next. The variants take turns.
Predictions are of forward and backward, made before the runs from profiles; what was published is PyTorch's tutorial
"Single-Machine Model Parallel Best Practices".
"""


class Result(NamedTuple):
    variant: str
    split: int
    mean: float
    deviation: float
    predicted: float

    @property
    def label(self) -> str:
        return f"split {self.split}" if self.split else self.variant


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
        Result(*key, statistics.mean(times), statistics.stdev(times) if len(times) > 1 else 0, predicted[key])
        for key, times in runs.items()
    ]


def save(figure: pyplot.Figure, folder: Path, name: str) -> None:
    figure.tight_layout()
    for suffix in ["png", "svg"]:
        figure.savefig(folder / f"{name}.{suffix}", dpi=150)
    pyplot.close(figure)


def bars(folder: Path, name: str, results: list[Result], title: str) -> None:
    figure, axes = pyplot.subplots(figsize=(max(4, 0.9 * len(results)), 4.5))
    places = range(len(results))
    axes.bar(places, [r.mean for r in results], yerr=[r.deviation for r in results], capsize=4, color="#4878a8")
    axes.plot(places, [r.predicted for r in results], "_", color="black", markersize=14, label="predicted")
    slanted = {"rotation": 40, "ha": "right"} if len(results) > 3 else {}
    axes.set_xticks(places, [r.label for r in results], **slanted)
    axes.set_ylabel("seconds a run")
    axes.set_title(title)
    axes.legend()
    save(figure, folder, name)


def line(folder: Path, results: list[Result]) -> None:
    figure, axes = pyplot.subplots(figsize=(6, 4.5))
    splits = [r.split for r in results]
    means, deviations = [r.mean for r in results], [r.deviation for r in results]
    axes.errorbar(splits, means, deviations, capsize=4, marker="o", color="#4878a8", label="measured")
    axes.plot(splits, [r.predicted for r in results], "--", color="black", label="predicted")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples of a micro-batch")
    axes.set_ylabel("seconds a run")
    axes.set_title("Pipeline over two devices")
    axes.legend()
    save(figure, folder, "split_size")


def compared(ratio: float) -> str:
    """Of a time over the single device's."""
    slower = round(100 * (ratio - 1))
    faster = round(100 * (1 / ratio - 1))
    return f"{slower} % slower than" if slower > 0 else f"{faster} % faster than" if faster > 0 else "as fast as"


def sentence(result: Result, single: Result) -> str:
    way = f"The pipeline with split size {result.split}" if result.split else result.variant.capitalize()
    text = f"{way} was {compared(result.mean / single.mean)} a single device"
    text += f" (predicted: {compared(result.predicted / single.predicted)} it"
    published = PUBLISHED.get(result.split or result.variant)
    return text + (f"; published, on two GPUs: {compared(published)} it)." if published else ").")


def table(results: list[Result]) -> str:
    lines = ["| variant | seconds a run | standard deviation | predicted |", "|---|---|---|---|"]
    lines += [f"| {r.label} | {r.mean:.2f} | {r.deviation:.2f} | {r.predicted:.2f} |" for r in results]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    results = read(folder / "runs.csv")
    single = next(r for r in results if r.variant == "single")
    others = [r for r in results if r is not single]
    model_parallel = [r for r in results if r.variant in ("single", "model parallel")]
    bars(folder, "model_parallel", model_parallel, "Model parallel beside a single device")
    bars(folder, "all", results, "ResNet-50, all ways side by side")
    line(folder, sorted((r for r in results if r.variant == "pipeline"), key=lambda r: r.split))
    sentences = "\n".join(f"- {sentence(r, single)}" for r in others)
    pictures = "\n\n".join(f"![{name}]({name}.svg)" for name in ["model_parallel", "all", "split_size"])
    hardware = "\n".join("    " + line for line in (folder / "hardware.txt").read_text().splitlines())
    page = f"# ResNet-50, in several ways\n\n{ABOUT}\n{hardware}\n\n{table(results)}\n\n{sentences}\n\n{pictures}\n"
    (folder / "README.md").write_text(page)
    print(page, end="")


if __name__ == "__main__":
    main()
