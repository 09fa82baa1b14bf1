"""Tests and measures the library on the GPUs of this machine. Writes gpu.json and gpu.md.

    python bench/gpu.py OUT_FOLDER --build build/cuda

Needs the Python package and a torch that supports the GPUs. Nothing else should run on the machine. Functions that are
compared take turns; figures are medians.

--device cpu --short tries the script on a machine without a GPU.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gpipe
import gpipe.balance
import gpipe.models
import gpipe.skip

sys.path.append(str(Path(__file__).parent / "peers"))

import models  # noqa: E402
import pipe_steps  # noqa: E402
import run  # noqa: E402
import steps  # noqa: E402

CHUNKS = 8
WARM_UP = 2
MODES = ("never", "except_last", "always")
# Calls of the CUDA runtime, by what they do.
CALLS = {
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel"),
    "copies": ("cudaMemcpy",),
    "events": ("cudaEventRecord",),
    "waits": ("cudaStreamWaitEvent",),
    "host waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}

Row = dict[str, Any]


@dataclass
class Bench:
    device: torch.device
    repeats: int
    short: bool

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def times(self, functions: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Calls the functions in turn. Returns the seconds of each call, by name."""
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for repeat in range(WARM_UP + self.repeats):
            for name, function in functions.items():
                self.synchronize()
                start = time.perf_counter()
                function()
                self.synchronize()
                if repeat >= WARM_UP:
                    seconds[name].append(time.perf_counter() - start)
        return seconds

    def subject(self, name: str) -> tuple[models.Layers, Tensor]:
        """Makes a model on the device, and a mini-batch for CHUNKS micro-batches."""
        torch.manual_seed(0)
        if name == "mlp":
            width, rows = (64, 64) if self.short else (4096, 8192)
            layers: models.Layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(16)]
            x = torch.randn(rows, width)
        elif name == "unet":
            layers = models.flat(gpipe.models.unet(base_channels=4 if self.short else 64))
            x = torch.randn(8, 3, 32, 32) if self.short else torch.randn(32, 3, 192, 192)
        else:
            layers = models.flat(gpipe.models.resnet50())
            x = torch.randn(16, 3, 32, 32) if self.short else torch.randn(128, 3, 224, 224)
        return [layer.to(self.device) for layer in layers], x.to(self.device)

    def pipe(self, layers: models.Layers, stages: int, checkpoint: str, **options: Any) -> gpipe.GPipe:
        share, more = divmod(len(layers), stages)
        return gpipe.GPipe(
            pipe_steps.skippables(layers, gpipe.skip),
            [share + (stage < more) for stage in range(stages)],
            devices=[self.device] * stages,
            checkpoint=checkpoint,
            **{"chunks": CHUNKS, **options},
        )

    def one_device(self) -> list[Row]:
        """The time of a step, relative to that of a plain loop over the micro-batches on the same device."""
        rows = []
        for name, checkpoint in itertools.product(("mlp", "unet", "resnet50"), ("never", "always")):
            layers, x = self.subject(name)
            plain = models.Stage(layers)
            functions = {"plain": lambda: steps.plain_step(plain, x, CHUNKS, checkpoint == "always")}
            for stages, schedule in itertools.product((1, 2, 4), (None, "1f1b")):
                options = {"schedule": schedule} if schedule else {}
                pipe = self.pipe(layers, stages, checkpoint, **options)
                functions[f"{stages} {schedule or 'forward, backward'}"] = pipe_steps.step_of(pipe, x, schedule)
            seconds = self.times(functions)
            row: Row = {"model": name, "checkpoint": checkpoint}
            row["plain, ms"] = 1e3 * statistics.median(seconds["plain"])
            for function in list(functions)[1:]:
                row[function] = statistics.median(a / b for a, b in zip(seconds[function], seconds["plain"]))
            rows.append(row)
        return rows

    def overhead(self) -> list[Row]:
        """What a cell of 16 small layers costs more than the plain loop: time, and calls of the CUDA runtime."""
        rows = []
        for stages, checkpoint in itertools.product((1, 2, 4), ("never", "always")):
            layers = [layer.to(self.device) for layer in models.subject("tiny", CHUNKS)[0]]
            x = torch.randn(8 * CHUNKS, 8, device=self.device)
            plain = models.Stage(layers)
            step = pipe_steps.step_of(self.pipe(layers, stages, checkpoint), x)
            functions = {"plain": lambda: steps.plain_step(plain, x, CHUNKS, checkpoint == "always"), "pipe": step}
            seconds = self.times(functions)
            cells = stages * CHUNKS
            more = [1e6 * (a - b) / cells for a, b in zip(seconds["pipe"], seconds["plain"])]
            row: Row = {"stages": stages, "checkpoint": checkpoint, "us per cell": statistics.median(more)}
            calls = {name: self.calls(function) for name, function in functions.items()}
            for kind in CALLS:
                row[f"{kind} per cell"] = (calls["pipe"][kind] - calls["plain"][kind]) / cells
            rows.append(row)
        return rows

    def calls(self, function: Callable[[], None]) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            function()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        counts: Counter[str] = Counter()
        for event in profiler.profiler.kineto_results.events():
            for kind, names in CALLS.items():
                counts[kind] += event.name().startswith(names)
        return counts

    def bytes(self) -> list[Row]:
        """Peak bytes of two stages on the device: counted in a trace, simulated from a profile, and the allocator's."""
        rows = []
        for name in ("unet", "resnet50"):
            layers, x = self.subject(name)
            model = pipe_steps.skippables(layers, gpipe.skip)
            costs = gpipe.balance.profile(model, x[: len(x) // CHUNKS], device=self.device, seconds=5)
            balance = costs.balance_by_time(2)
            for checkpoint in MODES:
                pipe = gpipe.GPipe(model, balance, devices=[self.device] * 2, chunks=CHUNKS, checkpoint=checkpoint)
                step = pipe_steps.step_of(pipe, x)
                step()
                timeline = gpipe.Timeline()
                pipe.trace(timeline)
                steps.clear_gradients(pipe)
                self.synchronize()
                row: Row = {"model": name, "checkpoint": checkpoint, "allocator, MiB": 0.0}
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                    before = torch.cuda.memory_allocated(self.device)
                step()
                self.synchronize()
                if self.device.type == "cuda":
                    row["allocator, MiB"] = (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
                expected = gpipe.balance.predict(costs, balance, CHUNKS, checkpoint).timeline.peak_bytes()
                for worker, (counted, simulated) in enumerate(zip(timeline.peak_bytes(), expected)):
                    row[f"worker {worker}, MiB"] = counted / 2**20
                    row[f"worker {worker} / simulated"] = counted / simulated
                rows.append(row)
        return rows


def machine(device: torch.device) -> Row:
    facts: Row = {"system": platform.platform(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
        facts["GPUs"] = torch.cuda.device_count()
        facts["GiB per GPU"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
        facts["CUDA"] = torch.version.cuda
    return facts


def run_tests(build: Path) -> Row:
    """Runs the tests that need a GPU. Errors: exits if one fails."""
    command = [build / "tests" / "gpipe_tests", "--gtest_filter=Cuda*"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nthe tests that need a GPU failed")
    return {"passed": done.stdout.count("[       OK ]"), "skipped": done.stdout.count("[  SKIPPED ] Cuda") // 2}


def table(rows: Sequence[Row]) -> str:
    def text(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return run.markdown(list(rows[0]), ([text(value) for value in row.values()] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for gpu.json and gpu.md")
    parser.add_argument("--build", type=Path, help="a build folder whose tests to run first")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--repeats", type=int, default=9, help="measured calls of each function")
    parser.add_argument("--short", action="store_true", help="small models, to try the script")
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch supports; give --device cpu to try the script")
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.device, args.repeats, args.short)
    result: dict[str, list[Row]] = {"machine": [machine(args.device)]}
    if args.build:
        result["tests"] = [run_tests(args.build)]
    sections = {"one device": bench.one_device, "overhead": bench.overhead, "bytes": bench.bytes}
    for name, measure in sections.items():
        print(name, file=sys.stderr)
        result[name] = measure()
        # Written after each section, so that a later error loses nothing.
        (args.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        text = [f"**{name.capitalize()}**\n\n{table(rows)}\n" for name, rows in result.items()]
        (args.out / "gpu.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
