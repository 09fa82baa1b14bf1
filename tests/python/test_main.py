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

from gpipe import balance, commands
from gpipe.__main__ import main
from helpers import cluster_text


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


@pytest.fixture
def run(capsys):
    """Runs the command. Returns what it prints."""

    def run(*arguments, code=0):
        assert main(arguments) == code
        return capsys.readouterr().out

    return run


def test_a_schedule_is_printed_and_read(run, tmp_path):
    printed = run("print", "1f1b", "--workers", "2", "--chunks", "3")
    assert printed == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    (tmp_path / "1f1b.txt").write_text(printed)
    assert run("print", f"@{tmp_path}/1f1b.txt") == printed
    made = json.loads(run("print", "1f1b", "--chunks", "1", "--json"))
    assert made["actions"] == [["0F0", "0B0"], ["1F0", "1B0"]] and made["placement"] == [0, 1] and made["stages"] == 2
    assert run("print", "gpipe", "--chunks", "1", "--checkpoint", "always").startswith("0F0 0R0 0B0")
    v = "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n"
    assert run("print", "gpipe", "--placement", "v", "--chunks", "1") == v
    assert run("print", "gpipe", "--placement", "0,1,1,0", "--chunks", "1") == v
    assert run("print", "zb_v", "--chunks", "1") == "0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2I0 2W0 1I0 1W0\n"


def test_a_schedule_is_checked_and_drawn(run):
    printed = run("check", "interleaved_1f1b", "--stages", "4", "--chunks", "8")
    assert printed.startswith("The schedule runs: 2 workers, 4 stages, 8 micro-batches.\nmakespan ")
    flags = ["1f1b", "--workers", "4", "--chunks", "8", "--graph-bytes", "100"]
    assert "makespan 33 s, bubble 27.3%\nworker  peak cells  peak bytes\n     0           4         400\n" in run("check", *flags)
    step = json.loads(run("check", *flags, "--json"))
    assert step["makespan"] == 33 and step["peak_bytes"] == [400, 300, 200, 100]
    assert "makespan 6 s" in run("check", "zb_h1", "--workers", "1", "--chunks", "2")
    costs = ["--input-gradient", "3", "--weight-gradient", "0.5"]
    assert "makespan 9 s" in run("check", "zb_h1", "--workers", "1", "--chunks", "2", *costs)
    drawn = run("draw", "zb_v")
    assert ">weight gradient<" in drawn and drawn.rstrip().endswith("</svg>")


def test_a_profile_is_measured_and_cut(run, tmp_path):
    file = str(tmp_path / "profile.json")
    flags = ["test_main:model_and_batch", "--chunks", "2", "--seconds", "0"]
    assert "Per micro-batch of 4 samples" in run("profile", *flags, "--output", file)
    assert json.loads(run("profile", *flags, "--json"))["samples"] == 4
    measured = balance.Profile.from_json(open(file).read())
    printed = run("cut", "--profile", file, "--by", "size", "--chunks", "2")
    layers = measured.balance_by_size(2, 2, "except_last")
    assert printed.startswith(f"balance {layers[0]},{layers[1]}; 2 chunks, checkpoint except_last:\n")
    assert printed.endswith(str(balance.predict(measured, layers, 2)))
    assert "<- cut here" in run("cut", "--profile", file, "--layers")
    assert "; 8 chunks" in run("cut", "test_main:model_and_batch", "--chunks", "9", "--seconds", "0")
    assert json.loads(run("cut", "--profile", file, "--devices", "cpu", "--json"))["placement"] == [0]


def test_sweep_predicts_balances_near_the_best(run):
    flags = ["test_main:model_and_batch", "--seconds", "0"]
    assert run("sweep", *flags, "--chunks", "8,9", "--near", "0").count("%") == 3  # 9 chunks of 8 samples are 8
    found = json.loads(run("sweep", *flags, "--chunks", "2", "--schedule", "gpipe,1f1b,forward", "--json"))
    assert {each["schedule"] for each in found} == {"gpipe", "1f1b", ""} and len(found) == 3 * 3 * 2
    assert [each["seconds"] for each in found] == sorted(each["seconds"] for each in found)
    assert {"zb_h1", "greedy"} <= {each["schedule"] for each in json.loads(run("sweep", *flags, "--schedule", "auto", "--json"))}


