"""The command line: python -m gpipe."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import factories
from gpipe import balance
from gpipe.__main__ import main


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gpipe", *arguments],
        capture_output=True,
        text=True,
        cwd=os.path.dirname(__file__),
        timeout=120,
    )


def test_suggest_prints_a_table_or_json():
    flags = ["suggest", "factories:model", "--input", "8,16", "--seconds", "0"]
    done = run(*flags, "--chunks", "1,2", "--schedule", "forward")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    candidates = [line for line in lines if "%" in line]
    assert len(candidates) == 7 and candidates[-1].endswith("one device")
    assert re.fullmatch(
        r"pipe = gpipe\.GPipe\(model, \[\d, \d\], devices=\['.*'\], chunks=[12], checkpoint='\w+'\)", lines[-1]
    )
    done = run(*flags, "--chunks", "2", "--schedule", "1f1b")
    assert done.stdout.rstrip().endswith(", schedule='1f1b')"), done.stderr
    done = run(*flags, "--chunks", "2")
    assert all(re.search(rf"^{name} ", done.stdout, re.MULTILINE) for name in ("gpipe", "1f1b", "zb_h1", "greedy"))
    assert "schedule='" in done.stdout.splitlines()[-1]
    done = run("suggest", "factories:model_and_batch", "--chunks", "2", "--seconds", "0", "--json")
    printed = json.loads(done.stdout)
    assert printed["unpartitioned"]["balance"] == [3]
    candidates = printed["candidates"]
    assert {candidate["checkpoint"] for candidate in candidates} == {"never", "except_last", "always"}
    assert all(sum(candidate["balance"]) == 3 for candidate in candidates)


def test_layers():
    done = run("suggest", "factories:model", "--input", "8,16", "--chunks", "2", "--seconds", "0", "--layers")
    assert done.returncode == 0, done.stderr
    assert "Per micro-batch of 4 samples" in done.stdout and "saved: bytes kept" in done.stdout
    assert "<- cut here" in done.stdout


LINK = {"bandwidth": 1e9, "latency": 0}
CLUSTER = {"hosts": 2, "devices_per_host": 1, "memory": 0, "inside": LINK, "between": LINK}


@pytest.fixture
def cluster(tmp_path):
    def write(**changed):
        (tmp_path / "cluster.json").write_text(json.dumps({**CLUSTER, **changed}))
        return str(tmp_path / "cluster.json")

    return write


def test_suggest_plans_for_a_cluster(cluster, tmp_path):
    flags = ["suggest", "factories:model_and_batch", "--cluster", cluster(), "--seconds", "0"]
    done = run(*flags, "--schedule", "1f1b", "--micro-batch", "2,4", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["reason"] == ""
    replicas = {candidate["replicas"]: candidate for candidate in printed["candidates"]}
    assert set(replicas) == {1, 2}
    for count, candidate in replicas.items():
        assert candidate["schedule"] == "1f1b" and candidate["chunks"] * count in (2, 4)  # of 8 samples
        assert len(candidate["bytes"]) == 2 // count
    done = run(*flags, "--batch-size", "64")
    assert done.returncode == 0, done.stderr
    assert "All figures are predicted." in done.stdout and "balance of the first: " in done.stdout
    measured = balance.profile(factories.model(), torch.rand(4, 16), seconds=0)
    (tmp_path / "profile.json").write_text(measured.to_json())
    planned = ["suggest", "--profile", str(tmp_path / "profile.json"), "--batch-size", "16"]
    done = run(*planned, "--cluster", cluster())
    assert done.returncode == 0, done.stderr
    assert done.stdout == str(balance.plan_cluster(balance.Cluster.from_json(json.dumps(CLUSTER)), [measured], 16))
    done = run(*planned, "--cluster", cluster(memory=1024))
    assert done.returncode == 1 and "nothing fits into 1.00 KiB per device" in done.stdout


def test_flags_of_a_cluster_are_checked(cluster, capsys):
    file = cluster()
    for arguments, message in (
        (["factories:model", "--batch-size", "8"], "--batch-size requires --cluster"),
        (["factories:model", "--micro-batch", "8"], "--micro-batch requires --cluster"),
        (["--profile", "x.json"], "--profile requires --cluster"),
        (["--cluster", file], "the following arguments are required: MODULE:FUNCTION"),
        (["factories:model", "--cluster", file, "--chunks", "2"], "--cluster excludes --chunks"),
        (["factories:model", "--cluster", file, "--layers"], "--cluster excludes --layers"),
        (["factories:model", "--cluster", file, "--devices", "cpu,cpu"], "--cluster needs one device to measure on"),
        (["factories:model", "--cluster", file, "--profile", "x", "--batch-size", "8"], "--profile excludes factories:model"),
        (["--cluster", file, "--profile", "x", "--batch-size", "8", "--seconds", "1"], "--profile excludes --seconds"),
        (["--cluster", file, "--profile", "x"], "--profile requires --batch-size"),
        (["--cluster", file, "--profile", "nowhere.json", "--batch-size", "8"], "No such file or directory: 'nowhere.json'"),
        (["factories:model_and_batch", "--cluster", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (
            ["factories:model_and_batch", "--cluster", file, "--micro-batch", "2,9"],
            "error: --micro-batch must be from 1 to the mini-batch's 8 samples, but is 9",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["suggest", *arguments])
        assert message in capsys.readouterr().err + str(ended.value), arguments
    with pytest.raises(SystemExit, match="not a cluster: /hosts is 0"):
        main(["suggest", "factories:model_and_batch", "--cluster", cluster(hosts=0)])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["factories"], "is not of the form MODULE:FUNCTION"),
        (["factories:unknown"], "cannot load 'factories:unknown'"),
        (["unknown:model"], "cannot load 'unknown:model'"),
        (["factories:model"], "returns no mini-batch; give its shape with --input"),
        (["factories:layer"], "factories:layer must be a function that returns a module, or a tuple (module, mini-batch)"),
        (["factories:three"], "factories:three must be a function that returns a module, or a tuple (module, mini-batch)"),
        (["factories:model", "--input", "8,x"], "argument --input: '8,x' is not a list of numbers, such as 8,16"),
        (["factories:model", "--input", "8,16", "--memory-limit", "lots"], "--memory-limit: 'lots' is not a size, such as 6GB"),
        (["factories:model", "--input", "8,16", "--devices", "cpu,cpu,cpu,cpu"], "error: "),
        (["factories:model", "--input", "8,17", "--seconds", "0"], "layer '0' failed in its forward"),
        (["factories:model", "--input", "8,16", "--memory-limit", "1KB", "--seconds", "0"], "nothing fits into"),
    ],
)
def test_wrong_arguments_are_refused_without_a_traceback(arguments, message):
    done = run("suggest", *arguments)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout and "Traceback" not in done.stderr
