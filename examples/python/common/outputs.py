"""What a training writes into its output directory."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from common.files import check_writable_directory, check_writable_file
from common.history import has_lines

HISTORY = "history.csv"
LATEST = "latest.snapshot"
BEST = "best.snapshot"


def check_outputs(options: Namespace) -> None:
    """Tries all that a run will write, so that nothing fails for it after hours.

    Raises:
        OSError: for what cannot be written.
        ValueError: for an earlier training that the run neither goes on with nor may overwrite.
    """
    names = _earlier_training(options.output)
    if names and not options.overwrite and not _goes_on(options):
        resume = "" if names[0] == HISTORY else f"--resume {options.output / names[0]} to go on with it, "
        raise ValueError(
            f"{options.output} holds an earlier training ({', '.join(names)}); give {resume}--overwrite to replace it, "
            "or another --output"
        )
    check_writable_directory(options.output)
    if options.trace:
        check_writable_file(options.trace)


def remove_earlier_training(options: Namespace) -> None:
    """Its snapshots and its history, unless the run goes on with it."""
    if _goes_on(options):
        return
    for name in (LATEST, BEST, HISTORY):
        (options.output / name).unlink(missing_ok=True)


def _goes_on(options: Namespace) -> bool:
    """Whether the snapshot to resume is in the output directory."""
    return options.resume is not None and options.resume.parent.resolve() == options.output.resolve()


def _earlier_training(directory: Path) -> list[str]:
    names = [name for name in (LATEST, BEST) if (directory / name).exists()]
    return names + [HISTORY] * has_lines(directory / HISTORY)
