"""The CSV file of a training."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.files import writing


class History:
    """A CSV file with a header and a line an epoch, each on the disk as soon as it is added.

    Args:
        lines: what it begins with. An older file is there until the new one is complete.
    """

    def __init__(self, path: Path, columns: Sequence[str], lines: Iterable[Sequence[float]] = ()) -> None:
        self._path = path
        temporary = path.with_name(f"{path.name}.tmp")
        with writing(path):
            self._file = temporary.open("w", newline="")
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(columns)
            for line in lines:
                self._writer.writerow(map(_to_cell, line))
            self._file.flush()
            temporary.replace(path)

    def add(self, values: Sequence[float]) -> None:
        with writing(self._path):
            self._writer.writerow(map(_to_cell, values))
            self._file.flush()


def has_lines(path: Path) -> bool:
    """Whether there is such a file that has a line besides its header."""
    if not path.exists():
        return False
    with path.open() as file:
        return len(list(file)) > 1


def _to_cell(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() and abs(value) < 2**53 else f"{value:g}"
