"""Times steps of the plain model, of this project's Python package, or of a peer. Prints a JSON line.

A step clears the gradients and runs a forward and a backward from the sum of the output. torchgpipe 0.0.7 is used as
published: it runs all CPU stages on one worker thread, and backwards on the calling thread.

torch.distributed.pipelining has one process per worker, with one thread. They communicate by Gloo over the loopback device.
A barrier precedes each step, which lasts from its first start to its last end over all processes. With --replicas,
DistributedDataParallel sums the gradients of the processes that have the same stage; with one stage, there is no pipeline.
Skips that cross a cut are sent with the activation through every stage in between.
"""

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import models

WARM_UP = 2  # steps
Step = Callable[[], object]
Span = tuple[float, float]  # start and end of a step, on a clock that is comparable between processes


def clear_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def plain_step(args: argparse.Namespace, layers: models.Layers, x: Tensor) -> Step:
    """The step of a loop over the micro-batches."""
    model = models.Stage(layers)

    def step() -> None:
        clear_gradients(model)
        for part in x.tensor_split(1 if args.whole else args.chunks):
            if args.checkpoint == "always":
                with torch.no_grad():
                    model(part)
            model(part).sum().backward()

    return step


def skippables(layers: models.Layers, skip: ModuleType) -> nn.Sequential:
    """Converts the model to the skippable layers of a library."""
    namespaces = {layer.name: skip.Namespace() for layer in layers if isinstance(layer, models.Stash)}

    class Wrapper(nn.Module):
        def __init__(self, layer: models.Stash):
            super().__init__()
            self.layer = layer

    @skip.skippable(stash=["skip"])
    class StashSkip(Wrapper):
        def forward(self, x: Tensor) -> Iterator[object]:
            yield skip.stash("skip", self.layer(x))
            return x

    @skip.skippable(pop=["skip"])
    class JoinSkip(Wrapper):
        def forward(self, x: Tensor) -> Iterator[object]:
            popped = yield skip.pop("skip")
            return self.layer(x, popped)

    def convert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, models.Stash):
            return layer
        kind = JoinSkip if isinstance(layer, models.Join) else StashSkip
        return kind(layer).isolate(namespaces[layer.name])

    return nn.Sequential(*map(convert, layers))


def pipe_step(args: argparse.Namespace, layers: models.Layers, x: Tensor) -> Step:
    """The step of torchgpipe, or of this project, which has the same interface and schedules."""
    library = importlib.import_module(args.library)
    settings = {"devices": ["cpu"] * len(args.balance), "chunks": args.chunks, "checkpoint": args.checkpoint}
    if args.library == "gpipe":
        settings["schedule"] = args.schedule
        total = library.Loss(lambda output, _: output.sum(), reduction="sum")
    pipe = library.GPipe(skippables(layers, importlib.import_module(f"{args.library}.skip")), args.balance, **settings)

    def step() -> None:
        clear_gradients(pipe)
        pipe.step(x, x, total) if args.library == "gpipe" else pipe(x).sum().backward()

    return step


def data_parallel_step(args: argparse.Namespace, layers: models.Layers, x: Tensor) -> Step:
    """The step of a model that is not cut."""
    (module,) = models.cut(layers, args.balance)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    chunks = args.chunks // args.replicas

    def step() -> None:
        clear_gradients(model)
        for index, part in enumerate(x.tensor_split(chunks)):
            with model.no_sync() if index + 1 < chunks else nullcontext():
                model(part).sum().backward()

    return step


def stage_step(args: argparse.Namespace, layers: models.Layers, x: Tensor, rank: int) -> Step:
    """The step of this process's stage."""
    # The processes of each pipeline, and those that have the same stage.
    positions = len(args.balance)
    pipelines = [dist.new_group([p * args.replicas + r for p in range(positions)]) for r in range(args.replicas)]
    twins = [dist.new_group([p * args.replicas + r for r in range(args.replicas)]) for p in range(positions)]
    position, replica = divmod(rank, args.replicas)
    module: nn.Module = models.cut(layers, args.balance)[position]
    if args.replicas > 1:
        module = DistributedDataParallel(module, process_group=twins[position], gradient_as_bucket_view=True)
    stage = PipelineStage(module, position, positions, torch.device("cpu"), group=pipelines[replica])
    chunks = args.chunks // args.replicas
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
    schedule = kind(stage, chunks, loss_fn=lambda output, _: output.sum(), scale_grads=False)
    inputs = (x,) if stage.is_first else ()
    target = torch.empty(chunks) if stage.is_last else None  # required by a loss

    def step() -> None:
        clear_gradients(module)
        schedule.step(*inputs, target=target, return_outputs=False)

    return step


def measure(args: argparse.Namespace, steps: list[Step], before: Step = lambda: None) -> list[list[Span]]:
    """The start and end of each step. The steps take turns."""
    spans: list[list[Span]] = [[] for _ in steps]
    for repeat in range(-WARM_UP, args.repeats):
        for step, each in zip(steps, spans):
            before()
            start = time.monotonic()
            step()
            if repeat >= 0:
                each.append((start, time.monotonic()))
    return spans


def report(by_process: list[list[Span]], plain: tuple[Span, ...] | list[Span] = ()) -> None:
    seconds = [max(end for _, end in each) - min(start for start, _ in each) for each in zip(*by_process)]
    print(json.dumps({"seconds": seconds, "plain": [end - start for start, end in plain]}))


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    processes = len(args.balance) * args.replicas
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=processes)
    layers, x = models.subject(args.model, args.chunks)
    plain = plain_step(args, models.subject(args.model, args.chunks)[0], x)
    own = x.chunk(args.replicas)[rank % args.replicas]
    step = stage_step(args, layers, own, rank) if len(args.balance) > 1 else data_parallel_step(args, layers, own)
    steps = [step, plain if rank == 0 else lambda: None] if args.model == "tiny" else [step]
    spans, *of_plain = measure(args, steps, dist.barrier)
    gathered = [None] * processes if rank == 0 else None
    dist.gather_object(spans, gathered)
    if rank == 0:
        report(gathered, *of_plain)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["plain", "gpipe", "torchgpipe", "distributed"], required=True)
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--balance", type=lambda text: [*map(int, text.split(","))], required=True, help="layers per stage")
    parser.add_argument("--chunks", type=int, required=True, help="micro-batches per mini-batch")
    parser.add_argument("--checkpoint", choices=["never", "except_last", "always"], default="never")
    parser.add_argument("--schedule", default="gpipe", help="of gpipe and distributed")
    parser.add_argument("--replicas", type=int, default=1, help="of distributed")
    parser.add_argument("--threads", type=int, default=1, help="threads per operator")
    parser.add_argument("--whole", action="store_true", help="the plain model takes the mini-batch at once")
    parser.add_argument("--repeats", type=int, default=9, help="number of steps to time")
    args = parser.parse_args()
    if args.library == "distributed":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (args, folder), nprocs=len(args.balance) * args.replicas)
        return
    torch.set_num_threads(args.threads)
    layers, x = models.subject(args.model, args.chunks)
    plain = plain_step(args, models.subject(args.model, args.chunks)[0], x)
    if args.library == "plain":
        steps = [plain]
    else:
        step = pipe_step(args, layers, x)
        steps = [step, plain] if args.model == "tiny" else [step]
    spans, *of_plain = measure(args, steps)
    report([spans], *of_plain)


if __name__ == "__main__":
    main()
