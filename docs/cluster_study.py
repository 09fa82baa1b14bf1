"""Writes the tables of docs/cluster_study.md. Run `python docs/cluster_study.py` where gpipe is installed.

All come from the library's simulator. `--check` changes nothing, and fails if a table is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from gpipe.balance import Candidate, Cluster, ClusterPlan, Prediction, Profile, plan_cluster, predict
from published_models import PCIE, AmoebaNetD, UNet, to_profile

PAGE = Path(__file__).parent / "cluster_study.md"
PROFILE = Path(__file__).parent / "cluster_study" / "unet.json"
MEMORY = 2 << 30
INSIDE = {"bandwidth": 5e9, "latency": 2e-6}
BETWEEN = {"bandwidth": 0.15e9, "latency": 50e-6}  # a device's share of a card with 10 Gbit/s
# Devices and samples.
CASES = [(8, 64), (64, 512), (1024, 8192), (1024, 1024)]


def cluster_of(devices: int, memory: int = MEMORY) -> Cluster:
    hosts = {"hosts": devices // 8, "devices_per_host": 8, "memory": memory, "inside": INSIDE, "between": BETWEEN}
    return Cluster.from_json(json.dumps(hosts))


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def cells(candidate: Candidate, samples: int) -> list[str]:
    schedule = f"`{candidate.schedule}`" + (", V" if candidate.placed_by == "v" else "")
    speed = f"{samples / candidate.seconds:.1f}"
    return [
        f"{candidate.replicas} × {len(candidate.bytes)}",
        str(len(candidate.balance)),
        schedule,
        f"`{candidate.checkpoint}`",
        str(candidate.chunks),
        f"{candidate.seconds:.2f} s",
        speed,
        f"{100 * candidate.bubble:.0f} %",
        f"{candidate.reduction:.2f} s",
        f"{max(candidate.bytes) / 2**20:.0f} MiB" + ("" if candidate.fits else ", too large"),
    ]


COLUMNS = ["replicas × workers", "stages", "schedule", "checkpoint", "m", "step", "samples/s", "bubble", "sums", "memory"]


class Study:
    def __init__(self) -> None:
        self.profile = Profile.from_json(PROFILE.read_text())

    def plan(self, devices: int, samples: int, memory: int = MEMORY) -> ClusterPlan:
        return plan_cluster(cluster_of(devices, memory), [self.profile], samples)

    def best(self) -> str:
        alone = sum(layer.forward + layer.backward for layer in self.profile.layers) / self.profile.samples
        rows = [["1, measured", "4", "1 × 1", "1", "", "`never`", "1", f"{4 * alone:.2f} s", f"{1 / alone:.1f}", "", "", ""]]
        for devices, samples in CASES:
            rows.append([str(devices), str(samples), *cells(self.plan(devices, samples).best, samples)])
        return table(["devices", "samples", *COLUMNS], rows)

    def replicas(self, devices: int, samples: int) -> str:
        return table(COLUMNS, [cells(each, samples) for each in self.plan(devices, samples).candidates])


def compared(label: str, published: float, predicted: float, given: bool) -> list[str]:
    error = "calibrated" if given else f"{100 * (predicted / published - 1):+.0f} %"
    return [label, f"{published:.1f}", f"{predicted:.1f}", error]


def step(model: UNet | AmoebaNetD, samples: int, chunks: int, balance: list[int], mode: str, scale: float) -> Prediction:
    profile = to_profile(model.layers, model.skips, samples / chunks, scale)
    return predict(profile, balance, chunks, mode, bandwidth=PCIE, copies=True)


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
    label, speed, samples, chunks, balance, mode = runs[0]
    scale = samples / speed / step(model, samples, chunks, balance, mode, 1).seconds
    rows: list[list[str]] = []
    for label, speed, samples, chunks, balance, mode in runs:
        predicted = samples / step(model, samples, chunks, balance, mode, scale).seconds
        rows.append(compared(label, speed, predicted, given=not rows))
    return table(["GPUs", "published samples/s", "predicted samples/s", "error"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is not up to date")
    options = parser.parse_args()
    study = Study()
    tables: dict[str, Callable[[], str]] = {
        "best": study.best,
        "thousand": lambda: study.replicas(1024, 8192),
        "unet": lambda: published(UNet(), OF_UNET),
        "amoebanet": lambda: published(AmoebaNetD(), OF_AMOEBANET),
    }
    text = PAGE.read_text()
    wanted = re.sub(
        r"(<!-- table (\w+) -->)\n.*?<!-- end -->",
        lambda found: f"{found[1]}\n\n{tables[found[2]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )
    if not options.check:
        PAGE.write_text(wanted)
    elif text != wanted:
        sys.exit("out of date: cluster_study.md; run docs/cluster_study.py")


if __name__ == "__main__":
    main()
