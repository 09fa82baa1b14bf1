"""Importing a package that is not built, or that was built for another torch."""

import shutil
from pathlib import Path

import pytest
import torch

import gpipe
from processes import run

IMPORT = """
    sys.path.insert(0, sys.argv[1])
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpipe"]:
        del sys.modules[name]
    try:
        import gpipe
    except ImportError as error:
        print(error)
"""


@pytest.fixture
def package(tmp_path):
    """A folder as in a clone: with the package's first file, but without the extension module."""
    folder = tmp_path / "clone" / "python" / "gpipe"
    folder.mkdir(parents=True)
    shutil.copy(Path(gpipe.__file__), folder)
    return folder


def test_a_package_that_is_not_built(package):
    code, text = run(IMPORT, str(package.parent))
    assert code == 0
    assert text.startswith(f"gpipe is not built: run pip install . in {package.parents[1]}, ")


def test_a_package_for_another_torch(package):
    (package / "_C.py").write_text("torch_version = '1.0.0'")
    code, text = run(IMPORT, str(package.parent))
    assert code == 0
    assert text.startswith(f"gpipe was built for torch 1.0.0, but torch {torch.__version__} is installed; install")


def test_an_extension_module_that_cannot_be_loaded(package):
    (package / "_C.py").write_text("raise ImportError('undefined symbol: at')")
    code, text = run(IMPORT, str(package.parent))
    assert code == 0
    assert text.startswith(f"gpipe cannot be loaded with torch {torch.__version__}: undefined symbol: at; install")
