"""Trains a U-Net to segment images, as a pipeline.

    python unet_train.py --data DIR --stages 2 --epochs 20
    torchrun --nproc-per-node 2 unet_train.py --data DIR --stages 2 --epochs 20

DIR has the layout of the Carvana data set: imgs/NAME.jpg and masks/NAME_mask.gif, or .png. Writes into --output: the
losses and scores as history.csv and for TensorBoard, a picture of predictions per epoch, latest.snapshot and
best.snapshot.
"""

from __future__ import annotations

import argparse
import colorsys
import copy
import csv
import math
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageDraw, ImageOps
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import gpipe
import networks
from gpipe import snapshot
from gpipe.data import PartSampler, collate_part

PICTURES = 4  # validation images that are drawn after each epoch
MAX_CLASSES = 64
SUFFIXES = ".jpg", ".jpeg", ".png", ".gif", ".tif", ".tiff"


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
    add("--data", default="synthetic", metavar="DIR", help="folder with imgs/ and masks/; 'synthetic': drawn shapes")
    add("--samples", type=positive, default=400, help="number of images of 'synthetic'")
    add("--classes", type=positive, default=2, help="number of classes, with the background")
    add("--scale", type=float, default=0.5, help="size of the training images, relative to the first image")
    add("--validation", type=float, default=10.0, help="percentage of the images that is kept for validation")
    add("--augment", action="store_true", help="mirror and recolour the training images at random")
    add("--workers", type=int, default=2, help="number of processes that load images in advance")
    add("--depth", type=positive, default=3, help="how often the U-Net halves the resolution")
    add("--channels", type=positive, default=8, help="channels of the U-Net at full resolution")
    add("--bilinear", action="store_true", help="upsample by interpolation instead of transposed convolutions")
    add("--epochs", type=positive, default=24, help="passes over the training images")
    add("--batch-size", type=positive, default=8, help="images per mini-batch")
    add("--learning-rate", type=float, default=5e-3, help="of Adam at the start; falls to 0 (cosine)")
    add("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    add("--seed", type=positive, default=1, help="of weights, order and drawn data")
    cut = parser.add_mutually_exclusive_group().add_argument
    cut("--stages", type=positive, default=2, help="number of stages, of equal measured time")
    cut("--balance", type=numbers, help="layers per stage, such as 5,18")
    add("--chunks", type=positive, default=2, help="micro-batches per mini-batch")
    add("--schedule", default="gpipe", help=f"{', '.join(gpipe.SCHEDULES)}, @FILE, or auto")
    add("--checkpoint", choices=("never", "except_last", "always"), default="except_last", help="what is recomputed")
    add("--devices", type=lambda text: text.split(","), help="one per worker; by default the GPUs, or the CPU")
    add("--replicas", type=positive, default=1, help="equal pipelines that share a mini-batch, over processes")
    add("--output", type=Path, default=Path("out/unet"), metavar="DIR", help="folder for the results")
    add("--resume", metavar="FILE", help="snapshot to continue from; auto: the one in --output, if there is one")
    add("--snapshot-every", type=positive, metavar="STEPS", help="write latest.snapshot also within epochs")
    add("--overwrite", action="store_true", help="replace an earlier training in --output")
    args = parser.parse_args()
    if not 2 <= args.classes <= MAX_CLASSES:
        parser.error(f"--classes must be from 2 to {MAX_CLASSES}, but is {args.classes}")
    if not 0 < args.scale <= 1:
        parser.error(f"--scale must be above 0 and at most 1, but is {args.scale}")
    if not 0 < args.validation < 100:
        parser.error(f"--validation must be between 0 and 100, but is {args.validation}")
    return args


def draw_scene(index: int, args: argparse.Namespace) -> tuple[Image.Image, Image.Image]:
    """Draws an image and its mask: grey circles as background, and for each class a polygon of a hue of its own."""
    random = np.random.default_rng([args.seed, index])
    greys = random.integers(40, 220, 9).tolist()
    image, mask = Image.new("RGB", (192, 128), (greys[0],) * 3), Image.new("L", (192, 128))
    for grey, (x, y, radius) in zip(greys[1:], random.integers((0, 0, 4), (192, 128, 24), (8, 3)).tolist()):
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=(grey,) * 3)
    for label in range(1, args.classes):
        circle, rotation = tuple(random.integers((20, 20, 16), (172, 108, 32)).tolist()), int(random.integers(0, 360))
        color = tuple(int(255 * part) for part in colorsys.hsv_to_rgb(label / args.classes, *random.uniform(0.4, 1, 2)))
        ImageDraw.Draw(image).regular_polygon(circle, label + 2, rotation, fill=color)
        ImageDraw.Draw(mask).regular_polygon(circle, label + 2, rotation, fill=label)
    pixels = np.asarray(image) + random.normal(0, 8, (128, 192, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), mask


def files_by_name(folder: Path, ending: str = "") -> dict[str, Path]:
    """The images in a folder, by their names without `ending`."""
    files: dict[str, Path] = {}
    for path in folder.iterdir():
        if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):  # hidden, such as ._a.png of macOS
            continue
        if not path.stem.endswith(ending):
            raise ValueError(f"{path}: the name of a mask must be NAME{ending}{path.suffix}")
        other = files.setdefault(path.stem.removesuffix(ending), path)
        if other != path:
            raise ValueError(f"two files have the same name: {other} and {path}")
    return files


