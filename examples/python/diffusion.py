"""Trains a UNet2DModel of Hugging Face's diffusers to draw digits, as a pipeline.

    python diffusion.py --stages 2 --schedule 1f1b

gpipe.to_sequential turns the model into a sequence of layers. The program has the flags and the output files of the
other training programs. See docs/any_model.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from diffusers import UNet2DModel

import gpipe
from common.options import add_training_options, integer, make_parser, parse, run_program
from common.plan import check_last_mini_batch, make_pipe, make_plan, print_plan
from common.start import check_identity, is_finished, make_identity, read_start, start_training
from common.task import history_columns
from common.trainer import Trainer, run_and_report
from denoising.task import SCORES, DiffusionTask
from mnist.data import CLASSES, add_data_options, read_digits

_MOST_GROUPS = 8  # of a group norm


def parse_options() -> argparse.Namespace:
    parser = make_parser("Trains a diffusion model to draw digits, as a pipeline over several devices.")
    add_training_options(
        parser, output=Path("out/diffusion"), epochs=10, batch_size=64, learning_rate=2e-3, clip=1.0, checkpoint="never"
    )
    add = parser.add_argument_group("data and model").add_argument
    add_data_options(add)
    default = "(default: %(default)s)"
    add(
        "--size",
        type=integer(4, 256),
        default=16,
        metavar="N",
        help=f"width and height of the model's images, in pixels; the data is resized {default}",
    )
    add(
        "--depth",
        type=integer(1, 6),
        default=2,
        metavar="N",
        help=f"how often the U-Net halves the resolution {default}",
    )
    add(
        "--channels",
        type=integer(2, 1024),
        default=16,
        metavar="N",
        help=f"channels of the U-Net at full resolution {default}",
    )
    return parse(parser)


def make_unet(options: argparse.Namespace) -> UNet2DModel:
    """The model of these options, with random weights.

    Raises:
        ValueError: for a size that the U-Net cannot halve.
    """
    smallest_step = 2**options.depth
    if options.size % smallest_step:
        raise ValueError(
            f"--size must be a multiple of {smallest_step}, because --depth is {options.depth}, but is {options.size}"
        )
    channels = [options.channels] + [2 * options.channels] * options.depth
    return UNet2DModel(
        sample_size=options.size,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=channels,
        down_block_types=["DownBlock2D"] * len(channels),
        up_block_types=["UpBlock2D"] * len(channels),
        add_attention=False,
        norm_num_groups=math.gcd(options.channels, _MOST_GROUPS),
        num_class_embeds=CLASSES,
    )


def train(options: argparse.Namespace) -> int:
    own = {"--size": str(options.size), "--depth": str(options.depth), "--channels": str(options.channels)}
    identity = make_identity(own, options)
    start = read_start(options, identity, history_columns(SCORES))
    if is_finished(options, start):
        return 0
    torch.manual_seed(options.seed)
    unet = make_unet(options)
    times = labels = torch.zeros(2, dtype=torch.long)
    example = (torch.zeros(2, 1, options.size, options.size), times, labels)
    model = gpipe.to_sequential(unet, *example)
    start = start_training(options, start, model)

    training, test, drawn = read_digits(options, plain=True)
    identity["images"] = str(len(training[0]))
    if start:
        check_identity(identity, start, options.resume)
    check_last_mini_batch(options, len(training[0]))
    print(f"data: {len(training[0])} images to train, {len(test[0])} to test, at {options.size}x{options.size}")

    plan = make_plan(model, options, tuple(tensor[:1] for tensor in example))
    pipe = make_pipe(model, options, plan)
    print_plan("UNet2DModel", model, pipe, plan, options.profile)
    del model  # the pipeline has the layers of this process

    task = DiffusionTask(training, test, options.size, options.batch_size, options.seed, options.ranks)
    return run_and_report(Trainer(pipe, task, options, identity, start, plan.prediction), drawn)


if __name__ == "__main__":
    sys.exit(run_program(train, parse_options()))
