"""The programs in the documentation run."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe

ROOT = Path(__file__).parents[2]


def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))


# What a page takes for granted.
GIVEN = {
    "README.md": {},
    "docs/index.md": {"model": model, "criterion": nn.MSELoss, "input": (8, 8), "target": (8, 8)},
    "docs/python_and_cpp.md": {},
    "docs/which.md": {"model": model, "mini_batch": (64, 8)},
}


@pytest.mark.parametrize("page", GIVEN)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {name: torch.rand(of) if isinstance(of, tuple) else of() for name, of in GIVEN[page].items()}
    names = {"torch": torch, "nn": nn, "gpipe": gpipe, **given} if given else {}
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
