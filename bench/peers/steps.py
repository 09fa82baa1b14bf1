"""Shared parts of the programs that time a peer: flags, plain loop and output."""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import models

WARM_UP = 2  # steps


def flags(description: str | None, checkpoints: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--balance", type=numbers, required=True, help="layers per stage, e.g. 8,8")
    parser.add_argument("--chunks", type=int, required=True, help="micro-batches per mini-batch")
    parser.add_argument("--checkpoint", choices=checkpoints, default="never")
    parser.add_argument("--repeats", type=int, default=9, help="number of steps to time")
    return parser


def report(args: argparse.Namespace, peer: str, **figures: object) -> None:
    row = {"model": args.model, "stages": len(args.balance), "chunks": args.chunks}
    print(json.dumps({"peer": peer, **row, "checkpoint": args.checkpoint, **figures}))


def clear_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def plain_step(model: nn.Module, x: Tensor, chunks: int, recompute: bool) -> None:
    """Computes what a pipeline's step does, in a loop over the micro-batches."""
    clear_gradients(model)
    for part in x.tensor_split(chunks):
        if recompute:
            with torch.no_grad():
                model(part)
        model(part).sum().backward()


def span(function: Callable[[], object]) -> tuple[float, float]:
    """Returns the start and end of a call, on a clock that is comparable between processes."""
    start = time.monotonic()
    function()
    return start, time.monotonic()


def seconds(function: Callable[[], object]) -> float:
    start, end = span(function)
    return end - start


def us_per_cell(args: argparse.Namespace, seconds: list[float], plain: list[float]) -> list[float]:
    """Returns the overhead per cell of each repeat, in microseconds."""
    cells = args.chunks * len(args.balance)
    return [(step - loop) / cells * 1e6 for step, loop in zip(seconds, plain, strict=True)]
