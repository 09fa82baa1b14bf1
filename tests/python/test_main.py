"""The command line: python -m gpipe."""

import json
import os
import re
import subprocess
import sys

import pytest


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["factories"], "is not of the form MODULE:FUNCTION"),
        (["factories:unknown"], "cannot load 'factories:unknown'"),
        (["unknown:model"], "cannot load 'unknown:model'"),
        (["factories:model"], "returns no mini-batch; give its shape with --input"),
        (["factories:model", "--input", "8,x"], "argument --input"),
        (["factories:model", "--input", "8,16", "--memory-limit", "lots"], "argument --memory-limit"),
        (["factories:model", "--input", "8,16", "--devices", "cpu,cpu,cpu,cpu"], "error: "),
        (["factories:model", "--input", "8,17", "--seconds", "0"], "layer '0' failed in its forward"),
        (["factories:model", "--input", "8,16", "--memory-limit", "1KB", "--seconds", "0"], "nothing fits into"),
    ],
)
def test_wrong_arguments_are_refused_without_a_traceback(arguments, message):
    done = run("suggest", *arguments)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout and "Traceback" not in done.stderr