def list_files(folder: Path) -> list[tuple[Path, Path]]:
    """The paths of all images, each with its mask's."""
    images = files_by_name(folder / "imgs")
    masks = files_by_name(folder / "masks", "_mask")
    for name in sorted(images.keys() ^ masks.keys()):
        raise ValueError(f"{images[name]} has no mask" if name in images else f"{masks[name]} has no image")
    files = [(images[name], masks[name]) for name in sorted(images)]
    for image, mask in files:
        if image_size(image) != image_size(mask):
            raise ValueError(f"{image} has the size {image_size(image)}, but its mask has {image_size(mask)}")
    return files


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=["JPEG", "PNG", "GIF", "TIFF"]) as image:
            if ";16" in str(image.tile) and image.mode[0] != "I":
                raise ValueError("Pillow cannot read colours of 16 bits; write 8, or levels of grey")
            yield image
    except Exception as error:  # Pillow has no common class for damaged files
        raise ValueError(f"{path}: {error}") from None


def image_size(path: Path) -> tuple[int, int]:
    """Reads only the header."""
    with open_image(path) as image:
        is_turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        return image.size[::-1] if is_turned else image.size


def read_numbers(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the file says of red, green and blue, of shape (H, W, 3): up to 65535 with 16 bits."""
    with open_image(path) as image:
        image = ImageOps.exif_transpose(image) if "exif" in image.info else image
        if image.mode[0] != "I":
            return np.asarray(image.convert("RGB"), np.int64)
        levels = np.asarray(image, np.int64)[..., None].repeat(3, 2)
        return levels if (levels % 257).any() else levels // 257


def read_image(path: Path) -> Image.Image:
    numbers = read_numbers(path)
    return Image.fromarray((numbers if numbers.max() < 256 else (numbers + 128) // 257).astype(np.uint8))


def read_labels(path: Path, classes: int) -> Image.Image:
    """The class of each pixel of a mask: see docs/segmentation.md."""
    numbers = read_numbers(path)
    colors = numbers @ [1 << 32, 1 << 16, 1]
    grey = (1 << 32) + (1 << 16) + 1
    if classes == 2:
        light, things = numbers.max(2), colors[colors > 0]
        greys = light.max() >= MAX_CLASSES and (colors == light * grey).all()
        if not greys and (things != things[:1]).any():
            raise ValueError(f"{path}: a mask of two classes has one colour beside black, or greys up to white")
        return Image.fromarray((2 * light > light.max()).astype(np.uint8))
    labels = np.full(colors.shape, classes, np.uint8)
    for label in range(classes):
        of_voc = sum((label >> i + 3 * j & 1) << 39 - 16 * i - j for i in range(3) for j in range(2))
        labels[(colors == of_voc) | (colors == label * grey)] = label
    if labels.max() == classes:
        color = ",".join(map(str, numbers[labels == classes][0]))
        raise ValueError(f"{path}: the colour {color} belongs to none of the {classes} classes")
    return Image.fromarray(labels)


def check_masks(files: list[tuple[Path, Path]], args: argparse.Namespace) -> None:
    """Reads all masks. Raises ValueError if all pixels are of one class."""
    with ThreadPoolExecutor(max(1, args.workers)) as threads:
        labels = threads.map(lambda pair: np.unique(np.asarray(read_labels(pair[1], args.classes))).tolist(), files)
        found = set().union(*labels)
    if len(found) == 1:
        what = f"all pixels of all masks are of class {found.pop()}"
        raise ValueError(f"{args.data}/masks: {what}; masks need black and the classes' colours")


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images, float of shape (3, H, W) from 0 to 1, and the class of each pixel, of shape (H, W)."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.files = None if args.data == "synthetic" else list_files(Path(args.data))
        self.augment, self.epoch = False, 0  # whether to change the images at random, differently in each epoch
        if len(self) < 2:
            raise ValueError(f"{args.data} has {len(self)} images; give at least two, to train and to validate")
        if self.files is not None:
            check_masks(self.files, args)
        self.size = [max(1, round(side * args.scale)) for side in self.read(0)[0].size]

    def __len__(self) -> int:
        return int(self.args.samples) if self.files is None else len(self.files)

    def read(self, index: int) -> tuple[Image.Image, Image.Image]:
        if self.files is None:
            return draw_scene(index, self.args)
        image, mask = self.files[index]
        return read_image(image), read_labels(mask, self.args.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.read(index)
        x = np.asarray(image.resize(self.size, Image.Resampling.BILINEAR), np.float32) / 255
        y = np.asarray(mask.resize(self.size, Image.Resampling.NEAREST)).astype(np.int64)
        if self.augment:
            random = np.random.default_rng([self.args.seed, self.epoch, index])
            if random.random() < 0.5:
                x, y = x[:, ::-1], y[:, ::-1]
            x = ((x - 0.5) * random.uniform(0.8, 1.2) + 0.5 + random.uniform(-0.1, 0.1, 3)).clip(0, 1)
        return torch.tensor(x.transpose(2, 0, 1).copy(), dtype=torch.float32), torch.tensor(y.copy())


def with_background(logits: Tensor) -> Tensor:
    """A logit per class. For two classes the model has one channel, the logit of the foreground."""
    logits = logits.float()
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def segmentation_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy plus 1 - Dice, where Dice is the mean over images and all classes but the background."""
    logits = with_background(output)
    predicted = logits.softmax(1)[:, 1:]
    truth = F.one_hot(labels, logits.shape[1]).permute(0, 3, 1, 2)[:, 1:]
    both, total = (predicted * truth).sum((2, 3)), (predicted + truth).sum((2, 3))
    return F.cross_entropy(logits, labels) + 1 - ((2 * both + 1) / (total + 1)).mean()


def draw_predictions(images: Tensor, labels: Tensor, predicted: Tensor, classes: int) -> Image.Image:
    """Draws a row per image: the image, and tinted by its mask and by the prediction."""
    hues = [colorsys.hsv_to_rgb(label / max(classes - 1, 1), 1, 1) for label in range(classes)]
    colors = torch.tensor(hues).T[:, :, None, None]

    def tinted(mask: Tensor) -> Tensor:
        tint = sum(colors[:, label] * (mask == label)[:, None] for label in range(1, classes))
        return torch.where((mask > 0)[:, None], 0.5 * images + 0.5 * tint, images)

    columns = torch.cat([F.pad(each, (2, 2, 2, 2)) for each in (images, tinted(labels), tinted(predicted))], 3)
    pixels = torch.cat(list(columns), 1).permute(1, 2, 0)
    return Image.fromarray((255 * pixels).round().byte().numpy())


def evaluate(pipe: gpipe.GPipe, loader: DataLoader[Any], count: int, args: argparse.Namespace) -> dict[str, float]:
    """The mean loss of `count` images, and Dice and IoU over the pixels of all of them."""
    pipe.eval()
    pairs = torch.zeros(args.classes, args.classes, dtype=torch.double)  # pixels by their predicted and true class
    loss = 0.0
    for images, labels in loader:
        output = pipe(images).cpu()
        if len(images) > 0:  # a replica's part of the last mini-batch can be empty
            loss += segmentation_loss(output, labels).item() * len(images)
            classes = with_background(output).argmax(1) * args.classes + labels
            pairs += torch.bincount(classes.flatten(), minlength=args.classes**2).view_as(pairs)
    loss, *sums = pipe.team.sum_over_replicas([loss, *pairs.flatten().tolist()])
    pairs = torch.tensor(sums).view_as(pairs)
    both, total = pairs.diagonal()[1:], (pairs.sum(0) + pairs.sum(1))[1:]
    dice = torch.where(total > 0, 2 * both / total, 1.0)  # 1 for a class that is nowhere
    scores = {"val_dice": dice.mean().item(), "val_iou": (dice / (2 - dice)).mean().item(), "val_loss": loss / count}
    if args.classes > 2:
        scores |= {f"val_dice_{label}": value for label, value in enumerate(dice.tolist(), 1)}
    return scores


def ignore_interrupt(worker: int) -> None:
    """Ctrl-C reaches the processes that load images too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def train(args: argparse.Namespace, ranks: gpipe.Ranks | None) -> int:
    """Returns the exit code."""
    first = ranks is None or ranks.rank == 0  # this process prints and writes
    latest = args.output / "latest.snapshot"
    if args.resume == "auto":
        args.resume = str(latest) if latest.exists() else None
    elif latest.exists() and not args.resume and not args.overwrite:
        raise ValueError(f"{latest} exists; give --resume {latest} to continue, --overwrite or another --output")
    if args.replicas > 1 and ranks is None:
        raise ValueError(f"--replicas is {args.replicas}, but there is one process; start more with torchrun")
    saved = snapshot.read(args.resume) if args.resume else None

    torch.manual_seed(args.seed)
    training = Pictures(args)
    validation = copy.copy(training)
    training.augment = args.augment
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(args.seed)).tolist()
    kept = min(max(1, round(len(training) * args.validation / 100)), len(training) - 1)
    to_validate, to_train = order[:kept], order[kept:]
    steps = len(to_train) // args.batch_size  # of an epoch; leaves out a last mini-batch that is smaller
    if steps == 0:
        raise ValueError(f"--batch-size is {args.batch_size}, but there are {len(to_train)} images to train")

    # The flags that decide the result. A snapshot stores them: a run with other values cannot continue it.
    own = ["classes", "depth", "channels", "bilinear", "validation", "scale", "augment"]
    own += ["batch_size", "learning_rate", "amp", "seed"]
    options = {f"--{name.replace('_', '-')}": str(getattr(args, name) + 0) for name in own}  # True + 0 is 1
    options |= {"program": "unet_train.py", "images": str(len(training))}
    for flag, text in options.items():
        if saved and saved.options.get(flag) != text:
            raise ValueError(f"{args.resume} was made with {flag} {saved.options.get(flag)}, not {text}")

    model = networks.unet(
        out_channels=args.classes if args.classes > 2 else 1,
        depth=args.depth,
        base_channels=args.channels,
        bilinear=args.bilinear,
    )
    micro_batch = torch.rand(max(2, args.batch_size // args.replicas // args.chunks), 3, *training.size[::-1])
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
        deferred_batch_norm=True,  # so that the running statistics do not depend on the chunks and the replicas
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

    def batches(pictures: Pictures, indices: list[int]) -> DataLoader[Any]:
        sampler: Sampler[list[int]] = BatchSampler(indices, args.batch_size, drop_last=False)
        return DataLoader(
            pictures,
            batch_sampler=PartSampler(sampler, ranks) if ranks else sampler,
            collate_fn=collate_part(pictures),
            num_workers=args.workers,
            worker_init_fn=ignore_interrupt,
            generator=torch.Generator(),  # the loader draws a seed, which must not change the training's random numbers
        )

    signals, stopped = [0], 0  # the signal that this process has got; the signal that ends the training

    def stop(number: int, frame: object) -> None:
        signals[0] = number
        if ranks is None:  # torchrun passes on a signal that the terminal has sent already
            signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    events = SummaryWriter(str(args.output), purge_step=epoch * steps + batch + 1) if first else None
    if first:
        print(f"{len(to_train)} images to train, {kept} to validate, of size {training.size}, balance {balance}")
    autocast = torch.autocast(pipe.devices[0].type, torch.bfloat16, enabled=args.amp)
    while epoch < args.epochs and not stopped:
        # The order depends on the epoch alone, so that a run that continues within an epoch has the same mini-batches.
        order = torch.randperm(len(to_train), generator=torch.Generator().manual_seed(args.seed + epoch + 1)).tolist()
        rest = [to_train[index] for index in order][batch * args.batch_size : steps * args.batch_size]
        training.epoch = epoch
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 + math.cos(math.pi * epoch / args.epochs)) / 2
        pipe.train()
        bar = tqdm(batches(training, rest), f"epoch {epoch + 1}", steps, initial=batch, disable=None if first else True)
        for images, labels in bar:
            optimizer.zero_grad()
            with autocast:
                loss = pipe.step(images, labels, segmentation_loss).item()
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
            if args.snapshot_every and batch % args.snapshot_every == 0:
                save(latest.name)
        else:
            with autocast, torch.no_grad():
                scores = evaluate(pipe, batches(validation, to_validate), kept, args)
                images, labels = (torch.stack(part) for part in zip(*(validation[i] for i in to_validate[:PICTURES])))
                predicted = with_background(pipe(images).cpu()).argmax(1)
            rate = optimizer.param_groups[0]["lr"]
            scores = {"epoch": epoch + 1, "train_loss": loss_sum / steps, **scores, "learning_rate": rate}
            epoch, batch, loss_sum = epoch + 1, 0, 0.0
            for name, value in scores.items():
                history.setdefault(name, []).append(value)
            if events:
                with open(args.output / "history.csv", "w", newline="") as file:
                    columns = [range(1, epoch + 1), *(history[name] for name in scores if name != "epoch")]
                    csv.writer(file).writerows([scores, *zip(*columns)])
                picture = draw_predictions(images, labels, predicted, args.classes)
                picture.save(args.output / f"epoch_{epoch:03}.png")
                events.add_image("predictions", np.asarray(picture), epoch * steps, dataformats="HWC")
                for name, value in scores.items():
                    events.add_scalar(f"epoch/{name}", value, epoch * steps)
                print(", ".join(f"{name} {value:.4g}" for name, value in scores.items()), flush=True)
            if scores["val_dice"] == max(history["val_dice"]):
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
        with gpipe.Ranks.from_environment(replicas=args.replicas) if under_torchrun else nullcontext() as ranks:
            return train(args, ranks)
    except KeyboardInterrupt:  # before the first step
        return 130
    except (IndexError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        # An error of a process that loads images is a traceback.
        print("error:", lines[-1] if lines[0].startswith("Caught ") else lines[0], file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
