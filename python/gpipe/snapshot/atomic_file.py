"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A new file that takes the path's place once it is on the disk, if nothing was raised."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "ab") as file:  # which does not empty it: it may be another writer's
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
        raise BlockingIOError(error.errno, "cannot write: another writer is writing it", path) from None
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", path) from error


def _lock(file: BinaryIO, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some file systems have no locks
        return
    # A writer that was just finishing may have renamed it.
    if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))


def _flush_folder(folder: str) -> None:
    """A rename is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)
