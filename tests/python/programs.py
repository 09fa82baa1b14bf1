"""Runs the C++ programs of a build, for tests that compare with them."""

import os
import subprocess
from pathlib import Path

import pytest


def run(name, *flags):
    """Runs a program, such as "unet/unet_train". Skips the test if the program is not built."""
    build = os.environ.get("GPIPE_BUILD_DIR")
    if not build:
        pytest.skip("GPIPE_BUILD_DIR is not set to a build of the C++ programs")
    program = Path(build) / "examples" / name
    if not program.exists():
        pytest.skip(f"{program} is not built")
    done = subprocess.run(
        [str(program), *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
