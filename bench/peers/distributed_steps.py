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
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import models
import steps

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
}


class Stage(PipelineStage):
    """Opens no connection to its own process, as at the turn of a V: Gloo cannot."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        every = super()._get_init_p2p_neighbors_ops()
        return [each for each in every if each.group_peer != self.group_rank]


def stages_of(rank: int, ranks: int, stages: int, schedule: str) -> list[int]:
    """Returns a process's stages, which are placed in a V or in loops."""
    if schedule == "zb_v":
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


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
    """Returns the step of this process's stages."""
    # The processes of each pipeline, and those that have the same stages.
    pipelines = [dist.new_group([p * args.replicas + r for p in range(positions)]) for r in range(args.replicas)]
    twins = [dist.new_group([p * args.replicas + r for r in range(args.replicas)]) for p in range(positions)]
    position, replica = divmod(rank, args.replicas)
    modules = models.cut(layers, args.balance)
    if args.replicas > 1:
        group = twins[position]
        modules = [DistributedDataParallel(each, process_group=group, gradient_as_bucket_view=True) for each in modules]
    stages = [
        Stage(modules[index], index, len(modules), torch.device("cpu"), group=pipelines[replica])
        for index in stages_of(position, positions, len(modules), args.schedule)
    ]
    chunks = args.chunks // args.replicas
    schedule = SCHEDULES[args.schedule](
        stages if args.stages_per_worker > 1 else stages[0],
        chunks,
        loss_fn=lambda output, _: output.sum(),
        scale_grads=False,
    )
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    # required by a loss
    target = torch.empty(chunks) if any(stage.is_last for stage in stages) else None

    def step() -> None:
        for stage in stages:
            steps.clear_gradients(stage.submod)
        schedule.step(*inputs, target=target, return_outputs=False)

    return step


def run_worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    positions = steps.workers(args)
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
        mp.spawn(run_worker, (args, folder), nprocs=steps.workers(args) * args.replicas)


if __name__ == "__main__":
    main()
