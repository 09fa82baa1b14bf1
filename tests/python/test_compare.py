"""The three programs of docs/compare train alike and continue from their checkpoints."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from helpers import run_on_two_ranks

FOLDER = Path(__file__).parents[2] / "docs/compare"
PROGRAMS = ["plain.py", "with_gpipe.py", "with_distributed.py"]
FLAGS = ["--samples", "48", "--size", "64", "--batch-size", "16"]


def output_of(name, folder, epochs, monkeypatch, capsys):
    flags = ["--epochs", str(epochs), *FLAGS]
    if name == "with_distributed.py":
        return run_on_two_ranks((FOLDER / name).read_text(), folder, *flags)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    return capsys.readouterr().out


def test_the_three_programs_train_alike(tmp_path, one_thread, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    losses = {}
    for name in PROGRAMS:
        folder = tmp_path / name
        folder.mkdir()
        # The second run continues from the checkpoint of the first.
        printed = [output_of(name, folder, epochs, monkeypatch, capsys) for epochs in (1, 2)]
        found = [re.findall(r"^epoch (\d): loss (\d\.\d+), accuracy \d\.\d+$", text, re.MULTILINE) for text in printed]
        assert [[epoch for epoch, _ in epochs] for epochs in found] == [["1"], ["2"]]
        losses[name] = [float(loss) for epochs in found for _, loss in epochs]
    assert losses["with_gpipe.py"] == pytest.approx(losses["with_distributed.py"], rel=0.005)
    # The plain program normalizes whole mini-batches.
    assert losses["with_gpipe.py"] == pytest.approx(losses["plain.py"], rel=0.2)
    assert losses["with_gpipe.py"][1] < losses["with_gpipe.py"][0]
