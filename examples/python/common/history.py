"""The CSV file of a training."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.files import writing


class History:
    """A CSV file with a header and one line per epoch. Each line is on disk as soon as it is added.

    Args:
        lines: the first lines. They are written to a temporary file first, so an older file stays until the new one is
            complete.
    """

    def __init__(self, path: Path, columns: Sequence[str], lines: Iterable[Sequence[float]] = ()) -> None:
        self._path = path
        temporary = temporary_history(path)
        with writing(path):
            self._file = temporary.open("w", newline="")
            try:
                self._writer = csv.writer(self._file, lineterminator="\n")
                self._writer.writerow(columns)
                for line in lines:
                    self._writer.writerow(map(_to_cell, line))
                self._file.flush()
                temporary.replace(path)
            except BaseException:
                self._file.close()
                temporary.unlink(missing_ok=True)
                raise

    def add(self, values: Sequence[float]) -> None:
        with writing(self._path):
            self._writer.writerow(map(_to_cell, values))
            self._file.flush()


def temporary_history(path: Path) -> Path:
    """The file that a History writes before it replaces `path`."""
    return path.with_name(f"{path.name}.tmp")


def count_lines(path: Path) -> int:
    """Returns the number of lines after the header; 0 if there is no such file."""
    if not path.exists():
        return 0
    with path.open() as file:
        return max(len(list(file)) - 1, 0)


def _to_cell(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() and abs(value) < 2**53 else f"{value:g}"