def test_suggest_prints_a_table_or_json(run, tmp_path):
    flags = ["suggest", "test_main:model", "--input", "8,16", "--seconds", "0"]
    printed = run(*flags, "--chunks", "1,2", "--schedule", "forward", "--refine", "2", "--layers")
    assert "Per micro-batch of" in printed and "<- cut here" in printed
    lines = printed.splitlines()
    code = r"gpipe\.GPipe\(model, \[\d, \d\], devices=\['.*'\], chunks=[12], checkpoint='\w+'\)"
    assert re.fullmatch(f"pipe = {code}", lines[-2]) and lines[-1] == "# per mini-batch: output = pipe(batch)"
    assert len([line for line in lines if re.fullmatch(rf"measured [\d.e-]+ s per step: {code}", line)]) == 2
    assert "  one device\n" in printed
    assert run(*flags, "--chunks", "2", "--schedule", "1f1b").splitlines()[-2].endswith(", schedule='1f1b')")
    printed = run(*flags, "--chunks", "2", "--rows", "99")
    assert all(re.search(rf"^{name} ", printed, re.MULTILINE) for name in ("gpipe", "1f1b", "zb_h1", "greedy"))
    rows = re.findall(" (?:never|except_last|always) ", run(*flags, "--chunks", "2"))
    assert len(rows) == 5 + 1  # and one device
    own = tmp_path / "own.txt"
    printed = run(*flags, "--chunks", "4", "--schedule", "gpipe", "--save-schedule", str(own))
    assert own.exists() == (f", schedule='@{own}')\n" in printed)  # the measured times decide
    made = json.loads(run("suggest", "test_main:model_and_batch()", "--chunks", "2", "--seconds", "0", "--refine", "1", "--json"))
    assert made["unpartitioned"]["balance"] == [3]
    assert made["measured"][0]["measured_seconds"] > 0
    candidates = made["candidates"]
    assert {candidate["checkpoint"] for candidate in candidates} == {"never", "except_last", "always"}
    assert all(sum(candidate["balance"]) == 3 for candidate in candidates)
    assert "nothing fits into" in run(*flags, "--memory-limit", "1KB", code=1)


@pytest.mark.parametrize(
    "factory, flags",
    [
        ("test_main:model", ["--input", "8,16"]),
        ("test_main:nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))", ["--input", "8,4"]),
        ("test_main:product_of_two()", []),
        ("test_main:product_by_name", ["--schedule", "forward"]),
        ("test_main:lambda: model_and_batch()", []),
    ],
)
def test_the_code_of_a_suggestion_runs(run, factory, flags):
    made = json.loads(run("suggest", factory, *flags, "--chunks", "2", "--seconds", "0", "--json"))
    names = {}
    exec(made["code"], names)
    assert names["pipe"].balance == made["candidates"][0]["balance"] and names["pipe"].chunks == 2
    assert names["pipe"].step(names["batch"], torch.zeros(8), lambda output, target: output.mean()).isfinite()


def test_suggest_plans_for_a_cluster(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.json").write_text(cluster_text())
    flags = ["suggest", "test_main:model_and_batch", "--cluster", "cluster.json", "--seconds", "0"]
    printed = json.loads(run(*flags, "--schedule", "1f1b", "--micro-batch", "2,4", "--json"))
    assert printed["reason"] == ""
    replicas = {candidate["replicas"]: candidate for candidate in printed["candidates"]}
    assert set(replicas) == {1, 2}
    for count, candidate in replicas.items():
        assert candidate["schedule"] == "1f1b" and candidate["chunks"] * count in (2, 4)  # of 8 samples
        assert len(candidate["bytes"]) == 2 // count
    printed = run(*flags, "--batch-size", "64")
    assert "All figures are predicted." in printed and "balance of the first: " in printed
    measured = balance.profile(model(), torch.rand(4, 16), seconds=0)
    Path("profile.json").write_text(measured.to_json())
    planned = ["suggest", "--profile", "profile.json", "--batch-size", "16", "--cluster", "cluster.json"]
    assert run(*planned) == str(balance.plan_cluster(balance.Cluster.from_json(cluster_text()), [measured], 16))
    Path("cluster.json").write_text(cluster_text(memory=1024))
    assert "nothing fits into 1.00 KiB per device" in run(*planned, code=1)


def test_help_is_printed_without_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0 and "suggest" in capsys.readouterr().out


def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "draw", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["draw", "gpipe"])
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("arguments", [["print", "gpipe"], ["print", "--help"]])
def test_output_that_cannot_be_written(arguments):
    reader, closed = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for output, code, line in ((closed, 0, ""), (full, 2, "error: cannot write the output: .*No space left.*\n")):
            ended = subprocess.run([sys.executable, "-m", "gpipe", *arguments], stdout=output, stderr=subprocess.PIPE, text=True)
            assert ended.returncode == code and re.fullmatch(line, ended.stderr)
    os.close(closed)


