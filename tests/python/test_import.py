"""Importing a package that is not built, or that was built for another torch. Imports within the package."""

import ast
import shutil
from graphlib import CycleError, TopologicalSorter
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


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (None, "gpipe is not built: run pip install . in {folder}, "),
        ("torch_version = '1.0.0'", "gpipe was built for torch 1.0.0, but torch {torch} is installed; install"),
        ("raise ImportError('undefined symbol: at')", "gpipe cannot be loaded with torch {torch}: undefined symbol: at; install"),
    ],
)
def test_a_package_that_cannot_be_imported(package, extension, message):
    if extension is not None:
        (package / "_C.py").write_text(extension)
    code, text = run(IMPORT, str(package.parent))
    assert code == 0
    assert text.startswith(message.format(folder=package.parents[1], torch=torch.__version__))


def imported_by(path):
    """Returns the names that a file imports, also those for type checks only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def test_neither_modules_nor_folders_import_in_circles():
    root = Path(gpipe.__file__).parent
    paths = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")}
    modules = {f"gpipe.{name}".removesuffix(".__init__"): path for name, path in paths.items() if name != "__init__"}
    imports = {name: modules.keys() & set(imported_by(path)) for name, path in modules.items()}
    folders = {}
    for name, others in imports.items():
        folder = name.split(".")[1]
        folders.setdefault(folder, set()).update({other.split(".")[1] for other in others} - {folder})
    for graph in (imports, folders):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail("circle of imports: " + " <- ".join(error.args[1]))
