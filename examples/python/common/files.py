"""Output files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_created: list[Path] = []  # the topmost folders that make_directory() created


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns any OSError into one that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write: {reason}", str(path)) from error


def make_directory(path: Path) -> None:
    """Creates the folder and its parents if they are missing."""
    absolute = path.absolute()
    missing = [folder for folder in (absolute, *absolute.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    finally:
        if missing and missing[-1].is_dir():
            _created.append(missing[-1])


def remove_empty_directories() -> None:
    """Removes the folders that make_directory() created in this process and that hold no file. For a program that
    fails."""
    for folder in _created:
        if folder.is_dir() and not any(files for _, _, files in os.walk(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    _created.clear()


def check_writable_directory(directory: Path) -> None:
    """Creates the folder if it is missing, and checks that files can be written there."""
    with writing(directory):
        make_directory(directory)
        probe = directory / ".write-probe"
        probe.touch()
        probe.unlink()


def check_writable_file(path: Path) -> None:
    """Checks that the file can be written, and creates its folder if it is missing. An existing file is left as it is."""
    with writing(path):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        make_directory(path.parent)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()
