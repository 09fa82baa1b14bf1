"""The C++ models as Python modules."""

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


def test_a_resnet_has_torchvisions_parameters():
    model = models.resnet18(10, small_images=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11173962
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)
    assert "layer2_0_stash.downsample.0.weight" in model.state_dict()


def test_models_can_be_copied_but_not_pickled():
    model = models.resnet18(10, small_images=True)
    twin = copy.deepcopy(model)
    x = torch.rand(2, 3, 8, 8)
    model.eval()
    twin.eval()
    assert torch.equal(model(x), twin(x))
    twin.double()
    assert twin(x.double()).dtype == torch.float64
    assert model(x).dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    model[0].register_forward_hook(lambda module, arguments, output: output * 0)
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    assert its_optimizer.param_groups[0]["params"][0] is next(twin.parameters())
    assert not twin[0](x).any()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


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


def test_replaced_parameters_are_refused():
    model = models.unet(base_channels=2, depth=1)
    pipe = gpipe.GPipe(model, [3, len(model) - 3])
    x = torch.rand(2, 3, 8, 8)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    pipe.load_state_dict(state)
    pipe(x).sum().backward()
    model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="weight of the C\\+\\+ layer '.*' was replaced.*assign=False"):
        pipe(x)
