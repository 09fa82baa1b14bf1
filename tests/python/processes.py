"""Runs Python programs in processes of their own."""

import os
import subprocess
import sys
import textwrap

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
