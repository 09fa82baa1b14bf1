"""The models in C++."""

import subprocess

import pytest
import safetensors.torch
import torch
from torch import nn

from helpers import built


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_in_cpp_computes_what_torchvisions_does(name, tmp_path):
    """Its norms are not the identity, and have seen more than one batch."""
    torch.manual_seed(1)
    model = getattr(pytest.importorskip("torchvision").models, name)()
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, std=0.2)
        for _ in range(3):
            model(torch.randn(4, 3, 64, 64) + 0.5)
        x = torch.randn(2, 3, 96, 64)
        y = model.eval()(x)
    assert 0.1 < y.std() < 10  # as the tolerances expect
    torch.save({"x": x, "y": y}, tmp_path / "sample.pt")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    program = [built("compare_with_torchvision"), name, tmp_path / "state.safetensors", tmp_path / "sample.pt"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
