"""Writes README.md here: ``python docs/museum/page.py``, with the torch that it tells about installed.

The rows are the docstrings of tests/python/test_museum.py. A case of torch_failures.py that has the name of a row's test
shows what the installed torch does.
"""

import ast
import re
from pathlib import Path

import torch

PAGE = Path(__file__).with_name("README.md")
TESTS = Path(__file__).parents[2] / "tests/python/test_museum.py"
VERSION = torch.__version__.partition("+")[0]
HEAD = """# Failures of other pipelines

Users reported these failures of other libraries. Each has a test here, which reproduces the situation and checks the
result, where possible against the plain model, bit by bit.

The last column tells what torch {version} does in [a small program](torch_failures.py) of that kind, on CPUs with
Gloo. *Right*: it does not fail, and its gradients equal the plain model's. *As reported*: nothing was run, because the
thread is about another library.

| | threads | failure | test here | torch {version} |
|---|---|---|---|---|
"""


def link(thread):
    repository, _, number = thread.partition("#")
    name = f"{repository.partition('/')[2]} {number}".strip()
    return f"[{name}](https://github.com/{repository}{number and f'/issues/{number}'})"


def rows():
    """Returns, for each failure, the name of its test and its columns except for the last. PyTorch's come first."""
    cited = []
    for node in ast.parse(TESTS.read_text()).body:
        if isinstance(node, ast.FunctionDef) and "#" in (docstring := ast.get_docstring(node) or ""):
            cited.append((TESTS.name, node.name, docstring))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ELSEWHERE":
            cited += [(*test, text) for test, text in ast.literal_eval(node.value).items()]
    found = []
    for file, test, text in sorted(cited, key=lambda each: not each[-1].startswith("pytorch/pytorch#")):
        threads, _, failure = " ".join(text.split()).partition(": ")
        words = test.removeprefix("test_").replace("_", " ")
        links = ", ".join(map(link, threads.split(", ")))
        found.append((test.removeprefix("test_"), f"{links} | {failure} | [{words}](../../tests/python/{file})"))
    return found


def text(version, outcome):
    lines = (f"| {i} | {columns} | {outcome(name)} |\n" for i, (name, columns) in enumerate(rows(), 1))
    return HEAD.format(version=version) + "".join(lines)


def written():
    """Returns the version of torch on the page as it is, and a function for the outcome of a test's row."""
    page = PAGE.read_text()
    outcomes = dict(re.findall(r"\[([\w ]+)\]\(\.\./\.\./tests/\S+ \| (.*) \|$", page, re.MULTILINE))
    return re.findall(r"torch ([0-9.]+)", page)[0], lambda name: outcomes.get(name.replace("_", " "), "")


def outcome(name):
    import torch_failures  # uses what other versions of torch may lack

    if name in torch_failures.CASES:
        return torch_failures.outcome(name)
    return "not run: it needs C++" if name.startswith("cpp") else "as reported"


if __name__ == "__main__":
    PAGE.write_text(text(VERSION, outcome))
