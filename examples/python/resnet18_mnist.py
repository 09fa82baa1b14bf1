"""Trains a ResNet-18 to read digits, as a pipeline.

    python resnet18_mnist.py --data DIR --stages 2 --epochs 5
    torchrun --nproc-per-node 2 resnet18_mnist.py --data DIR --stages 2

DIR has MNIST's four files, uncompressed. Writes into --output: the losses and the accuracy as history.csv and for
TensorBoard, latest.snapshot and best.snapshot. Prints the confusion matrix of each epoch.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import gpipe
import networks
from gpipe import snapshot

CLASSES = 10


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {text}")
    return int(text)


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="synthetic", metavar="DIR", help="folder with MNIST's files, or 'synthetic' for drawn digits")
    add("--samples", type=positive, default=6000, help="number of training images of 'synthetic'")
    add("--small-images", action="store_true", help="keep the resolution at first: more accurate, 15 times the work")
    add("--epochs", type=positive, default=5, help="passes over the training images")
    add("--batch-size", type=positive, default=64, help="images per mini-batch")
    add("--learning-rate", type=float, default=2e-3, help="of Adam at the start; falls to 0 (cosine)")
    add("--seed", type=positive, default=1, help="of weights, order and drawn data")
    cut = parser.add_mutually_exclusive_group().add_argument
    cut("--stages", type=positive, default=2, help="number of stages, of equal measured time")
    cut("--balance", type=numbers, help="layers per stage, such as 40,31")
    add("--chunks", type=positive, default=4, help="micro-batches per mini-batch")
    add("--schedule", default="gpipe", help=f"{', '.join(gpipe.SCHEDULES)}, @FILE, or auto")
    add("--checkpoint", choices=("never", "except_last", "always"), default="except_last", help="what is recomputed")
    add("--devices", type=lambda text: text.split(","), help="one per worker; by default the GPUs, or the CPU")
    add("--output", type=Path, default=Path("out/resnet18_mnist"), metavar="DIR", help="folder for the results")
    add("--resume", metavar="FILE", help="snapshot to continue from")
    add("--overwrite", action="store_true", help="replace an earlier training in --output")
    return parser.parse_args()


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads a file of MNIST: a header, with the type 8 of bytes and the sizes, and bytes."""
    data, size = path.read_bytes(), 4 + 4 * dimensions
    if len(data) < size or data[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"{path} is not a file of MNIST with {dimensions} dimensions, or is compressed; gunzip it")
    shape = np.frombuffer(data[4:size], ">u4").tolist()
    if len(data) - size != math.prod(shape):
        raise ValueError(f"{path} has {len(data) - size} bytes after its header, which announces {shape} items")
    return torch.tensor(np.frombuffer(data, np.uint8, offset=size).reshape(shape))


def read_digits(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """The images of the part "train" or "t10k", float of shape (N, 1, H, W) from 0 to 1, and their labels."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte", 3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte", 1)
    if not 0 < len(images) == len(labels):
        raise ValueError(f"{folder} has {len(images)} images and {len(labels)} labels of {part}")
    if labels.max() >= CLASSES:
        raise ValueError(f"{folder} has the label {labels.max()} in {part}; labels must be below {CLASSES}")
    return images[:, None] / 255, labels.long()


def draw_digits(count: int, seed: list[int]) -> tuple[Tensor, Tensor]:
    """As read_digits(), for digits of random sizes and places, with noise."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    images = np.zeros((count, 1, 28, 28), np.float32)
    for image, label in zip(images, labels):
        picture = Image.new("L", (28, 28))
        font = ImageFont.load_default(int(random.integers(16, 25)))
        center = random.uniform(11, 17), random.uniform(11, 17)
        ImageDraw.Draw(picture).text(center, str(label), fill=int(random.integers(140, 255)), font=font, anchor="mm")
        picture = picture.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR)
        image[0] = (np.asarray(picture) / 255 + random.normal(0.1, 0.05, (28, 28))).clip(0, 1)
    return torch.tensor(images), torch.tensor(labels)


@torch.no_grad()
def confusion(pipe: gpipe.GPipe, images: Tensor, labels: Tensor, batch_size: int) -> tuple[Tensor, float]:
    """The number of images of each true class (rows) and predicted class (columns), and the mean loss."""
    pipe.eval()
    logits = torch.cat([pipe(part).float().cpu() for part in torch.split(images, batch_size)])
    counts = torch.bincount(labels * CLASSES + logits.argmax(1), minlength=CLASSES**2).view(CLASSES, CLASSES)
    return counts, F.cross_entropy(logits, labels).item()


