"""What a training begins from."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torch import nn

from common.options import to_flag
from gpipe import snapshot
from gpipe.snapshot import Snapshot


def make_identity(own: dict[str, str], options: Namespace) -> dict[str, str]:
    """What a run is, by flag: the program's own, and the options that change the course of any training. A snapshot
    keeps it: a run with others would not go on but begin something else."""
    return own | {
        "--batch-size": str(options.batch_size),
        "--seed": str(options.seed),
        "--schedule": options.schedule,
        "--epochs": str(options.epochs),
        "--learning-rate": to_flag(options.learning_rate),
        "--clip": to_flag(options.clip),
        "--amp": str(int(options.amp)),
    }


def check_identity(identity: dict[str, str], saved: Snapshot, path: Path) -> None:
    """That a snapshot is of such a run, of as many epochs or others."""
    course = {flag: value for flag, value in identity.items() if flag != "--epochs"}
    for flag in course:
        if flag not in saved.options:
            raise ValueError(f"{path} is not of this program: it does not say {flag}")
    for flag, value in course.items():
        if saved.options[flag] != value:
            raise ValueError(
                f"{path} was made with {flag} {saved.options[flag]}, not {value}; give the same, or start afresh"
            )


def read_start(options: Namespace, identity: dict[str, str], model: nn.Module) -> Snapshot | None:
    """Gives the model the weights of the snapshot to resume or to load, if there is one. Returns the one to resume.

    Raises:
        OSError, ValueError: for a snapshot that is missing, damaged, not of such a run or not of such a model, or that
            has no epochs left to train.
    """
    if not options.resume:
        if options.load:
            snapshot.restore_model(model, snapshot.read(options.load).model)
        return None
    saved = snapshot.read(options.resume)
    check_identity(identity, saved, options.resume)
    if saved.epoch >= options.epochs:
        raise ValueError(
            f"{options.resume} has {saved.epoch} epochs already, and --epochs is {options.epochs}: nothing is left to "
            "train; give more --epochs"
        )
    snapshot.restore_model(model, saved.model)
    return saved
