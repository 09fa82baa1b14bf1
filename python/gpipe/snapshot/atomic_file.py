"""Atomic replacement of files."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Opens a temporary file. At the end of the block, flushes it to the disk and renames it to ``path``. If the block
    raises, removes it and leaves ``path`` unchanged.

    Raises:
        BlockingIOError: if another writer is writing the same path.
        OSError: with the path and the reason.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "ab") as file:  # append mode does not truncate: another writer may own it
            _lock(file, temporary)
            try:
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        _flush_folder(os.path.dirname(path) or ".")
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "cannot write: another writer is writing this file", path) from None
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", path) from error


def _lock(file: BinaryIO, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # the file system has no locks
        return
    # Another writer may have renamed the file after we opened it.
    if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))


def _flush_folder(folder: str) -> None:
    """Flushes a folder, so that renames in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot flush folders
            raise
    finally:
        os.close(descriptor)
