"""The files that a training writes into its output folder."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

from common.files import check_writable_directory, check_writable_file
from common.history import count_lines, temporary_history

HISTORY = "history.csv"
LATEST = "latest.snapshot"
BEST = "best.snapshot"
EVENT_SUFFIX = ".gpipe"  # of event files that the training programs write

_PICTURE = re.compile(r"(epoch|confusion)_\d{3,}\.png")  # of an epoch, such as epoch_001.png


def latest_snapshot(folder: Path) -> Path | None:
    """The snapshot in the folder from which a training can continue."""
    # A run that is killed at the end of its first epoch can leave best.snapshot alone.
    return next((folder / name for name in _snapshots(folder)), None)


def check_outputs(options: Namespace) -> None:
    """Checks that the output files can be written, so that a run does not fail for that after hours.

    Raises:
        OSError: for a path that cannot be written.
        ValueError: for an earlier training in the output folder, unless the run resumes or overwrites it. With --resume auto,
            a history of one epoch without a snapshot is not an earlier training: a run that is killed at the end of its
            first epoch leaves it.
    """
    names = _earlier_training(options)
    if names and not options.overwrite and not _resumes_in_place(options):
        resume = "" if names[0] == HISTORY else f"--resume {options.output / names[0]} to continue it, "
        raise ValueError(
            f"{options.output} holds an earlier training ({', '.join(names)}); give {resume}--overwrite to replace it, "
            "or another --output"
        )
    check_writable_directory(options.output)
    if options.trace:
        check_writable_file(options.trace)


def event_files(folder: Path) -> list[Path]:
    """The files that training programs have written for TensorBoard."""
    return list(folder.glob(f"events.out.tfevents.*{EVENT_SUFFIX}"))


def remove_earlier_training(options: Namespace) -> None:
    """With --overwrite, removes what an earlier training wrote: snapshots, history, event files and pictures. Other
    files and drawn data stay. Does nothing if the run resumes the earlier training."""
    if not options.overwrite or _resumes_in_place(options):
        return
    for path in list(options.output.iterdir()):
        if _is_output(path.name) and not path.is_dir():
            path.unlink()


def _is_output(name: str) -> bool:
    return (
        name in (LATEST, BEST, HISTORY, temporary_history(Path(HISTORY)).name)
        or (name.startswith("events.out.tfevents.") and name.endswith(EVENT_SUFFIX))
        or _PICTURE.fullmatch(name) is not None
    )


def _resumes_in_place(options: Namespace) -> bool:
    """Whether the snapshot to resume is in the output folder."""
    return options.resume is not None and options.resume.parent.resolve() == options.output.resolve()


def _snapshots(folder: Path) -> list[str]:
    return [name for name in (LATEST, BEST) if (folder / name).exists()]


def _earlier_training(options: Namespace) -> list[str]:
    lost = 1 if options.auto_resume else 0  # epochs that a killed run can leave without a snapshot
    return _snapshots(options.output) + [HISTORY] * (count_lines(options.output / HISTORY) > lost)
