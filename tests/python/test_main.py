"""The command line: python -m gpipe."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe import _C, balance
from gpipe.__main__ import main
from helpers import Fail


def model():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def three():
    return model(), torch.rand(8, 16), "more"


def model_and_batch():
    return model(), torch.rand(8, 16)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.second(self.first(x) * scale)


def product_of_two():
    return Product(), (torch.rand(8, 4), torch.rand(8, 4))


def product_by_name():
    return Product(), {"scale": torch.rand(8, 4), "x": torch.rand(8, 4)}


def failing():
    return nn.Sequential(nn.Linear(16, 16), Fail()), torch.rand(8, 16)


@pytest.fixture
def run(capsys):
    """Runs the command. Returns what it prints."""

    def run(*arguments, code=0):
        assert main(arguments) == code
        return capsys.readouterr().out

    return run


def test_a_schedule_is_printed_read_checked_and_drawn(run, tmp_path):
    printed = run("draw", "1f1b", "--workers", "2", "--chunks", "3", "--text")
    assert printed == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    (tmp_path / "1f1b.txt").write_text(printed)
    assert run("draw", f"@{tmp_path}/1f1b.txt", "--text") == printed
    assert run("draw", "gpipe", "--chunks", "1", "--checkpoint", "always", "--text").startswith("0F0 0R0 0B0")
    for placement in ("v", "0,1,1,0"):
        v = run("draw", "gpipe", "--placement", placement, "--chunks", "1", "--text")
        assert v == "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n"
    flags = ["1f1b", "--workers", "4", "--chunks", "8"]
    assert "makespan 33 s, bubble 27.3%\nworker  peak cells\n     0           4\n" in run("check", *flags)
    step = json.loads(run("check", *flags, "--json"))
    assert step["makespan"] == 33 and step["peak_cells"] == [4, 3, 2, 1] and step["placement"] == [0, 1, 2, 3]
    simulated = _C.Schedule("zb_v", [0, 1, 1, 0], 4, "never").simulate([1, 1, 2, 1, 1]).timeline
    assert run("draw", "zb_v") == simulated.to_html()


@pytest.mark.parametrize("command", ["profile", "export"])
def test_a_file_is_written_whole_or_not_at_all(command, tmp_path, run, capsys):
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        with pytest.raises(SystemExit):
            main([command, "test_main:failing", "--output", str(tmp_path / name)])
    assert capsys.readouterr().err.count("from the layer") == 2
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"
    printed = run(command, "test_main:model_and_batch", "-o", str(tmp_path / "old"))
    assert os.listdir(tmp_path) == ["old"] and ("has 3 layers\n" if command == "export" else "Per micro-batch of 2") in printed
    if command == "profile":
        assert balance.Profile.from_json((tmp_path / "old").read_text()).samples == 2


def test_suggest_prints_a_table_or_json(run):
    flags = ["suggest", "test_main:model", "--input", "8,16", "--seconds", "0"]
    printed = run(*flags, "--chunks", "1,2", "--schedule", "1f1b")
    assert "  one device\n" in printed
    code = r"gpipe\.GPipe\(model, devices=\['.*'\], balance=\[\d, \d\], chunks=[12], checkpoint='never', schedule='1f1b', .*\)"
    lines = printed.splitlines()
    assert re.fullmatch(f"pipe = {code}", lines[-2]) and lines[-1].startswith("# per mini-batch: loss = pipe.step(batch")
    assert len(re.findall(" none ", run(*flags, "--chunks", "2"))) == 5 + 1  # and one device
    flags_of_batch = ["test_main:model_and_batch()", "--chunks", "2", "--seconds", "0"]
    plans = json.loads(run("suggest", *flags_of_batch, "--json"))["plans"]
    assert len({plan["schedule"] for plan in plans}) == 5 and all(sum(plan["balance"]) == 3 for plan in plans)
    assert "nothing fits" in run(*flags, "--memory", "1KB", code=1)


@pytest.mark.parametrize("factory, flags", [
    ("test_main:nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))", ["--input", "8,4"]),
    ("test_main:product_of_two()", []),
    ("test_main:product_by_name", ["--schedule", "gpipe"]),
])  # fmt: skip
def test_the_code_of_a_suggestion_runs(run, factory, flags):
    made = json.loads(run("suggest", factory, *flags, "--chunks", "2", "--seconds", "0", "--json"))
    names = {}
    exec(made["code"], names)
    assert names["pipe"].balance == made["plans"][0]["balance"] and names["pipe"].chunks == 2
    assert names["pipe"].step(names["batch"], torch.zeros(8), lambda output, target: output.mean()).isfinite()


def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("gpipe._C.schedule_rules", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["draw", "gpipe"])
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_output_that_cannot_be_written():
    reader, closed = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for output, code, line in ((closed, 0, ""), (full, 2, "error: .*No space left.*\n")):
            command = [sys.executable, "-m", "gpipe", "draw", "gpipe"]
            ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
            assert ended.returncode == code and re.fullmatch(line, ended.stderr)
    os.close(closed)


REFUSED = [
    ("verify gpipe", "invalid choice: 'verify'"),
    ("check @deadlock.txt", "the schedule deadlocks"),
    ("draw @right.txt --chunks 3", "--chunks does not apply to a schedule from a file"),
    ("draw gpipe --placement 0,1 --stages 3", "the placement [0, 1] is not of 3 stages on 2 workers; leave one of them out"),
    ("draw gpipe --chunk 8", "unrecognized arguments: --chunk 8"),
    ("draw gpipe --chunks 0", "--chunks: '0' is not a whole number from 1 to"),
    ("check zb_h1 --backward=-1", "--backward: '-1' is not a number from 0"),
    ("profile test_main:model_and_batch --seconds 0 --output /dev/full", "No space left on device"),
    ("profile test_main:model_and_batch --seconds 0 --output nowhere/profile", "No such file or directory: 'nowhere/profile."),
    ("suggest", "the following arguments are required: MODULE:FUNCTION"),
    ("suggest test_main", "is not of the form MODULE:FUNCTION"),
    ("suggest test_main:unknown", "cannot load 'test_main:unknown': NameError: name 'unknown' is not defined"),
    ("suggest test_main:model", "returns no mini-batch; give its shape with --input"),
    ("suggest test_main:three", "must be a function that returns a module, or a tuple (module, mini-batch)"),
]


@pytest.mark.parametrize("command, message", REFUSED)
def test_wrong_commands_are_refused_in_one_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("right.txt").write_text("0F0 0B0\n1F0 1B0\n")
    Path("deadlock.txt").write_text("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n")
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1 and message in line
