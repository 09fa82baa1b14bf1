"""The models of the package."""

import pytest
import torch

import gpipe
from gpipe import models


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


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_computes_what_torchvisions_does(name):
    theirs = getattr(pytest.importorskip("torchvision").models, name)().eval()
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
    x = torch.rand(2, 3, 40, 40)
    torch.testing.assert_close(ours(x), theirs(x))


def test_small_images_keep_the_resolution():
    model = models.resnet18(10, small_images=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11173962
    assert model[:3](torch.rand(2, 3, 8, 8)).shape == (2, 64, 8, 8)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)