def train(args: argparse.Namespace, ranks: gpipe.Ranks | None) -> int:
    """Returns the exit code."""
    first = ranks is None or ranks.rank == 0  # this process prints and writes
    latest = args.output / "latest.snapshot"
    if latest.exists() and not args.resume and not args.overwrite:
        raise ValueError(f"{latest} exists; give --resume {latest} to continue, --overwrite or another --output")
    saved = snapshot.read(args.resume) if args.resume else None

    torch.manual_seed(args.seed)
    if args.data == "synthetic":
        training = draw_digits(args.samples, [args.seed, 0])
        test = draw_digits(max(1, args.samples // 6), [args.seed, 1])
    else:
        training, test = read_digits(Path(args.data), "train"), read_digits(Path(args.data), "t10k")
    images, labels = training
    steps = len(images) // args.batch_size  # of an epoch; leaves out a last mini-batch that is smaller
    if steps == 0:
        raise ValueError(f"--batch-size is {args.batch_size}, but there are {len(images)} images to train")

    # The flags that decide the result. A snapshot stores them: a run with other values cannot continue it.
    own = ("small_images", "batch_size", "learning_rate", "seed")
    options = {f"--{name.replace('_', '-')}": str(getattr(args, name)) for name in own}
    options |= {"program": "resnet18_mnist.py", "images": str(len(images))}
    for flag, text in options.items():
        if saved and saved.options.get(flag) != text:
            raise ValueError(f"{args.resume} was made with {flag} {saved.options.get(flag)}, not {text}")

    model = networks.resnet18(CLASSES, in_channels=1, small_images=args.small_images)
    micro_batch = images[: max(2, args.batch_size // args.chunks)]
    balance = args.balance or gpipe.balance.balance_by_time(args.stages, model, micro_batch)
    if ranks:  # all take what the first process has measured
        balance = numbers(ranks.share(",".join(map(str, balance))))
    pipe = gpipe.GPipe(
        model,
        balance,
        devices=args.devices,
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        schedule=args.schedule,
        deferred_batch_norm=True,  # so that the running statistics are those of whole mini-batches
        group=ranks,
    )
    # A process whose stages have no parameters has an empty group.
    optimizer = torch.optim.Adam([{"params": list(pipe.parameters())}], lr=args.learning_rate)

    epoch, batch, loss_sum = 0, 0, 0.0  # completed epochs; completed mini-batches of the current epoch and their losses
    history: dict[str, list[float]] = {}
    if saved:
        mine = snapshot.own_part(pipe, saved)
        snapshot.restore_model(pipe, mine.model)
        snapshot.restore_optimizer(optimizer, pipe, mine.optimizer)
        assert saved.random is not None
        torch.set_rng_state(saved.random)
        epoch, batch, history = saved.epoch, saved.position["batch"], dict(saved.history)
        (loss_sum,) = history.pop("loss_sum")

    def save(name: str) -> None:
        mine = snapshot.Snapshot(
            model=pipe.state_dict(),
            optimizer=snapshot.capture_optimizer(optimizer, pipe),
            epoch=epoch,
            position={"batch": batch},
            random=torch.get_rng_state(),
            options=options,
            history=history | {"loss_sum": [loss_sum]},
        )
        whole = snapshot.gather(pipe, mine)
        if events:
            events.flush()  # a run that continues from the file has all events before it
            snapshot.write(args.output / name, whole)

    signals, stopped = [0], 0  # the signal that this process has got; the signal that ends the training

    def stop(number: int, frame: object) -> None:
        signals[0] = number
        if ranks is None:  # torchrun passes on a signal that the terminal has sent already
            signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    events = SummaryWriter(str(args.output), purge_step=epoch * steps + batch + 1) if first else None
    if first:
        print(f"{len(images)} images to train, {len(test[0])} to test, balance {balance}")
    while epoch < args.epochs and not stopped:
        # The order depends on the epoch alone, so that a run that continues within an epoch has the same mini-batches.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed + epoch + 1))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 + math.cos(math.pi * epoch / args.epochs)) / 2
        pipe.train()
        rest = torch.split(order, args.batch_size)[batch:steps]
        bar = tqdm(rest, f"epoch {epoch + 1}", steps, initial=batch, disable=None if first else True)
        for chosen in bar:
            optimizer.zero_grad()
            loss = pipe.step(images[chosen], labels[chosen], F.cross_entropy).item()
            if not math.isfinite(loss):
                raise ValueError("the loss is not finite; try a lower --learning-rate")
            optimizer.step()
            batch, loss_sum = batch + 1, loss_sum + loss
            bar.set_postfix(loss=f"{loss:.4f}")
            if events:
                events.add_scalar("loss/train_step", loss, epoch * steps + batch)
            stopped = pipe.team.largest(signals[0])  # all processes stop after the same step
            if stopped:
                break
        else:
            counts, test_loss = confusion(pipe, *test, args.batch_size)
            accuracy, rate = counts.trace().item() / len(test[0]), optimizer.param_groups[0]["lr"]
            scores = {"epoch": epoch + 1, "train_loss": loss_sum / steps, "test_loss": test_loss}
            scores |= {"accuracy": accuracy, "learning_rate": rate}
            epoch, batch, loss_sum = epoch + 1, 0, 0.0
            for name, value in scores.items():
                history.setdefault(name, []).append(value)
            if events:
                with open(args.output / "history.csv", "w", newline="") as file:
                    columns = [range(1, epoch + 1), *(history[name] for name in scores if name != "epoch")]
                    csv.writer(file).writerows([scores, *zip(*columns)])
                for name, value in scores.items():
                    events.add_scalar(f"epoch/{name}", value, epoch * steps)
                print(", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
                print("true class and the numbers of images by their predicted class:")
                for label, row in enumerate([[*range(CLASSES)], *counts.tolist()]):
                    print(" " if label == 0 else label - 1, "".join(f"{count:6}" for count in row), flush=True)
            if scores["accuracy"] == max(history["accuracy"]):
                save("best.snapshot")
            stopped = pipe.team.largest(signals[0])
        save(latest.name)
    if first:
        print(f"stopped; to continue, add --resume {latest}" if stopped else f"done: {epoch} epochs, in {args.output}")
    return 128 + stopped if stopped else 0


def main() -> int:
    args = parse_args()
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    try:
        with gpipe.Ranks.from_environment() if under_torchrun else nullcontext() as ranks:
            return train(args, ranks)
    except KeyboardInterrupt:  # before the first step
        return 130
    except (IndexError, OSError, RuntimeError, ValueError) as error:
        print("error:", str(error).splitlines()[0], file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
