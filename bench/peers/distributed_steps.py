"""Times steps of torch.distributed.pipelining with one process per worker. Prints a JSON line.

The processes communicate by Gloo over the loopback device. Each runs one thread. A barrier precedes each step. A step
lasts from its first start to its last end over all processes. With --replicas, DistributedDataParallel sums the gradients
of the processes that have the same stage; with one stage, there is no pipeline. Skips that cross a cut are sent with the
activation through every stage in between. Steps return no output: the loss is the sum of each micro-batch's output.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import models
import steps

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def seconds_of(spans: list[list[tuple[float, float]]]) -> list[float]:
    """Returns the seconds per repeat. `spans` has the start and end of each repeat, by process."""
    return [max(end for _, end in each) - min(start for start, _ in each) for each in zip(*spans)]


def data_parallel_step(args: argparse.Namespace, layers: models.Layers, x: Tensor) -> Callable[[], None]:
    """Returns the step of a model that is not cut."""
    (module,) = models.cut(layers, args.balance)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    chunks = args.chunks // args.replicas

    def step() -> None:
        steps.clear_gradients(model)
        for index, part in enumerate(x.tensor_split(chunks)):
            with model.no_sync() if index + 1 < chunks else nullcontext():
                model(part).sum().backward()

    return step


def pipeline_step(
    args: argparse.Namespace, layers: models.Layers, x: Tensor, rank: int, positions: int
) -> Callable[[], None]:
    """Returns the step of this process's stage."""
    # The processes of each pipeline, and those that have the same stage.
    pipelines = [dist.new_group([p * args.replicas + r for p in range(positions)]) for r in range(args.replicas)]
    twins = [dist.new_group([p * args.replicas + r for r in range(args.replicas)]) for p in range(positions)]
    position, replica = divmod(rank, args.replicas)
    module: torch.nn.Module = models.cut(layers, args.balance)[position]
    if args.replicas > 1:
        module = DistributedDataParallel(module, process_group=twins[position], gradient_as_bucket_view=True)
    stage = PipelineStage(module, position, positions, torch.device("cpu"), group=pipelines[replica])
    chunks = args.chunks // args.replicas
    schedule = SCHEDULES[args.schedule](stage, chunks, loss_fn=lambda output, _: output.sum(), scale_grads=False)
    inputs = (x,) if stage.is_first else ()
    target = torch.empty(chunks) if stage.is_last else None  # required by a loss

    def step() -> None:
        steps.clear_gradients(module)
        schedule.step(*inputs, target=target, return_outputs=False)

    return step


def run_worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    positions = len(args.balance)
    ranks = positions * args.replicas
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    layers, x = models.subject(args.model, args.chunks)
    plain = torch.nn.Sequential(*layers)
    x = x.chunk(args.replicas)[rank % args.replicas]
    if positions == 1:
        step = data_parallel_step(args, layers, x)
    else:
        step = pipeline_step(args, layers, x, rank, positions)

    for _ in range(steps.WARM_UP):
        step()
    spans, plain_times = [], []
    for _ in range(args.repeats):
        if args.model == "tiny" and rank == 0:
            plain_times.append(steps.seconds(lambda: steps.plain_step(plain, x, args.chunks, False)))
        dist.barrier()
        spans.append(steps.span(step))
    gathered = [None] * ranks if rank == 0 else None
    dist.gather_object(spans, gathered)
    if rank == 0:
        figures = {"seconds": seconds_of(gathered)}
        if plain_times:
            figures["us_per_cell"] = steps.us_per_cell(args, figures["seconds"], plain_times)
        steps.report(args, f"distributed {args.schedule}", **figures)
    dist.destroy_process_group()


def main() -> None:
    parser = steps.flags(__doc__, ["never"])
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--replicas", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_worker, (args, folder), nprocs=len(args.balance) * args.replicas)


if __name__ == "__main__":
    main()
