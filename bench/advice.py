"""Compares what a report promises with what it gains, for plans with a fault each: its first advice, and a tenth less of the
actions that matter most.

    bench/advice.py [CASES] [SEED]

The layers sleep, so any number of workers runs on few cores. Backwards take twice as long as forwards, a sample takes as long
in any micro-batch, and each layer takes another time. Prints a line per case: the fault, the advice, the promised gain with its
range, and the measured gain, as shares of a step. Steps of both plans take turns. Fails if less than 90 % of the advice is
within 5 points, or if a plan that follows it is over 2 % slower.

The gain of a tenth less is measured by a virtual speed-up: all other actions sleep longer, by 10/9, and the step's time counts
9/10 (Curtsinger and Berger, Coz, 2015). Fails if the median error is over 1 point.
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
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeps(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), {"F": forward, "B": 2 * forward}

    def forward(self, x):
        return Sleep.apply(x * self.weight, *(each * len(x) for each in self.seconds.values()))


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


def virtual_gain(report, seconds, plan, present):
    """Returns what a report promises, and what is gained, as shares of a step, by a tenth less of the actions that matter
    most."""
    stage, kind, _, saved = max((each for each in report.steps[-1]["slack"] if each[1] in "FB"), key=lambda each: each[3])
    slowed = Trained(seconds, plan)
    first = sum(plan["balance"][:stage])
    for index, layer in enumerate(slowed.pipe.module):
        is_chosen = first <= index < first + plan["balance"][stage]
        layer.seconds = {name: each * (1 if is_chosen and name == kind else 10 / 9) for name, each in layer.seconds.items()}
    before, after = zip(*((present.step(), slowed.step()) for _ in range(STEPS)), strict=True)
    wall = report.steps[-1]["end"] - report.steps[-1]["start"]
    return stage, kind, saved / wall, 1 - 0.9 * median(after) / median(before)


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
    errors, gains, virtual_errors = [], [], []
    faults = ["bad cut", "too few chunks", "needless recompute", "bad schedule"]
    for fault in (faults[index % len(faults)] for index in range(cases)):
        seconds, plan = faulty(fault, rng)
        present = Trained(seconds, plan)
        report = present.report()
        stage, kind, promised, gained = virtual_gain(report, seconds, plan, present)
        virtual_errors.append(abs(promised - gained))
        print(f"{fault}: a tenth less of {kind} on stage {stage} promises {promised:.1%}, gains {gained:.1%}", flush=True)
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
    print(f"virtual speed-ups: median error {median(virtual_errors):.2%}, largest {max(virtual_errors):.2%}")
    return 0 if close >= 0.9 * len(errors) and slower == 0 and median(virtual_errors) <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