FILES = {
    "right.txt": "0F0 0B0\n1F0 1B0\n",
    "deadlock.txt": "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n",
    "malformed.txt": "0F0 0X0\n",
    "profile.json": balance.profile(model(), torch.rand(8, 16), seconds=0).to_json(),
    "cluster.json": cluster_text(),
    "empty.json": cluster_text(hosts=0),
}
REFUSED = [
    ("verify gpipe", "invalid choice: 'verify'"),
    ("check @deadlock.txt", "the schedule deadlocks"),
    ("print @malformed.txt", "malformed.txt: line 1, column 5: '0X0' is not an action"),
    ("print @right.txt --chunks 3", "--chunks does not apply to a schedule from a file"),
    ("print gpipe --placement 0,1 --stages 2", "--stages does not apply to a list of workers"),
    ("print gpipe --placement 0,x", "--placement 0,x: give looped, v, or"),
    ("print gpipe --chunk 8", "unrecognized arguments: --chunk 8"),
    ("print gpipe --chunks 0", "--chunks: '0' is not a whole number from 1 to"),
    ("check zb_h1 --weight-gradient=-1", "--weight-gradient: '-1' is not a number from 0"),
    ("cut --profile cluster.json", "not a profile"),
    ("cut --profile nowhere", "No such file or directory: 'nowhere'"),
    ("cut test_main:model --profile profile.json", "--profile excludes test_main:model"),
    ("cut --profile profile.json --schedule interleaved_1f1b --stages-per-worker 2", "layers, 3, but is 4"),
    ("cut --profile profile.json --schedule auto", "cut takes one schedule"),
    ("profile test_main:model_and_batch --seconds 0 --output /dev/full", "No space left on device"),
    ("sweep test_main:model_and_batch --seconds 0 --schedule 1f1b,zb_v", "layers, 3, but is 4"),
    ("sweep test_main:model_and_batch --near=-1", "--near: '-1' is not a whole number"),
    ("suggest test_main:model --batch-size 8", "--batch-size requires --cluster"),
    ("suggest --cluster cluster.json", "the following arguments are required: MODULE:FUNCTION"),
    ("suggest test_main:model --cluster cluster.json --chunks 2", "--cluster excludes --chunks"),
    ("suggest test_main:model --rows 0", "--rows: '0' is not a whole number from 1 to"),
    ("suggest test_main:model --cluster cluster.json --devices cpu,cpu", "--cluster needs one device to measure on"),
    ("suggest --cluster cluster.json --profile x --batch-size 8 --seconds 1", "--profile excludes --seconds"),
    ("suggest test_main:model_and_batch --cluster cluster.json --micro-batch 2,9", "the mini-batch's 8 samples, but is 9"),
    ("suggest test_main:model_and_batch --cluster empty.json", "not a cluster: /hosts is 0"),
    ("suggest test_main", "is not of the form MODULE:FUNCTION"),
    ("suggest test_main:unknown", "cannot load 'test_main:unknown': NameError: name 'unknown' is not defined"),
    ("suggest test_main:model", "returns no mini-batch; give its shape with --input"),
    ("suggest test_main:three", "must be a function that returns a module, or a tuple (module, mini-batch)"),
    ("suggest test_main:model --input 8,16 --memory-limit lots", "--memory-limit: 'lots' is not a size, such as 6GB"),
    ("suggest test_main:model --input 8,17 --seconds 0", "layer '0' failed in its forward"),
]


@pytest.mark.parametrize("command, message", REFUSED)
def test_wrong_commands_are_refused_in_one_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1 and message in line
