"""What the tests of the training programs share. Skips them where Pillow or TensorBoard is missing."""

import csv
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("tensorboard")
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
sys.path.insert(0, str(EXAMPLES))

from common.options import run_program  # noqa: E402
from unet.synthetic import write_synthetic  # noqa: E402

UNET = ["--batch-size", "4", "--depth", "1", "--channels", "4", "--scale", "0.25", "--workers", "0"]
UNET_CUT = [*UNET, "--balance", "5,18"]


def run(program, *flags):
    """Runs a program in this process and returns its exit code."""
    arguments = sys.argv
    sys.argv = [program.__name__, *map(str, flags)]
    try:
        return run_program(program.train, program.parse_options())
    finally:
        sys.argv = arguments


def history(folder):
    with open(folder / "history.csv", newline="") as file:
        header, *rows = csv.reader(file)
    return header, [[float(cell) for cell in row[:-1]] for row in rows]  # without images/s


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Drawn files in the layout of the Carvana data set."""
    folder = tmp_path_factory.mktemp("data")
    write_synthetic(folder, 12, (96, 64), 0, 2)
    return folder
