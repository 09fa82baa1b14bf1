"""Runs on_devices.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_pipelines_on_devices_that_check_the_order_of_streams():
    device = Path(os.environ.get("GPIPE_BUILD_DIR", "")) / "tests" / "accelerator" / "libchecked_device.so"
    if not device.exists():
        pytest.skip("needs a build folder with tests in GPIPE_BUILD_DIR")
    program = Path(__file__).with_name("on_devices.py")
    done = subprocess.run([sys.executable, program, device], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
