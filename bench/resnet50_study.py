"""Times training of a ResNet-50 on one device, in two stages, as a pipeline, and as two replicas; draws three figures.

    taskset -c 0,1 python resnet50_study.py --output out/study                     # one core per device
    python resnet50_study.py --output out/study --devices cuda:0,cuda:1

Follows PyTorch's tutorial "Single-Machine Model Parallel Best Practices": one-hot targets over 1000 classes, mean squared
error, SGD, nothing recomputed. The variants take turns. Needs torchvision and matplotlib.
Writes README.md with the table, and model_parallel.png, pipeline.png and split_sizes.png.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import torch
import torchvision
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot
from torch.optim import SGD

import gpipe
from gpipe.balance import predict, profile

CLASSES = 1000
Step = Callable[[Tensor, Tensor], object]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for the results")
    add("--devices", type=lambda text: text.split(","), default=["cpu", "cpu"], help="two devices")
    add("--batch-size", type=int, default=120, help="images per mini-batch, an even number")
    add("--image", type=int, default=128, help="width and height of the images")
    add("--splits", type=lambda text: [*map(int, text.split(","))], default=[1, 3, 5, 8, 10, 12, 20, 40, 60])
    add("--batches", type=int, default=3, help="mini-batches per run")
    add("--runs", type=int, default=10, help="measured runs per variant")
    add("--seconds", type=float, default=10, help="time to profile each variant")
    args = parser.parse_args()
    if len(args.devices) != 2 or args.batch_size % 2 or max(args.splits) > args.batch_size:
        parser.error("give two devices, an even batch size, and splits of at most the batch size")
    return args


def trained(model: nn.Module, step: Step) -> Step:
    """A step of forward, loss and backward, with its optimizer."""
    optimizer = SGD(model.parameters(), 0.001)

    def run(images: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        step(images, targets)
        optimizer.step()

    return run


def on_one_device(model: nn.Module, device: str) -> Step:
    model.to(device)
    return lambda images, targets: mse_loss(model(images.to(device)), targets.to(device)).backward()


def on_two_devices(models: list[nn.Module], devices: list[str]) -> Step:
    """Data parallelism: a thread per device trains on half of the mini-batch. The gradients' mean goes to both."""
    steps = [on_one_device(*pair) for pair in zip(models, devices)]
    threads = ThreadPoolExecutor(2)

    def step(images: Tensor, targets: Tensor) -> None:
        list(threads.map(lambda step, *halves: step(*halves), steps, images.chunk(2), targets.chunk(2)))
        for ours, theirs in zip(*(model.parameters() for model in models)):
            ours.grad.add_(theirs.grad.to(ours.device)).div_(2)
            theirs.grad.copy_(ours.grad)

    return step


def variants(args: argparse.Namespace) -> tuple[dict[str, Step], dict[str, float]]:
    """The ways to train, by name, and the predicted seconds of a run of each."""
    torch.manual_seed(0)
    example = torch.randn(4, 3, args.image, args.image)
    layers = [gpipe.to_sequential(torchvision.models.resnet50(), example) for _ in range(len(args.splits) + 1)]
    steps: dict[str, Step] = {}
    predicted = {}
    whole, left, right = (torchvision.models.resnet50() for _ in range(3))
    steps["single"] = trained(whole, on_one_device(whole, args.devices[0]))
    for split, model in zip([args.batch_size, *args.splits], layers):
        workers = 1 if split == args.batch_size or args.devices[0] != "cpu" else 2
        sample = torch.randn(split, 3, args.image, args.image)
        costs = profile(
            model, sample, device=args.devices[0], workers=workers, intraop_threads=1, seconds=args.seconds, repeats=3
        )
        chunks = -(-args.batch_size // split)
        balance = costs.balance_by_time(2, chunks, "never")
        name = "model parallel" if split == args.batch_size else f"split {split}"
        predicted[name] = predict(costs, balance, chunks, "never", schedule="gpipe").seconds * args.batches
        pipe = gpipe.GPipe(model, balance, devices=args.devices, chunks=chunks, checkpoint="never")
        steps[name] = trained(pipe, lambda images, targets, pipe=pipe: pipe.step(images, targets, mse_loss))
    predicted["single"] = predicted["model parallel"]
    right.load_state_dict(left.state_dict())
    steps["data parallel"] = trained(nn.ModuleList([left, right]), on_two_devices([left, right], args.devices))
    return steps, predicted


def measure(steps: dict[str, Step], args: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of each run. Run 0 warms up."""
    images = torch.randn(args.batch_size, 3, args.image, args.image)
    targets = one_hot(torch.randint(CLASSES, (args.batch_size,)), CLASSES).float()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(args.runs + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(args.batches if run else 1):
                step(images, targets)
            for device in {device for device in args.devices if device.startswith("cuda")}:
                torch.cuda.synchronize(device)
            if run:
                seconds[name].append(time.perf_counter() - start)
        print(f"run {run} of {args.runs}", flush=True)
    return seconds


def draw(seconds: dict[str, list[float]], predicted: dict[str, float], args: argparse.Namespace) -> None:
    mean = {name: statistics.mean(runs) for name, runs in seconds.items()}
    spread = {name: statistics.stdev(runs) if len(runs) > 1 else 0.0 for name, runs in seconds.items()}
    splits = [f"split {split}" for split in args.splits]
    best = min(splits, key=mean.__getitem__)
    figures = {
        "model_parallel": ["single", "model parallel"],
        "pipeline": ["single", "model parallel", best, "data parallel"],
        "split_sizes": splits,
    }
    for file, names in figures.items():
        figure, axes = pyplot.subplots(figsize=(6, 4))
        axes.bar(names, [mean[name] for name in names], yerr=[spread[name] for name in names], capsize=4, color="#8fb3d4")
        known = [name for name in names if name in predicted]
        axes.plot(known, [predicted[name] for name in known], "D", color="#e07b39", label="predicted")
        axes.set_ylabel("seconds per run")
        axes.tick_params("x", rotation=30)
        axes.legend()
        figure.tight_layout()
        figure.savefig(args.output / f"{file}.png", dpi=100)
        pyplot.close(figure)


def page(seconds: dict[str, list[float]], predicted: dict[str, float], args: argparse.Namespace) -> str:
    single = statistics.median(seconds["single"])
    lines = ["| variant | seconds per run | quartiles | speed-up | predicted |", "|---|---|---|---|---|"]
    for name, runs in seconds.items():
        low, middle, high = statistics.quantiles(runs, n=4) if len(runs) > 1 else runs * 3
        expected = f"{predicted[name]:.2f}" if name in predicted else ""
        lines.append(f"| {name} | {middle:.2f} | {low:.2f}–{high:.2f} | {single / statistics.median(runs):.2f} | {expected} |")
    what = f"{args.runs} runs in turn, of {args.batches} mini-batches of {args.batch_size} images of {args.image}×{args.image}"
    where = f"torch {torch.__version__}, {platform.processor() or platform.machine()}, devices {', '.join(args.devices)}"
    figures = "\n".join(f"![{name}]({name}.png)" for name in ("model_parallel", "pipeline", "split_sizes"))
    return "\n".join(["# ResNet-50 on two devices", "", f"{what}. {where}.", "", *lines, "", figures, ""])


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    steps, predicted = variants(args)
    seconds = measure(steps, args)
    draw(seconds, predicted, args)
    (args.output / "README.md").write_text(page(seconds, predicted, args))


if __name__ == "__main__":
    main()
