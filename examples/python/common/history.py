"""The CSV file of a training."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path


class History:
    """A CSV file with a header and a line an epoch, each on the disk as soon as it is added."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._write(columns)

    def add(self, values: Sequence[float]) -> None:
        self._write([f"{value:.0f}" if value.is_integer() and abs(value) < 2**53 else f"{value:g}" for value in values])

    def _write(self, cells: Sequence[str]) -> None:
        self._writer.writerow(cells)
        self._file.flush()
