"""Trains a ResNet-18 on MNIST's files, as a pipeline: examples/resnet18_mnist in Python.

    python resnet18_mnist.py --data DIR --stages 2 --epochs 5

It has the flags and the output files of the C++ program, and reads its snapshots.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import gpipe
from common.options import add_training_options, make_parser, parse, run_program
from common.plan import check_last_mini_batch, make_pipe, make_plan, print_plan
from common.start import check_identity, is_finished, make_identity, read_start, start_training
from common.task import history_columns
from common.trainer import Trainer, run_and_report
from mnist.data import CLASSES, add_data_options, read_digits
from mnist.task import SCORES, ClassificationTask


def parse_options() -> argparse.Namespace:
    parser = make_parser("Trains a ResNet-18 to read digits, as a pipeline over several devices.")
    add_training_options(
        parser, output=Path("out/resnet18_mnist"), epochs=5, batch_size=64, chunks=4, learning_rate=2e-3
    )
    add = parser.add_argument_group("data and model").add_argument
    add_data_options(add)
    add(
        "--small-images",
        action="store_true",
        help="begin with a 3x3 convolution and without pooling: more accurate, 15 times the work",
    )
    return parse(parser)


def train(options: argparse.Namespace) -> int:
    identity = make_identity({"--small-images": str(int(options.small_images))}, options)
    start = read_start(options, identity, history_columns(SCORES))
    if is_finished(options, start):
        return 0
    torch.manual_seed(options.seed)
    model = gpipe.models.resnet18(CLASSES, in_channels=1, small_images=options.small_images)
    start = start_training(options, start, model)

    training, test, drawn = read_digits(options)
    height, width = training[0].shape[2:]
    identity["images"] = str(len(training[0]))
    if start:
        check_identity(identity, start, options.resume)
    check_last_mini_batch(options, len(training[0]))
    print(f"data: {len(training[0])} images to train, {len(test[0])} to test, {width}x{height}")

    plan = make_plan(model, options, torch.full((1, 1, height, width), 0.5))
    pipe = make_pipe(model, options, plan)
    print_plan("ResNet-18", model, pipe, plan, options.profile)
    del model  # the pipeline has the layers of this process

    task = ClassificationTask(training, test, CLASSES, options.batch_size, options.seed, options.ranks)
    return run_and_report(Trainer(pipe, task, options, identity, start, plan.prediction), drawn)


if __name__ == "__main__":
    sys.exit(run_program(train, parse_options()))
