"""Trains a UNet2DModel of Hugging Face's diffusers to draw digits, as a pipeline.

    python diffusion.py --stages 2 --schedule 1f1b
    torchrun --nproc-per-node 2 diffusion.py --stages 2

gpipe.to_sequential() turns the model into a sequence of layers. Writes into --output: the losses and scores as
history.csv and for TensorBoard, samples of each digit per epoch as a picture, latest.snapshot and best.snapshot.
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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, UNet2DModel
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import gpipe
from gpipe import snapshot

CLASSES = 10
ROWS = 6  # of samples that are drawn per class
TIMES = 1000  # time steps from an image to noise
SCHEDULER = DDIMScheduler(
    TIMES, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", timestep_spacing="trailing"
)
SCHEDULER.set_timesteps(40)  # to draw


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
    add("--samples", type=positive, default=6000, help="number of digits to draw and to learn from")
    add("--size", type=positive, default=16, help="width and height of the images, in pixels")
    add("--depth", type=positive, default=2, help="how often the U-Net halves the resolution")
    add("--channels", type=positive, default=16, help="channels of the U-Net at full resolution")
    add("--epochs", type=positive, default=10, help="passes over the training images")
    add("--batch-size", type=positive, default=64, help="images per mini-batch")
    add("--learning-rate", type=float, default=2e-3, help="of Adam at the start; falls to 0 (cosine)")
    add("--seed", type=positive, default=1, help="of weights, order and drawn data")
    cut = parser.add_mutually_exclusive_group().add_argument
    cut("--stages", type=positive, default=2, help="number of stages, of equal measured time")
    cut("--balance", type=numbers, help="layers per stage, such as 40,60")
    add("--chunks", type=positive, default=2, help="micro-batches per mini-batch")
    add("--schedule", default="gpipe", help=f"{', '.join(gpipe.SCHEDULES)}, @FILE, or auto")
    add("--checkpoint", choices=("never", "except_last", "always"), default="never", help="what is recomputed")
    add("--devices", type=lambda text: text.split(","), help="one per worker; by default the GPUs, or the CPU")
    add("--output", type=Path, default=Path("out/diffusion"), metavar="DIR", help="folder for the results")
    add("--resume", metavar="FILE", help="snapshot to continue from")
    add("--overwrite", action="store_true", help="replace an earlier training in --output")
    args = parser.parse_args()
    if args.size % 2**args.depth:
        parser.error(f"--size must be a multiple of {2**args.depth} for --depth {args.depth}, but is {args.size}")
    return args


def draw_digits(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Images of digits, float of shape (N, 1, H, W) from -1 to 1, and their labels."""
    random = np.random.default_rng(args.seed)
    labels = random.integers(0, CLASSES, args.samples)
    images = np.zeros((args.samples, 1, 28, 28), np.uint8)
    for image, label in zip(images, labels):
        picture = Image.new("L", (28, 28))
        center = random.uniform(13, 15), random.uniform(13, 15)
        font = ImageFont.load_default(int(random.integers(26, 31)))
        ImageDraw.Draw(picture).text(center, str(label), fill=255, font=font, anchor="mm")
        image[0] = np.asarray(picture.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR))
    resized = F.interpolate(torch.tensor(images) / 127.5 - 1, (args.size, args.size), mode="bilinear", antialias=True)
    return resized.clamp(-1, 1), torch.tensor(labels)


def make_unet(args: argparse.Namespace) -> UNet2DModel:
    channels = [args.channels] + [2 * args.channels] * args.depth
    return UNet2DModel(
        sample_size=args.size,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=channels,
        down_block_types=["DownBlock2D"] * len(channels),
        up_block_types=["UpBlock2D"] * len(channels),
        add_attention=False,
        norm_num_groups=math.gcd(args.channels, 8),
        num_class_embeds=CLASSES,
    )


