"""Frameworks that wrap a model for their own training loop."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpipe


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def make_loader():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.rand(16, 4), torch.rand(16, 1)), batch_size=8)


def train(model, optimizer, loader, backward, clip):
    for x, y in loader:
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        clip()
        optimizer.step()


def trained_without_framework():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, optimizer, make_loader(), torch.Tensor.backward, clip)
    return model.state_dict()


def accelerate_tools(folder):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    pipe = gpipe.GPipe(make_model(), [1, 2], chunks=2)
    model, optimizer, loader = accelerator.prepare(pipe, torch.optim.Adam(pipe.parameters(), 0.01), make_loader())

    def clip():
        accelerator.clip_grad_norm_(model.parameters(), 0.1)

    state = lambda: accelerator.get_state_dict(model)
    save, load = lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder)
    return (model, optimizer, loader, accelerator.backward, clip), state, save, load


def lightning_tools(folder):
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    pipe = gpipe.GPipe(make_model(), [1, 2], chunks=2)
    model, optimizer = fabric.setup(pipe, torch.optim.Adam(pipe.parameters(), 0.01))
    saved = {"model": model, "optimizer": optimizer}

    def clip():
        fabric.clip_gradients(model, optimizer, max_norm=0.1)

    save, load = lambda: fabric.save(folder / "file", saved), lambda: fabric.load(folder / "file", saved)
    return (model, optimizer, fabric.setup_dataloaders(make_loader()), fabric.backward, clip), pipe.state_dict, save, load


@pytest.mark.parametrize("tools", [accelerate_tools, lightning_tools])
def test_a_framework_trains_the_same_and_restores_a_state(tools, tmp_path):
    training, state_of, save, load = tools(tmp_path)
    train(*training)
    state = copy.deepcopy(dict(state_of()))
    torch.testing.assert_close(state, dict(trained_without_framework()))
    save()
    train(*training)
    load()
    torch.testing.assert_close(dict(state_of()), state, rtol=0, atol=0)
