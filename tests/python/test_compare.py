"""The three programs of docs/compare train alike and continue from their checkpoints."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

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


def shapes(state):
    return tree_map(lambda value: getattr(value, "shape", value), dict(state))


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
    plain, ours, *parts = (torch.load(path) for name in PROGRAMS for path in sorted((tmp_path / name).glob("*.pt")))
    assert shapes(ours["model"]) == shapes(plain["model"]) == shapes(parts[0]["model"] | parts[1]["model"])
    assert shapes(ours["optimizer"]["state"]) == shapes(plain["optimizer"]["state"])
    # The plain program normalizes whole mini-batches.
    assert losses["with_gpipe.py"] == pytest.approx(losses["plain.py"], rel=0.2)
    assert losses["with_gpipe.py"][1] < losses["with_gpipe.py"][0]


def test_the_page_counts_the_lines():
    page = (FOLDER.parent / "compare.md").read_text()
    texts = [(FOLDER / name).read_text() for name in PROGRAMS]
    ours, theirs = (
        subprocess.run(["diff", "plain.py", name], cwd=FOLDER, capture_output=True, text=True).stdout
        for name in PROGRAMS[1:]
    )
    rows = {"lines": [text.count("\n") for text in texts]}
    rows["lines of plain.py removed"] = ["", *(len(re.findall("^<", diff, re.MULTILINE)) for diff in (ours, theirs))]
    rows["lines added"] = ["", *(len(re.findall("^>", diff, re.MULTILINE)) for diff in (ours, theirs))]
    for name, values in rows.items():
        assert re.sub(" +", " ", f"| {name} | {' | '.join(map(str, values))} |") in page
    assert f"```diff\n{ours}```" in page
    assert max(rows["lines"]) <= 100
