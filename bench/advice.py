"""Compares what a report's first advice promises with what it gains, for plans with a fault each.

    bench/advice.py [CASES] [SEED]

The layers sleep, so any number of workers runs on few cores. Backwards take twice as long as forwards, a sample takes as long
in any micro-batch, and each layer takes another time. Prints a line per case: the fault, the advice, the promised gain with its
range, and the measured gain, as shares of a step. Steps of both plans take turns. Fails if less than 90 % of the advice is
within 5 points, or if a plan that follows it is over 2 % slower.
"""

import random
import sys
import time
from statistics import median

import torch
from torch import nn

import gpipe

STEPS, SAMPLES = 6, 64
SECONDS = 0.3  # a worker's work in a step, without recomputes


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeps(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x):
        return Sleep.apply(x * self.weight, self.seconds * len(x))


class Trained:
    def __init__(self, seconds, plan):
        self.pipe = gpipe.GPipe(nn.Sequential(*map(Sleeps, seconds)), **plan)
        self.step()

    def step(self):
        """Returns the time of a step."""
        x, start = torch.ones(SAMPLES, 1), time.perf_counter()
        self.pipe.step(x, x, nn.functional.mse_loss)
        return time.perf_counter() - start

    def report(self):
        self.pipe.trace(gpipe.Timeline())
        for _ in range(STEPS):
            self.step()
        self.pipe.trace(None)
        return self.pipe.report()


def faulty(fault, rng):
    """Returns the seconds of each layer per sample, and a plan."""
    workers = rng.choice([2, 3, 4])
    stages = workers * (2 if fault == "bad schedule" else 1)
    layers = stages * rng.randint(2, 4)
    balance = [layers // stages] * stages
    plan = {"devices": ["cpu"] * workers, "chunks": 8, "checkpoint": "never", "schedule": "1f1b", "balance": balance}
    if fault == "bad cut":
        many, few = rng.sample(range(stages), 2)
        moved = balance[few] - 1
        balance[many] += moved
        balance[few] -= moved
    elif fault == "too few chunks":
        plan["chunks"] = rng.choice([1, 2])
    elif fault == "needless recompute":
        plan["checkpoint"] = rng.choice(["always", "except_last"])
    else:
        plan |= {"schedule": rng.choice(["gpipe", "looped_bfs"]), "chunks": 2 * workers, "placement": [*range(workers)] * 2}
    weights = [rng.uniform(0.5, 1.5) for _ in range(layers)]
    return [SECONDS / 3 / SAMPLES * workers * each / sum(weights) for each in weights], plan


def main():
    cases, rng = int(sys.argv[1]) if len(sys.argv) > 1 else 40, random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    errors, gains = [], []
    faults = ["bad cut", "too few chunks", "needless recompute", "bad schedule"]
    for fault in (faults[index % len(faults)] for index in range(cases)):
        seconds, plan = faulty(fault, rng)
        present = Trained(seconds, plan)
        report = present.report()
        wall = median(step["end"] - step["start"] for step in report.steps)
        advice = [(change, saved) for change, saved in report.advice.items() if "=" in change]  # not a free core
        if not advice:
            print(f"{fault}: no advice, {plan}", flush=True)
            continue
        change, saved = advice[0]
        promised, low, high = (each / wall for each in saved)
        mended = Trained(seconds, plan | eval(f"dict({change})"))
        before, after = zip(*((present.step(), mended.step()) for _ in range(STEPS)), strict=True)
        gained = 1 - median(after) / median(before)
        errors.append(abs(promised - gained))
        gains.append(gained)
        print(f"{fault}: {change} promises {promised:.1%} ({low:.1%} to {high:.1%}), gains {gained:.1%}", flush=True)
    close, slower = sum(error <= 0.05 for error in errors), sum(gained < -0.02 for gained in gains)
    print(f"of {cases} faults {len(errors)} had advice, {close} of it within 5 points, {slower} over 2 % slower")
    return 0 if close >= 0.9 * len(errors) and slower == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
