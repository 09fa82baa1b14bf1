"""Compares replicas with DistributedDataParallel and torch.distributed.pipelining, over processes on two cores.

    python replicas.py --ours BUILD_FOLDER

Meshes: two replicas of one stage, one of two stages, and two of two stages. The mini-batch is the same. Prints one JSON line
per mesh, model and contestant: the median of its processes' medians, their minimum and their maximum, and the bytes that a
step sends over the loopback device. Then prints a table, with the bytes of the gradients in theory, 2 (R - 1) times those of the
parameters.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import models
from run import CUTS, HERE, markdown, output_of, spread


class Mesh(NamedTuple):
    replicas: int
    stages: int
    chunks: int  # of all replicas
    schedule: str


MESHES = [Mesh(2, 1, 2, "gpipe"), Mesh(1, 2, 8, "1f1b"), Mesh(2, 2, 8, "1f1b")]


def contestants(mesh: Mesh, model: str, ours: Path, repeats: int) -> dict[str, list[object]]:
    cut = CUTS[model] if mesh.stages == 2 else [sum(CUTS[model])]
    flags = ["--model", model, "--balance", ",".join(map(str, cut)), "--chunks", mesh.chunks, "--checkpoint", "never"]
    flags += ["--schedule", mesh.schedule, "--replicas", mesh.replicas, "--repeats", repeats]
    job = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--master-port", 29511]
    job += ["--nproc-per-node", mesh.replicas * mesh.stages, ours / "bench" / "speed", "--over-ranks", "--steps-only"]
    return {"gpipe": [*job, *flags], "distributed": [sys.executable, HERE / "distributed_steps.py", *flags]}


def sent_bytes() -> int:
    """The bytes that the loopback device has sent."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def run(command: list[object]) -> tuple[float, int]:
    """Runs one process. Returns the median of its steps, and the bytes that it sent."""
    before = sent_bytes()
    output = output_of(command, "0,1")
    line = next(line for line in output.splitlines() if line.startswith("{"))
    return statistics.median(json.loads(line)["seconds"]), sent_bytes() - before


def gradient_bytes(mesh: Mesh, model: str) -> int:
    layers, _ = models.subject(model, mesh.chunks)
    sizes = [parameter.nbytes for layer in layers for parameter in layer.parameters()]
    return 2 * (mesh.replicas - 1) * sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True, help="the build folder of this project")
    parser.add_argument("--models", nargs="+", default=["mlp", "unet", "resnet50"], choices=list(CUTS))
    parser.add_argument("--repeats", type=int, default=7, help="processes per mesh, model and contestant")
    parser.add_argument("--steps", type=int, default=5, help="steps per process")
    args = parser.parse_args()
    lines = []
    for model in args.models:
        for mesh in MESHES:
            seconds: dict[str, list[float]] = {}
            for _ in range(args.repeats):
                for name, command in contestants(mesh, model, args.ours, args.steps).items():
                    print(f"{model} {mesh} {name}", file=sys.stderr)
                    seconds.setdefault(name, []).append(run(command)[0])
            for name, command in contestants(mesh, model, args.ours, 1).items():
                longer = contestants(mesh, model, args.ours, 5)[name]
                sent, gradients = (run(longer)[1] - run(command)[1]) / 4, gradient_bytes(mesh, model)
                of = spread(seconds[name], "s")
                row = {"model": model, **mesh._asdict(), "peer": name, "bytes": sent, "gradients": gradients}
                print(json.dumps({"bench": "replicas", **row, **of}), flush=True)
                cells = [model, f"{mesh.replicas} x {mesh.stages}", name]
                cells += [f"{1e3 * of[key]:.0f}" for key in ("value", "min", "max")]
                lines.append([*cells, *(f"{each / 2**20:.1f}" for each in (sent, gradients))])
    head = ["model", "replicas x stages", "contestant", "ms", "min", "max", "MiB sent per step", "of gradients, in theory"]
    print(markdown(head, lines))


if __name__ == "__main__":
    main()
