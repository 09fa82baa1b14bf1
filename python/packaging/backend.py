"""The build backend: scikit-build-core, for the torch that GPIPE_TORCH names, or that is installed, or for the newest."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403


def installed() -> str:
    """Returns the version of torch, also of one that pip hides from the build, or "" if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        program = "from importlib.metadata import version; print(version('torch'))"
        return subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True).stdout


def get_requires_for_build_wheel(config_settings=None):
    torch = []
    if wanted := os.environ.get("GPIPE_TORCH"):
        torch = [f"torch=={wanted}.*"]
    elif not installed():
        first, *_, last = re.search(r"GPIPE_TORCH_TESTED (.*)\)", Path("cmake/GpipeTorch.cmake").read_text())[1].split()
        torch = [f"torch>={first},<={last}.99"]
    return build.get_requires_for_build_wheel(config_settings) + torch


get_requires_for_build_editable = get_requires_for_build_wheel


def dynamic_metadata(field, settings=None):
    """Returns the package's dependencies: the libraries work with the minor version that they were built for."""
    major, minor, *_ = installed().split(".")
    return [f"torch=={major}.{minor}.*"]
