"""Output files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors within become an OSError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write: {reason}", str(path)) from error


def check_writable_directory(directory: Path) -> None:
    """Makes it where missing, and tries that files can be written there."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".write-probe"
        probe.touch()
        probe.unlink()


def check_writable_file(path: Path) -> None:
    """Tries that it can be written, and makes its directory where missing. A file that is there stays as it is."""
    with writing(path):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()
