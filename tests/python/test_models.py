"""The models of the package."""

import subprocess

import pytest
import safetensors.torch
import torch
from torch import nn

import gpipe
from gpipe import models
from helpers import built


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"dims": 3}, {"upsampling": "linear"}, {"convolutions": 3}])
def test_a_unet_keeps_sizes_and_trains_in_a_pipeline(options):
    torch.manual_seed(0)
    model = models.unet(1, 5, depth=2, base_channels=2, **options)
    x = torch.rand(4, 1, *(5,) * options.get("dims", 2))
    expected = model.eval()(x)
    assert expected.shape == (4, 5, *x.shape[2:]) and "down1_conv1.weight" in model.state_dict()
    pipe = gpipe.GPipe(model, [5, len(model) - 5], chunks=2)
    torch.testing.assert_close(pipe(x), expected)
    pipe.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def of_torchvision(request):
    """Returns the name of a ResNet, torchvision's model, an input and its output. Its norms are not the identity, and have
    seen more than one batch."""
    torch.manual_seed(1)
    model = getattr(pytest.importorskip("torchvision").models, request.param)()
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
    return request.param, model, x, y


def test_a_resnet_computes_what_torchvisions_does(of_torchvision):
    name, theirs, x, y = of_torchvision
    ours = getattr(models, name)().eval()
    state = {}
    for key, value in theirs.state_dict().items():
        group, _, rest = key.partition(".")
        if group.startswith("layer"):
            block, _, rest = rest.partition(".")
            end = "join." if group == "layer1" else "stash."
            key = f"{group}_{block}_{end if rest.startswith('downsample') else ''}{rest}"
        state[key] = value
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(x), y, rtol=0, atol=1e-5)


def test_a_resnet_in_cpp_computes_what_torchvisions_does(of_torchvision, tmp_path):
    name, theirs, x, y = of_torchvision
    torch.save({"x": x, "y": y}, tmp_path / "sample.pt")
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "state.safetensors")
    program = [built("compare_with_torchvision"), name, tmp_path / "state.safetensors", tmp_path / "sample.pt"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_small_images_keep_the_resolution():
    model = models.resnet18(10, small_images=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11173962
    assert model[:3](torch.rand(2, 3, 8, 8)).shape == (2, 64, 8, 8)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)
