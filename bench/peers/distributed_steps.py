"""Times steps of torch.distributed.pipelining with one process per worker. Prints a JSON line.

The processes communicate by Gloo over the loopback device. Each runs one thread. A barrier precedes each step. A step
lasts from its first start to its last end over all processes. Skips that cross a cut are sent with the activation
through every stage in between. Steps return no output: the loss is the sum of each micro-batch's output.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

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


def run_worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    ranks = steps.workers(args)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    layers, x = steps.subject(args)
    modules = models.cut(layers, args.balance)
    stages = [
        Stage(modules[index], index, len(modules), torch.device("cpu"))
        for index in stages_of(rank, ranks, len(modules), args.schedule)
    ]
    schedule = SCHEDULES[args.schedule](
        stages if args.stages_per_worker > 1 else stages[0],
        args.chunks,
        loss_fn=lambda output, _: output.sum(),
        scale_grads=False,
    )
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    # required by a loss
    target = torch.empty(args.chunks) if any(stage.is_last for stage in stages) else None
    plain = torch.nn.Sequential(*layers)

    def step() -> None:
        for stage in stages:
            steps.clear_gradients(stage.submod)
        schedule.step(*inputs, target=target, return_outputs=False)

    for _ in range(steps.WARM_UP):
        step()
    spans, plain_spans = [], []
    for _ in range(args.repeats):
        if args.model == "tiny" and rank == 0:
            plain_spans.append(steps.span(lambda: steps.plain_step(plain, x, args.chunks, False)))
        dist.barrier()
        spans.append(steps.span(step))
    gathered = [None] * ranks if rank == 0 else None
    dist.gather_object(spans, gathered)
    if rank == 0:
        figures = {"seconds": seconds_of(gathered)}
        if plain_spans:
            figures["plain_seconds"] = seconds_of([plain_spans])
            figures["us_per_cell"] = steps.us_per_cell(args, *figures.values())
        steps.report(args, f"distributed {args.schedule}", **figures)
    dist.destroy_process_group()


def main() -> None:
    parser = steps.flags(__doc__, ["never"])
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_worker, (args, folder), nprocs=steps.workers(args))


if __name__ == "__main__":
    main()
