"""Trains a transformer from the meta device over processes that cannot hold it, and measures the memory that each needs.

    python large.py MILLIONS    e.g. 800: so many parameters, of 16 bytes each with gradient and Adam, over four processes

Four processes plan, train two steps, save, train on and are killed. Three processes with another cut load the snapshot and
must have the same losses. From 300 millions on, each has a limit of memory in which one process cannot hold the parameters and
gradients. The kernel tells the most resident memory in each phase, beyond that of the same process after a small model. It must
be at most 1.15 x (parameters + gradients + Adam's state + counted activations of the rank) + 60 MiB, or 100 MiB for smaller
models, because a small process keeps some of the memory that planning has freed.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

import gpipe

WORDS, LENGTH, SAMPLES, CHUNKS = 1000, 8, 4, 2
MIB = 1 << 20


def width_of(millions):
    return 64 * max(1, round((millions * 1e6 / 12 / 16) ** 0.5 / 64))


def make_model(width):
    """Returns 16 blocks between an embedding and a head."""
    blocks = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(16)]
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS))


def size_of(model):
    return sum(each.nbytes for each in model.parameters())


def batch(step):
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def status(key):
    """Returns a line of the kernel's, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))


class Phases:
    """The most resident memory in each phase."""

    def __init__(self):
        self.idle, self.peaks = status("VmRSS"), {}

    def __call__(self, name, work):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is the present
        start = time.monotonic()
        result = work()
        self.peaks[name] = status("VmHWM") - self.idle, time.monotonic() - start
        return result


def train(pipe, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(pipe.step(*batch(step), loss).item())
        optimizer.step()
    return losses


def run(ranks, folder, width, balance, resumes, phases):
    """Trains and saves, or loads and trains. Returns what to tell of it, and what trains on."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = make_model(width)
    options = {"chunks": CHUNKS, "schedule": "1f1b", "checkpoint": "never", "stages": None if balance else ranks.size}
    options["memory"] = None if balance else int(1.4 * 4 * size_of(model) / ranks.size) + 40 * MIB
    pipe = phases("made", lambda: gpipe.GPipe.from_module(model, batch(0)[0], balance=balance, group=ranks, seconds=0, **options))
    optimizer = torch.optim.Adam(pipe.parameters())
    if resumes:
        phases("loaded", lambda: gpipe.snapshot.load(folder, pipe, optimizer=optimizer))
    else:
        phases("trained", lambda: train(pipe, optimizer, range(2)))
        phases("saved", lambda: gpipe.snapshot.save(folder, pipe, optimizer=optimizer))
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    losses = phases("trained on", lambda: train(pipe, optimizer, range(2, 4)))
    parameters = size_of(pipe)
    activations = max(timeline.peak_bytes()) - parameters  # without gradients
    told = {"losses": losses, "balance": pipe.balance, "parameters": parameters, "activations": activations}
    return told, lambda: train(pipe, optimizer, range(4, 1000000))


def child(folder, width, balance, limit):
    torch.set_num_threads(1)
    with gpipe.Ranks.from_environment(timeout=600) as ranks:
        small = [19 - 2 * (ranks.size - 1), *[2] * (ranks.size - 1)]
        for resumes in (False, True):
            run(ranks, f"{folder}/small", 64, small, resumes, lambda name, work: work())
        set_limit(limit)
        phases = Phases()
        told, train_on = run(ranks, f"{folder}/large", width, balance, balance is not None, phases)
        print(json.dumps(told | {"phases": phases.peaks}), flush=True)
        if not balance:
            train_on()


def set_limit(limit):
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit,) * 2)


def whole(width, limit):
    """Makes the model and its gradients in one process, in the limit of a rank. Ends with status 3 if that does not do."""
    set_limit(limit)
    try:
        model = make_model(width)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
    except RuntimeError:
        sys.exit(3)


def start(*arguments, **environment):
    """Starts this program in a process."""
    given = {name: str(value) for name, value in environment.items()}
    program = [sys.executable, "-W", "ignore", __file__, *map(json.dumps, arguments)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=os.environ | given)


def run_job(folder, width, balance, size, limit):
    """Returns what each rank of a job tells, after which the job is killed."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    ranks = [start("child", folder, width, balance, limit, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(size)]
    try:
        return [json.loads(rank.stdout.readline() or "null") for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def main(millions):
    width = width_of(millions)
    with torch.device("meta"):
        size = size_of(make_model(width))
    print(f"{size / 4e6:.0f} M parameters, width {width}: {4 * size / MIB:.0f} MiB with gradients and Adam")
    faults = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        losses = []
        for ranks, balance in ((4, None), (3, [6, 6, 7])):
            limit = int(1.85 * size) + 60 * MIB if size > 1 << 30 else None  # parameters and gradients are twice the size
            if limit is not None and start("whole", width, limit).wait() != 3:
                faults.append("one process holds the parameters and their gradients")
            told = run_job(folder, width, balance, ranks, limit)
            if None in told:
                raise SystemExit(f"a process of {ranks} failed")
            losses.append([each["losses"] for each in told])
            for rank, each in enumerate(told):
                bound = 1.15 * (4 * each["parameters"] + each["activations"]) + (60 if limit else 100) * MIB
                peaks = {name: (peak / MIB, seconds) for name, (peak, seconds) in each["phases"].items()}
                shown = ", ".join(f"{name} {peak:.0f} ({seconds:.1f} s)" for name, (peak, seconds) in peaks.items())
                print(f"rank {rank} of {ranks}, balance {each['balance']}: at most {bound / MIB:.0f} MiB; {shown}", flush=True)
                if max(peak for peak, _ in peaks.values()) * MIB > bound:
                    faults.append(f"rank {rank} of {ranks} needs too much memory")
    if any(each != losses[0][0] for job in losses for each in job):
        faults.append(f"the losses differ: {losses}")
    raise SystemExit("\n".join(faults) or None)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        main(int(sys.argv[1]))
    {"child": child, "whole": whole}[json.loads(sys.argv[1])](*map(json.loads, sys.argv[2:]))
