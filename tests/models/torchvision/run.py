"""Compares the ResNets of models/ with torchvision's: run.py PROGRAM FOLDER. PROGRAM is built from compare.cpp.

Exit status 77: this Python has no torchvision.
"""

import importlib.util
import pathlib
import subprocess
import sys

import torch
from safetensors.torch import save_file

if importlib.util.find_spec("torchvision") is None:
    print(f"skipped: {sys.executable} has no torchvision")
    sys.exit(77)
import torchvision


def make(name):
    """Makes a model with random weights, norms that are not the identity, and statistics of more than one batch."""
    model = getattr(torchvision.models, name)(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.2)
    model.train()
    for _ in range(3):
        model(torch.randn(4, 3, 64, 64) + 0.5)
    return model.eval()


program = sys.argv[1]
folder = pathlib.Path(sys.argv[2])
folder.mkdir(exist_ok=True)
state, sample = folder / "state.safetensors", folder / "sample.pt"
torch.manual_seed(1)
with torch.no_grad():
    for name in ("resnet18", "resnet50"):
        model = make(name)
        x = torch.randn(2, 3, 96, 64)
        y = model(x)
        assert 0.1 < y.std() < 10, f"{name}: outputs of {y.std()} are of the wrong size for a tolerance of 1e-5"
        torch.save({"x": x, "y": y}, sample)
        save_file(model.state_dict(), state)
        result = subprocess.run([program, name, state, sample], capture_output=True, text=True)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
        print(f"{name}: {result.stdout.strip()}")
state.unlink()
