"""The snapshot that a training starts from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from common.options import to_flag
from common.outputs import check_outputs, latest_snapshot
from common.plan import check_pipeline
from common.processes import is_first
from gpipe import snapshot
from gpipe.snapshot import Snapshot


def make_identity(own: dict[str, str], options: Namespace) -> dict[str, str]:
    """The flags, with their values, that decide the result of a training: the program's own, and those of every
    training. A snapshot stores them: a run with other values cannot continue it."""
    return own | {
        "--batch-size": str(options.batch_size),
        "--seed": str(options.seed),
        "--learning-rate-schedule": options.learning_rate_schedule,
        "--epochs": str(options.epochs),
        "--learning-rate": to_flag(options.learning_rate),
        "--clip": to_flag(options.clip),
        "--amp": str(int(options.amp)),
    }


def check_identity(identity: dict[str, str], saved: Snapshot, path: Path) -> None:
    """Checks that a snapshot is of this training, of any number of epochs.

    Raises:
        ValueError: for the first flag that is missing or differs.
    """
    flags = sorted(flag for flag in identity if flag != "--epochs")
    for flag in flags:
        if flag not in saved.options:
            raise _refusal(path, f"it does not store {flag}")
    for flag in flags:
        if saved.options[flag] != identity[flag]:
            raise ValueError(
                f"{path} was made with {flag} {saved.options[flag]}, not {identity[flag]}; give the same value, or "
                "train without --resume"
            )


def read_start(options: Namespace, identity: dict[str, str], columns: Sequence[str]) -> Snapshot | None:
    """Reads the snapshot of --resume, or otherwise of --load; None if neither is given. Needs no model and no data, so
    that a wrong file is found before anything slow. --resume auto becomes the path of the output folder's snapshot, or None: the
    first process looks, tells the others, and prints it.

    Args:
        columns: those of history.csv.

    Raises:
        OSError, ValueError: for a file that is missing, damaged or not a snapshot; of --resume also for a snapshot of
            another training, without a position in its epoch, or with no epochs left to train, unless --resume was auto.
    """
    options.auto_resume = options.resume == Path("auto")
    if options.auto_resume:
        options.resume = _find_snapshot(options)
    if not options.resume:
        return snapshot.read(options.load) if options.load else None
    saved = _read_resumed(options)
    check_identity(identity, saved, options.resume)
    _check_progress(saved, columns, options.resume)
    if saved.epoch >= options.epochs and not options.auto_resume:
        raise ValueError(
            f"{options.resume} has {saved.epoch} epochs already, and --epochs is {options.epochs}: nothing is left to "
            "train; give more --epochs"
        )
    return saved


def is_finished(options: Namespace, start: Snapshot | None) -> bool:
    """Whether --resume auto has found a training with no epochs left to train. Prints it."""
    if not options.resume or not start or start.epoch < options.epochs:
        return False
    print(f"nothing is left to train: {options.resume} has {start.epoch} epochs, and --epochs is {options.epochs}")
    return True


def restore_start(options: Namespace, saved: Snapshot, model: nn.Module) -> None:
    """Gives the model the snapshot's weights. With --resume it also checks the state of the optimizer and of the random
    number generator.

    Raises:
        ValueError: for a snapshot of another model.
    """
    snapshot.restore_model(model, saved.model)
    if not options.resume:
        return
    snapshot.restore_optimizer(torch.optim.Adam(model.parameters()), model, saved.optimizer)
    if saved.random is None:
        raise _refusal(options.resume, "it does not store the random number generator")
    torch.set_rng_state(saved.random)


def _find_snapshot(options: Namespace) -> Path | None:
    """All processes must start alike, so the first one decides."""
    found = latest_snapshot(options.output) if is_first(options.ranks) else None
    name = str(found or "")
    if options.ranks:
        name = options.ranks.share(name)
    print(f"resume: {name or f'{options.output} has no snapshot, so a new training begins'}", flush=True)
    return Path(name) if name else None


def _read_resumed(options: Namespace) -> Snapshot:
    """A damaged snapshot is not skipped, because the training could go back by many epochs unnoticed."""
    try:
        return snapshot.read(options.resume)
    except ValueError as error:
        if not options.auto_resume:
            raise
        raise ValueError(
            f"{error}; --resume auto does not skip it: move it away to continue from another one or to begin again"
        ) from error


def _check_progress(saved: Snapshot, columns: Sequence[str], path: Path) -> None:
    """Without the history and the position in the epoch, a training cannot continue."""
    for column in columns:
        if len(saved.history.get(column, [])) != saved.epoch or column not in saved.history:
            raise _refusal(path, f"its history does not have {saved.epoch} epochs of {column}")
    if len(saved.history.get("loss_sum", [])) != 1 or not {"batch", "images"} <= saved.position.keys():
        raise _refusal(path, "it does not store its position in the epoch")


def _refusal(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a snapshot of this program: {why}")


def start_training(options: Namespace, start: Snapshot | None, model: nn.Sequential) -> Snapshot | None:
    """Checks the flags of the cut, puts the state of the snapshot that read_start() has read into the model, and checks
    the output files. Returns the snapshot if the training continues it.

    Raises:
        OSError, ValueError: as check_pipeline(), restore_start() and check_outputs().
    """
    check_pipeline(model, options)
    if start:
        restore_start(options, start, model)
    check_outputs(options)
    return start if options.resume else None
