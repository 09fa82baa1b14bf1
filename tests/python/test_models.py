"""The models of the package."""

import copy
import pickle

import pytest
import torch

import gpipe
from gpipe import models


def test_a_unet_trains_in_a_pipeline():
    torch.manual_seed(0)
    model = models.unet(base_channels=4, depth=2, dropout=0.1)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())
    assert "down1_conv1.weight" in model.state_dict()
    x = torch.rand(4, 3, 16, 16)
    model.eval()
    expected = model(x)
    pipe = gpipe.GPipe(model, [5, len(model) - 5], chunks=2)
    assert not pipe.training
    torch.testing.assert_close(pipe(x), expected)
    pipe.train()
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe(x).sum().backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    pipe.eval()
    assert not torch.allclose(pipe(x), expected)


@pytest.mark.parametrize("name, parameters", [("resnet18", 11689512), ("resnet50", 25557032)])
def test_a_resnet_computes_what_torchvisions_does(name, parameters):
    theirs = getattr(pytest.importorskip("torchvision").models, name)().eval()
    ours = getattr(models, name)().eval()
    assert sum(parameter.numel() for parameter in ours.parameters()) == parameters
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


@pytest.mark.parametrize("options", [{"dims": 3, "upsampling": "linear"}, {"upsampling": "linear"}, {"convolutions": 3}])
def test_a_unet_keeps_sizes(options):
    model = models.unet(1, 5, depth=2, base_channels=2, **options)
    size = (5,) * options.get("dims", 2)
    assert model(torch.rand(2, 1, *size)).shape == (2, 5, *size)


def test_models_can_be_copied_and_pickled():
    model = models.resnet18(10, small_images=True).eval()
    x = torch.rand(2, 3, 8, 8)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(model(x), copied(x))
        assert copied.double()(x.double()).dtype == torch.float64
    assert model(x).dtype == torch.float32


def test_two_models_in_one_pipeline():
    first, second = models.unet(base_channels=2, depth=1), models.unet(in_channels=1, base_channels=2, depth=1)
    layers = {f"{i}_{name}": layer for i, model in enumerate((first, second)) for name, layer in model.named_children()}
    pipe = gpipe.GPipe(torch.nn.Sequential(*layers.values()), [3, len(layers) - 3])
    assert pipe(torch.rand(2, 3, 8, 8)).shape == (2, 1, 8, 8)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="depth"):
        models.unet(depth=-1)
    with pytest.raises(ValueError, match="upsampling"):
        models.unet(upsampling="nearest")


def test_a_model_can_be_balanced():
    model = models.unet(base_channels=2, depth=1)
    balance = gpipe.balance.balance_by_time(2, model, torch.rand(2, 3, 8, 8), timeout=0.1)
    assert sum(balance) == len(model)
