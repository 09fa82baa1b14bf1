"""Trains a U-Net on two hosts with a slow wire between them by three plans of `gpipe.balance.suggest`: the fastest of looped
placement for a wire without delay and for this one, and the fastest of all for this one.

    python two_hosts.py --model unet --megabytes 25      # as root, on Linux, with the package and diffusers installed

Each host is a network namespace with one rank on one core, and `tc` limits the wire. The wire's speed is measured first,
and the predictions use the measured one. The plans take turns. Prints a table: the medians of the steps' seconds, their
quartiles, and the bytes that a step sends over the wire, also those of skips and their gradients.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe.balance import Candidate, Profile, Suggestion, predict, suggest

sys.path.append(str(Path(__file__).parents[1] / "examples/python"))

import networks  # noqa: E402

HOSTS = 2
WIRE = "wire"  # the name of both ends
PROBE = 1 << 24  # bytes
WARM_UP = 2


def unet(samples: int) -> tuple[nn.Module, Tensor]:
    return networks.unet(base_channels=16), torch.randn(samples, 3, 96, 96)


def unet2d(samples: int) -> tuple[nn.Module, Tensor]:
    """A UNet2DModel of diffusers, at a fixed time step."""
    from diffusers import UNet2DModel

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DModel(
                sample_size=64,
                layers_per_block=1,
                block_out_channels=(32, 64, 64),
                down_block_types=["DownBlock2D"] * 3,
                up_block_types=["UpBlock2D"] * 3,
                add_attention=False,
                norm_num_groups=8,
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.unet(x, 10).sample

    x = torch.randn(samples, 3, 64, 64)
    return gpipe.to_sequential(Denoiser(), x), x


MODELS = {"unet": unet, "unet2d": unet2d}


def loss(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{WIRE}/statistics/tx_bytes").read_text())


def measure_wire() -> None:
    """Prints the bytes per second that rank 0 sends to rank 1."""
    dist.init_process_group("gloo")
    probe = torch.zeros(PROBE, dtype=torch.uint8)
    seconds = []
    for _ in range(4):
        dist.barrier()
        start = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(probe, 1)
            dist.recv(probe[:1], 1)
            seconds.append(time.monotonic() - start)
        else:
            dist.recv(probe, 0)
            dist.send(probe[:1], 0)
    if seconds:
        print(json.dumps(PROBE / statistics.median(seconds[1:])))
    dist.destroy_process_group()


def train(args: argparse.Namespace, plans: list[dict[str, object]]) -> None:
    """Prints, by plan, the seconds of each step and the bytes that this rank sends in one."""
    with gpipe.Ranks.from_environment() as ranks:
        pipes = []
        for plan in plans:
            torch.manual_seed(0)
            model, x = MODELS[args.model](args.samples)
            pipes.append(gpipe.GPipe(model, group=ranks, devices=["cpu"], **plan))
        results = [{"seconds": [], "sent": []} for _ in pipes]
        for turn in range(WARM_UP + args.repeats):
            for pipe, result in zip(pipes, results):
                pipe.zero_grad(set_to_none=True)
                pipe.team.largest(0)  # all ranks start together
                sent, start = sent_bytes(), time.monotonic()
                pipe.step(x, x, loss)
                microseconds = pipe.team.largest(round((time.monotonic() - start) * 1e6))
                if turn >= WARM_UP:
                    result["seconds"].append(microseconds / 1e6)
                    result["sent"].append(sent_bytes() - sent)
        print(json.dumps(results))


def in_namespaces(args: argparse.Namespace, plans: list[dict[str, object]]) -> list[object]:
    """Runs this program on both hosts, and returns what they print."""
    processes = []
    for rank in range(HOSTS):
        command = ["ip", "netns", "exec", f"gpipe{rank}", "taskset", "-c", str(rank), sys.executable, __file__]
        flags = ["--model", args.model, "--samples", args.samples, "--repeats", args.repeats, "--plans", json.dumps(plans)]
        job = {"RANK": str(rank), "WORLD_SIZE": str(HOSTS), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
        environment = {**os.environ, **job, "GLOO_SOCKET_IFNAME": WIRE, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([*command, *map(str, flags)], env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    return [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith(("[", *"123456789"))]


def run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


def connect(megabytes: float) -> None:
    """Makes the hosts and a wire that carries so many megabytes per second in each direction."""
    run(*(f"ip netns add gpipe{rank}" for rank in range(HOSTS)))
    run(f"ip link add {WIRE} netns gpipe0 type veth peer name {WIRE} netns gpipe1")
    for rank in range(HOSTS):
        inside = f"ip netns exec gpipe{rank}"
        limit = f"tbf rate {megabytes * 8}mbit burst 64kb latency 100ms"
        run(f"{inside} ip addr add 10.0.0.{rank + 1}/24 dev {WIRE}", f"{inside} ip link set {WIRE} up")
        run(f"{inside} ip link set lo up", f"{inside} tc qdisc add dev {WIRE} root {limit}")


def disconnect() -> None:
    for rank in range(HOSTS):
        subprocess.run(["ip", "netns", "del", f"gpipe{rank}"], stderr=subprocess.DEVNULL, check=False)


def plan_of(candidate: Candidate) -> dict[str, object]:
    return {name: getattr(candidate, name) for name in ("balance", "placement", "schedule", "chunks", "checkpoint")}


def fastest_looped(found: Suggestion) -> Candidate:
    return next(each for each in found.candidates if each.placement == [s % HOSTS for s in range(len(each.placement))])


def skip_bytes(profile: Profile, plan: Candidate) -> int:
    """Returns the bytes of skips and their gradients that a step sends."""
    worker_of = [worker for worker, layers in zip(plan.placement, plan.balance) for _ in range(layers)]
    others = ({worker_of[i] for i in each.reader_layers} - {worker_of[each.from_layer]} for each in profile.skips)
    return 2 * plan.chunks * sum(each.bytes * len(workers) for each, workers in zip(profile.skips, others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="unet")
    parser.add_argument("--samples", type=int, default=32, help="of the mini-batch; default: %(default)s")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches; default: %(default)s")
    parser.add_argument("--megabytes", type=float, default=25, help="per second and direction; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each plan; default: %(default)s")
    parser.add_argument("--plans", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plans:
        plans = json.loads(args.plans)
        train(args, plans) if plans else measure_wire()
        return
    disconnect()
    try:
        connect(args.megabytes)
        (bandwidth,) = in_namespaces(args, [])
        model, x = MODELS[args.model](args.samples)
        search = {"chunks": [args.chunks], "checkpoints": ["never"], "intraop_threads": 1}
        found = suggest(model, x, ["cpu"] * HOSTS, bandwidth=bandwidth, **search)
        without_wire = suggest(model, x, ["cpu"] * HOSTS, **search)
        chosen = [fastest_looped(without_wire), fastest_looped(found), found.best]
        results = in_namespaces(args, [plan_of(each) for each in chosen])
    finally:
        disconnect()
    print(f"{args.model}, {args.samples} samples, {args.chunks} micro-batches; the wire carries {bandwidth / 1e6:.1f} MB/s\n")
    print("| schedule | balance | placement | predicted s | measured s | skips MB | sent MB |\n" + "|---" * 7 + "|")
    profile = found.profile_of(found.best)
    for index, each in enumerate(chosen):
        names = {"schedule": each.schedule, "placement": each.placement}
        predicted = predict(profile, each.balance, each.chunks, each.checkpoint, bandwidth=bandwidth, **names).seconds
        low, middle, high = statistics.quantiles(results[0][index]["seconds"], method="inclusive")
        sent = sum(statistics.median(result[index]["sent"]) for result in results) / 1e6
        cells = [each.schedule, each.balance, each.placement, f"{predicted:.2f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"]
        print("|", " | ".join(map(str, [*cells, f"{skip_bytes(profile, each) / 1e6:.1f}", f"{sent:.1f}"])), "|")


if __name__ == "__main__":
    main()
