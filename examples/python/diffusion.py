"""Trains a UNet2DModel of Hugging Face's diffusers to draw digits, as a pipeline. Draws samples after each epoch.

docs/start.md shows what else a training needs, such as snapshots.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, UNet2DModel
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import gpipe

CLASSES = 10
ROWS = 6  # of samples that are drawn per class
TIMES = 1000  # time steps from an image to noise
SCHEDULER = DDIMScheduler(
    TIMES, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", timestep_spacing="trailing"
)
SCHEDULER.set_timesteps(40)  # to draw


def draw_digits(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Images of digits, float of shape (N, 1, H, W) from -1 to 1, and their labels."""
    random = np.random.default_rng(1)
    labels = random.integers(0, CLASSES, count)
    images = np.zeros((count, 1, 28, 28), np.uint8)
    for image, label in zip(images, labels):
        picture = Image.new("L", (28, 28))
        center = random.uniform(13, 15), random.uniform(13, 15)
        font = ImageFont.load_default(int(random.integers(26, 31)))
        ImageDraw.Draw(picture).text(center, str(label), fill=255, font=font, anchor="mm")
        image[0] = np.asarray(picture.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR))
    resized = F.interpolate(torch.tensor(images) / 127.5 - 1, (size, size), mode="bilinear", antialias=True)
    return resized.clamp(-1, 1), torch.tensor(labels)


def make_unet(size: int, channels: int) -> UNet2DModel:
    return UNet2DModel(
        sample_size=size,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(channels, 2 * channels),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
        norm_num_groups=4,
        num_class_embeds=CLASSES,
    )


@torch.no_grad()
def draw_samples(pipe: gpipe.GPipe, noise: Tensor, labels: Tensor) -> Tensor:
    """Draws images of these classes from noise (DDIM, arXiv:2010.02502)."""
    pipe.eval()
    images = noise
    for time in SCHEDULER.timesteps:
        velocity = pipe(images, time.expand(len(images)), labels).sample
        images = SCHEDULER.step(velocity.float().cpu(), time, images).prev_sample
    pipe.train()
    return images.clamp(-1, 1)


def criterion(output: Any, velocity: Tensor) -> Tensor:
    return F.mse_loss(output.sample.float(), velocity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--samples", type=int, default=6000, help="number of digits to draw and to learn from")
    parser.add_argument("--size", type=int, default=16, help="width and height of the images, in pixels")
    parser.add_argument("--channels", type=int, default=16, help="channels of the U-Net at full resolution")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("out/diffusion"), help="folder for the pictures")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    images, labels = draw_digits(args.samples, args.size)
    noise, classes = torch.randn(ROWS * CLASSES, *images.shape[1:]), torch.arange(CLASSES).repeat(ROWS)
    first = images[: args.batch_size], torch.zeros(args.batch_size, dtype=torch.long), labels[: args.batch_size]
    pipe = gpipe.GPipe.from_module(make_unet(args.size, args.channels), first)
    print(pipe.plan)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(1, args.epochs + 1):
        losses = []
        for chosen in torch.split(torch.randperm(len(images)), args.batch_size)[: len(images) // args.batch_size]:
            times, noises = torch.randint(TIMES, chosen.shape), torch.randn(images[chosen].shape)
            noisy = SCHEDULER.add_noise(images[chosen], noises, times)
            velocity = SCHEDULER.get_velocity(images[chosen], noises, times)  # tells how the image changes with time
            optimizer.zero_grad()
            losses.append(pipe.step((noisy, times, labels[chosen]), velocity, criterion).item())
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
        scheduler.step()
        samples = draw_samples(pipe, noise, classes)
        # A sample is recognized if the nearest training image is of its class.
        nearest = torch.cdist(samples.flatten(1), images.flatten(1)).argmin(1)
        recognized = (labels[nearest] == classes).float().mean()
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, recognized {recognized:.3f}", flush=True)
        pixels = samples.view(ROWS, CLASSES, *images.shape[2:]).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        Image.fromarray(((pixels + 1) * 127.5).round().byte().numpy()).save(args.output / f"epoch_{epoch:03}.png")


if __name__ == "__main__":
    main()
