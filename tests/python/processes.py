"""Runs Python programs in processes of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_IMPORTS = "import gpipe, torch, threading, time, os, signal, sys\nfrom torch import nn\n"


def run(program, *arguments, seconds=60):
    """Runs a program. Returns its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTS + textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=os.path.dirname(__file__),
    )
    return done.returncode, done.stdout + done.stderr


def launcher(processes):
    """The command with which torchrun starts a program in several processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def on_cpu():
    """The environment of processes that share the cores and use no GPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_on_two_ranks(program, folder):
    """Runs a program in two processes that torchrun starts in a folder. Returns their output. Fails if either fails."""
    (Path(folder) / "train.py").write_text(program)
    command = [*launcher(2), "train.py"]
    done = subprocess.run(command, cwd=folder, env=on_cpu(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
