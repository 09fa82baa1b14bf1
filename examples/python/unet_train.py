"""Trains a U-Net on files in the layout of the Carvana data set, as a pipeline: examples/unet/train.cpp in Python.

    python unet_train.py --data DIR --stages 2 --epochs 20

It has the flags and the output files of the C++ program, and reads its snapshots. unet_predict and unet_evaluate use the
models that it trains. See docs/segmentation.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import gpipe
from common.options import (
    add_training_options,
    image_size_text,
    integer,
    make_parser,
    parse,
    real,
    run_program,
    to_flag,
)
from common.plan import check_last_mini_batch, make_pipe, make_plan, print_plan
from common.processes import run_first
from common.start import check_identity, is_finished, make_identity, read_start, start_training
from common.task import history_columns
from common.trainer import Trainer, run_and_report
from unet.carvana import image_size, list_samples, scaled, split
from unet.classes import MAX_CLASSES
from unet.segmentation import output_channels
from unet.synthetic import check_scene, write_synthetic
from unet.task import Loading, SegmentationTask, segmentation_scores


def parse_options() -> argparse.Namespace:
    parser = make_parser("Trains a U-Net to segment images, as a pipeline over several devices.")
    add_training_options(parser, output=Path("out/unet"), epochs=24, batch_size=8, learning_rate=5e-3)
    add = parser.add_argument_group("data and model").add_argument
    default = "(default: %(default)s)"
    add(
        "--data",
        default="synthetic",
        metavar="DIR",
        help="folder with imgs/NAME.jpg|png and masks/NAME_mask.gif|png, or 'synthetic', which draws such files "
        f"{default}",
    )
    add("--samples", type=integer(2, 9999), default=400, metavar="N", help=f"number of images that 'synthetic' draws {default}")
    add("--size", type=image_size_text, default=(192, 128), metavar="WxH", help="size of the images that 'synthetic' draws, in pixels (default: 192x128)")
    add(
        "-s",
        "--scale",
        type=real(0.001, 1),
        default=0.5,
        metavar="X",
        help=f"size of the training images, relative to the files {default}",
    )
    add(
        "-v",
        "--validation",
        type=real(0.01, 99),
        default=10.0,
        metavar="X",
        help=f"percentage of the images that is kept for validation {default}",
    )
    add("--augment", action="store_true", help="mirror, shift and recolour the training images at random")
    add(
        "--workers",
        type=integer(0, 256),
        default=2,
        metavar="N",
        help=f"number of processes that decode images in advance; 0: decode between steps {default}",
    )
    add(
        "-c",
        "--classes",
        type=integer(2, MAX_CLASSES),
        default=2,
        metavar="N",
        help=f"number of classes, with the background; masks of more than two are coloured {default}",
    )
    add("--depth", type=integer(1, 16), default=3, metavar="N", help=f"how often the U-Net halves the resolution {default}")
    add("--channels", type=integer(1, 4096), default=8, metavar="N", help=f"channels of the U-Net at full resolution {default}")
    add("--bilinear", action="store_true", help="upsample by interpolation instead of transposed convolutions")
    return parse(parser)


def train(options: argparse.Namespace) -> int:
    if options.data == "synthetic":
        check_scene(options.size, options.classes)
    own = {
        "--classes": str(options.classes),
        "--depth": str(options.depth),
        "--channels": str(options.channels),
        "--bilinear": str(int(options.bilinear)),
        "--validation": to_flag(options.validation),
        "--scale": to_flag(options.scale),
        "--augment": str(int(options.augment)),
    }
    identity = make_identity(own, options)
    start = read_start(options, identity, history_columns(segmentation_scores(options.classes)))
    if is_finished(options, start):
        return 0
    torch.manual_seed(options.seed)
    model = gpipe.models.unet(
        out_channels=output_channels(options.classes),
        depth=options.depth,
        base_channels=options.channels,
        upsampling="linear" if options.bilinear else "transposed",
    )
    start = start_training(options, start, model)

    drawn = None
    if options.data == "synthetic":
        width, height = options.size
        drawn = options.output / f"synthetic_{options.samples}_{width}x{height}_{options.classes}"
        arguments = (drawn, options.samples, options.size, options.seed, options.classes)
        run_first(options.ranks, lambda: write_synthetic(*arguments))
    samples = list_samples(drawn or Path(options.data))
    training, validation = split(samples, options.validation, options.seed)
    width, height = scaled(image_size(training[0].image), options.scale)
    identity["images"] = str(len(training))
    if start:
        check_identity(identity, start, options.resume)
    check_last_mini_batch(options, len(training))
    print(
        f"data: {len(training)} images to train, {len(validation)} to validate, at {width}x{height}, "
        f"{options.classes} classes"
    )

    plan = make_plan(model, options, torch.full((1, 3, height, width), 0.5))
    pipe = make_pipe(model, options, plan)
    print_plan("U-Net", model, pipe, plan, options.profile)
    del model  # the pipeline has the layers of this process

    loading = Loading(
        (width, height), options.batch_size, options.workers, options.classes, options.augment, options.seed
    )
    task = SegmentationTask(training, validation, loading, options.ranks)
    return run_and_report(Trainer(pipe, task, options, identity, start, plan.prediction), drawn)


if __name__ == "__main__":
    sys.exit(run_program(train, parse_options()))
