"""Checks and times pipelines on this machine's GPUs. Prints a table, and writes it as JSON.

    python gpus.py --output gpus.json                     # PyTorch and the gpipe wheel are enough; takes some minutes
    python gpus.py --output cpu.json --devices cpu,cpu    # tries the program without a GPU

Compares each schedule with the model that runs its micro-batches in turn, lets PyTorch refuse every wait for a device in
a step, compares memory at 4 and 64 micro-batches, and times 1, 2 and 4 stages on one device and on all. With two GPUs,
it also runs two ranks that exchange tensors by NCCL. A row that fails tells why, and the others run.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import mse_loss

import gpipe

BLOCKS = 16
Row = dict[str, Any]


class Block(nn.Module):
    """A layer of a transformer without attention: two products with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    gpus = ",".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--devices", default=gpus, help="comma-separated")
    parser.add_argument("--width", type=int, default=1024, help="of a block")
    parser.add_argument("--rows", type=int, default=1024, help="samples per micro-batch")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per measurement")
    args = parser.parse_args()
    args.devices = [torch.device(device) for device in args.devices.split(",") if device]
    if not args.devices:
        parser.error("this machine has no GPU; give --devices, such as cpu,cpu")
    return args


def model(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(args.width) for _ in range(BLOCKS)))


def data(args: argparse.Namespace, chunks: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    shape = (chunks * args.rows, args.width)
    return torch.randn(shape, device=args.devices[0]), torch.randn(shape, device=args.devices[-1])


def pipeline(
    args: argparse.Namespace, devices: list[torch.device], stages: int, chunks: int, schedule: str, checkpoint: str
) -> gpipe.GPipe:
    balance = [BLOCKS // stages] * stages
    return gpipe.GPipe(model(args), balance, devices=devices, chunks=chunks, schedule=schedule, checkpoint=checkpoint)


def plain_step(module: nn.Module, x: Tensor, y: Tensor, chunks: int) -> None:
    """The whole model, micro-batch by micro-batch."""
    for part, target in zip(x.chunk(chunks), y.to(x.device).chunk(chunks), strict=True):
        (mse_loss(module(part), target) / chunks).backward()


def synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextmanager
def refuse_waits(devices: list[torch.device]) -> Iterator[None]:
    """Makes waits of the host for a GPU errors."""
    if devices[0].type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds(args: argparse.Namespace, step: Callable[[], object]) -> float:
    """The median time of a step, after two others."""
    times = []
    for _ in range(2 + args.steps):
        synchronize(args.devices)
        start = time.perf_counter()
        step()
        synchronize(args.devices)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def compare(args: argparse.Namespace, schedule: str) -> Row:
    """The largest difference of a gradient, relative to the largest gradient, with each checkpoint mode."""
    x, y = data(args, 8)
    plain = model(args).to(args.devices[0])
    plain_step(plain, x, y, 8)
    expected = [parameter.grad.cpu() for parameter in plain.parameters()]
    differences = []
    for checkpoint in ("never", "always"):
        for stages, workers in ((2, 2), (4, 2), (4, 4)):
            devices = [args.devices[i % len(args.devices)] for i in range(workers)]
            try:
                pipe = pipeline(args, devices, stages, 8, schedule, checkpoint)
            except (ValueError, IndexError):  # the schedule needs other numbers
                continue
            pipe.step(x, y, mse_loss)
            with refuse_waits(args.devices):
                pipe.zero_grad()
                pipe.step(x, y, mse_loss)
            for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
                difference = (parameter.grad.cpu() - gradient).abs().max() / gradient.abs().max()
                differences.append(difference.item())
    if max(differences) > 1e-3:
        raise AssertionError(f"a gradient differs by {max(differences):.1e}")
    return {"worst difference": max(differences), "pipelines": len(differences) // len(expected)}


def memory(args: argparse.Namespace, chunks: int) -> Row:
    if args.devices[0].type != "cuda":
        return {"MiB": None}
    workers = [args.devices[i % len(args.devices)] for i in range(2)]
    pipe = pipeline(args, workers, 2, chunks, "1f1b", "never")
    x, y = data(args, chunks)
    for device in args.devices:
        torch.cuda.reset_peak_memory_stats(device)
    before = [torch.cuda.memory_reserved(device) for device in args.devices]
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(x, y, mse_loss)
    synchronize(args.devices)
    peaks = [torch.cuda.max_memory_reserved(device) for device in args.devices]
    return {"MiB": [(peak - start) >> 20 for peak, start in zip(peaks, before, strict=True)]}


def speed(args: argparse.Namespace, stages: int, devices: list[torch.device]) -> Row:
    x, y = data(args, 8)
    plain = model(args).to(args.devices[0])
    pipe = pipeline(args, devices, stages, 8, "1f1b" if stages > 1 else "gpipe", "never")
    alone = milliseconds(args, lambda: plain_step(plain, x, y, 8))
    piped = milliseconds(args, lambda: pipe.step(x, y, mse_loss))
    return {"plain ms": alone, "pipeline ms": piped, "speedup": alone / piped}


def run_rank(rank: int, args: argparse.Namespace, file: str) -> None:
    store = torch.distributed.FileStore(file, -1)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=2)
    with gpipe.Ranks(torch.distributed.group.WORLD) as ranks:
        pipe = gpipe.GPipe(model(args), [8, 8], devices=[f"cuda:{rank}"], chunks=8, schedule="1f1b", group=ranks)
        x, y = data(args, 8)
        print(f"rank {rank}: {milliseconds(args, lambda: pipe.step(x, y, mse_loss)):.1f} ms")


def nccl(args: argparse.Namespace) -> Row:
    file = args.output.with_suffix(".store")
    file.unlink(missing_ok=True)
    spawn(run_rank, (args, str(file)), nprocs=2)
    return {}


def main() -> None:
    args = parse_args()
    devices, one = args.devices, args.devices[:1]
    rows: list[Row] = []

    def add(name: str, run: Callable[[], Row]) -> None:
        try:
            row = run()
        except Exception as error:  # tells the user, who wants the other rows too
            row = {"error": f"{type(error).__name__}: {error}"}
        rows.append({"what": name, **row})
        print(name, *(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))

    for schedule in gpipe.SCHEDULES:
        if schedule != "auto":
            add(f"gradients, {schedule}", lambda schedule=schedule: compare(args, schedule))
    for chunks in (4, 64):
        add(f"memory of 1f1b, {chunks} micro-batches", lambda chunks=chunks: memory(args, chunks))
    for stages in (1, 2, 4):
        add(f"{stages} stages on {devices[0]}", lambda stages=stages: speed(args, stages, one * stages))
    if len(devices) > 1:
        workers = 4 if len(devices) >= 4 else 2
        add(f"{workers} stages on {workers} devices", lambda: speed(args, workers, devices[:workers]))
    if torch.cuda.device_count() > 1:
        add("two ranks by NCCL", lambda: nccl(args))
    name = torch.cuda.get_device_name(devices[0]) if devices[0].type == "cuda" else platform.processor() or "CPU"
    machine = {"device": name, "devices": len(devices), "torch": torch.__version__, "gpipe": gpipe.__version__}
    args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if any("error" in row for row in rows):
        raise SystemExit("some rows failed")


if __name__ == "__main__":
    main()
