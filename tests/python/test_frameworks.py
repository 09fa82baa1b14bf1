"""Frameworks that wrap a model for their own training loop."""

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


def copy_state(state):
    return {key: value.clone() for key, value in state.items()}


def test_accelerate_trains_the_same_and_restores_a_state(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    pipe = gpipe.GPipe(make_model(), [1, 2], chunks=2)
    model, optimizer, loader = accelerator.prepare(pipe, torch.optim.Adam(pipe.parameters(), 0.01), make_loader())

    def clip():
        accelerator.clip_grad_norm_(model.parameters(), 0.1)

    train(model, optimizer, loader, accelerator.backward, clip)
    state = copy_state(accelerator.get_state_dict(model))
    torch.testing.assert_close(state, dict(trained_without_framework()))
    accelerator.save_state(tmp_path)
    train(model, optimizer, loader, accelerator.backward, clip)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(dict(pipe.state_dict()), state, rtol=0, atol=0)


def test_lightning_fabric_trains_the_same_and_restores_a_state(tmp_path):
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    pipe = gpipe.GPipe(make_model(), [1, 2], chunks=2)
    model, optimizer = fabric.setup(pipe, torch.optim.Adam(pipe.parameters(), 0.01))
    loader = fabric.setup_dataloaders(make_loader())

    def clip():
        fabric.clip_gradients(model, optimizer, max_norm=0.1)

    train(model, optimizer, loader, fabric.backward, clip)
    state = copy_state(pipe.state_dict())
    torch.testing.assert_close(state, dict(trained_without_framework()))
    saved = {"model": model, "optimizer": optimizer}
    fabric.save(tmp_path / "checkpoint", saved)
    train(model, optimizer, loader, fabric.backward, clip)
    fabric.load(tmp_path / "checkpoint", saved)
    torch.testing.assert_close(dict(pipe.state_dict()), state, rtol=0, atol=0)
