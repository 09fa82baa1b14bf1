"""The diffusion process: adds noise to images, and removes it with a model."""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler
from torch import Tensor

import gpipe

Input = tuple[Tensor, Tensor, Tensor]  # of the model: images with noise, time steps, classes

STEPS = 1000  # from an image to noise
_DRAWING_STEPS = 40


def make_scheduler() -> DDIMScheduler:
    """The times, and the share of noise at each."""
    return DDIMScheduler(
        num_train_timesteps=STEPS,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )


def add_noise(images: Tensor, labels: Tensor, times: Tensor, generator: torch.Generator) -> tuple[Input, Tensor]:
    """Returns the images as they are at these time steps, as an input of the model, and the velocity to predict, which
    tells how they change with time.

    Args:
        images: of shape (N, 1, H, W) with values -1 to 1.
        labels: of shape (N,).
        times: of shape (N,), from 0 to STEPS - 1.
    """
    scheduler = make_scheduler()
    noise = torch.randn(images.shape, generator=generator)
    noisy = scheduler.add_noise(images, noise, times)
    return (noisy, times, labels), scheduler.get_velocity(images, noise, times)


def draw(pipe: gpipe.GPipe, noise: Tensor, labels: Tensor) -> Tensor:
    """Draws images of these classes from noise, with a pipeline in evaluation mode. Returns values 0 to 1. The same
    noise gives the same images (DDIM, arXiv:2010.02502)."""
    scheduler = make_scheduler()
    scheduler.set_timesteps(_DRAWING_STEPS)
    images = noise
    for time in scheduler.timesteps:
        velocity = pipe((images, time.expand(len(images)), labels)).sample
        images = scheduler.step(velocity.float().cpu(), time, images).prev_sample
    return (images.clamp(-1, 1) + 1) / 2
