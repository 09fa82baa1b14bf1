"""Measures what a pipeline's `keep_memory` does: page faults and time of a steady step, and the process's resident memory.

    taskset -c 0,1 python kept_memory.py

Two stages of two layers each, in 4 micro-batches under 1f1b, with an activation of so many MiB per layer and micro-batch.
Each measurement is a process of its own; those with and without kept memory take turns. Prints a table: the medians over
processes of the median step's faults and ms, and of the peak of resident memory. Ratios are of processes in the same turn,
in brackets the lowest and the highest. *varying*: the mini-batches have 40 to 100 % of the samples.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

import gpipe

CHUNKS = 4
WIDTH = 64
WARM_UP = 4
STEPS = 5


def measure(mebibytes: int, keeps: bool, varies: bool) -> list[float]:
    """Returns the faults and the ms of the median step, and the peak of resident memory in MiB."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pipe = gpipe.GPipe(
        model, [2, 2], devices=["cpu"] * 2, chunks=CHUNKS, checkpoint="never", schedule="1f1b", keep_memory=keeps
    )
    largest = torch.rand(CHUNKS * mebibytes * (1 << 20) // (4 * WIDTH), WIDTH)
    choice = random.Random(0)
    faults, seconds = [], []
    for step in range(WARM_UP + STEPS):
        samples = int(len(largest) * choice.uniform(0.4, 1)) if varies and step > 0 else len(largest)
        input = largest[:samples]
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        pipe.zero_grad()
        pipe.step(input, input, lambda output, target: output.mean())
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    steady = [statistics.median(each[WARM_UP:]) for each in (faults, seconds)]
    return [steady[0], steady[1] * 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]


def in_process(*arguments: object) -> list[float]:
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    measured: list[float] = json.loads(subprocess.check_output(command, text=True))
    return measured


def rows(sizes: list[int], repeats: int) -> Iterator[list[str]]:
    for size, varies in [(size, False) for size in sizes] + [(sizes[len(sizes) // 2], True)]:
        runs: dict[bool, list[list[float]]] = {False: [], True: []}
        for turn in range(repeats):
            for keeps in [False, True][:: 1 if turn % 2 == 0 else -1]:
                runs[keeps].append(in_process(size, keeps, varies))
        without, kept = ([statistics.median(values) for values in zip(*runs[keeps])] for keeps in (False, True))
        ratios = [sorted(b[i] / a[i] for a, b in zip(*runs.values())) for i in (1, 2)]
        name = f"{size} MiB{', varying' if varies else ''}"
        shown = [f"{statistics.median(each):.2f} ({each[0]:.2f}–{each[-1]:.2f})" for each in ratios]
        yield [name, *(f"{a:.0f} | {b:.0f}" for a, b in zip(without, kept)), *shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 48, 80, 200], help="MiB; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="processes; default: %(default)s")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*json.loads(args.measure))))
        return
    print("| activation | faults without | kept | ms without | kept | MiB without | kept | ms, ratio | MiB, ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows(args.sizes, args.repeats):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