def add_noise(images: Tensor, times: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The images at these time steps, and the velocity to predict, which tells how they change with time."""
    noise = torch.randn(images.shape, generator=generator)
    return SCHEDULER.add_noise(images, noise, times), SCHEDULER.get_velocity(images, noise, times)


@torch.no_grad()
def draw_samples(pipe: gpipe.GPipe, noise: Tensor, labels: Tensor) -> Tensor:
    """Draws images of these classes from noise (DDIM, arXiv:2010.02502)."""
    images = noise
    for time in SCHEDULER.timesteps:
        velocity = pipe((images, time.expand(len(images)), labels)).sample
        images = SCHEDULER.step(velocity.float().cpu(), time, images).prev_sample
    return images.clamp(-1, 1)


def criterion(output: Any, velocity: Tensor) -> Tensor:
    return F.mse_loss(output.sample.float(), velocity)


def train(args: argparse.Namespace, ranks: gpipe.Ranks | None) -> int:
    """Returns the exit code."""
    first = ranks is None or ranks.rank == 0  # this process prints and writes
    latest = args.output / "latest.snapshot"
    if latest.exists() and not args.resume and not args.overwrite:
        raise ValueError(f"{latest} exists; give --resume {latest} to continue, --overwrite or another --output")
    saved = snapshot.read(args.resume) if args.resume else None

    torch.manual_seed(args.seed)
    images, labels = draw_digits(args)
    steps = len(images) // args.batch_size  # of an epoch; leaves out a last mini-batch that is smaller
    if steps == 0:
        raise ValueError(f"--batch-size is {args.batch_size}, but there are {len(images)} images to train")

    # The flags that decide the result. A snapshot stores them: a run with other values cannot continue it.
    own = ("size", "depth", "channels", "batch_size", "learning_rate", "seed")
    options = {f"--{name.replace('_', '-')}": str(getattr(args, name)) for name in own}
    options |= {"program": "diffusion.py", "images": str(len(images))}
    for flag, text in options.items():
        if saved and saved.options.get(flag) != text:
            raise ValueError(f"{args.resume} was made with {flag} {saved.options.get(flag)}, not {text}")

    count = max(2, args.batch_size // args.chunks)
    micro_batch = (images[:count], torch.zeros(count, dtype=torch.long), labels[:count])
    model = gpipe.to_sequential(make_unet(args), *micro_batch)
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
        print(f"{len(images)} images, balance {balance}")
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
            generator = torch.Generator().manual_seed(args.seed + (epoch + 1) * steps + batch)
            times = torch.randint(TIMES, chosen.shape, generator=generator)
            noisy, velocity = add_noise(images[chosen], times, generator)
            loss = pipe.step((noisy, times, labels[chosen]), velocity, criterion).item()
            if not math.isfinite(loss):
                raise ValueError("the loss is not finite; try a lower --learning-rate")
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            batch, loss_sum = batch + 1, loss_sum + loss
            bar.set_postfix(loss=f"{loss:.4f}")
            if events:
                events.add_scalar("loss/train_step", loss, epoch * steps + batch)
            stopped = pipe.team.largest(signals[0])  # all processes stop after the same step
            if stopped:
                break
        else:
            pipe.eval()
            generator = torch.Generator().manual_seed(args.seed)  # the same noise after each epoch
            noise, classes = torch.randn(ROWS, *images.shape[1:], generator=generator), torch.arange(CLASSES)
            samples = draw_samples(pipe, noise.repeat_interleave(CLASSES, 0), classes.repeat(ROWS))
            # A sample is recognized if the nearest training image is of its class.
            nearest = torch.cdist(samples.flatten(1), images.flatten(1)).argmin(1)
            recognized, rate = (labels[nearest] == classes.repeat(ROWS)).float().mean(), optimizer.param_groups[0]["lr"]
            scores = {"epoch": epoch + 1, "train_loss": loss_sum / steps, "recognized": recognized.item()}
            scores |= {"learning_rate": rate}
            epoch, batch, loss_sum = epoch + 1, 0, 0.0
            for name, value in scores.items():
                history.setdefault(name, []).append(value)
            if events:
                with open(args.output / "history.csv", "w", newline="") as file:
                    columns = [range(1, epoch + 1), *(history[name] for name in scores if name != "epoch")]
                    csv.writer(file).writerows([scores, *zip(*columns)])
                pixels = torch.cat(list(torch.cat(list(samples.view(ROWS, CLASSES, *images.shape[1:])), 2)), 2)[0]
                picture = Image.fromarray(((pixels + 1) * 127.5).round().byte().numpy())
                picture = picture.resize((4 * picture.width, 4 * picture.height), Image.Resampling.NEAREST)
                picture.save(args.output / f"epoch_{epoch:03}.png")
                events.add_image("samples", np.asarray(picture), epoch * steps, dataformats="HW")
                for name, value in scores.items():
                    events.add_scalar(f"epoch/{name}", value, epoch * steps)
                print(", ".join(f"{name} {value:.4g}" for name, value in scores.items()), flush=True)
            if scores["recognized"] == max(history["recognized"]):
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
