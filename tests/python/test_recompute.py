"""A recompute repeats its forward: the same buffers, the same random numbers."""

import contextlib
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gpipe

MODES = ["never", "except_last", "always"]


def step(model, mode):
    """Returns the gradients after a step."""
    pipe = gpipe.GPipe(model, [2, 2], chunks=3, checkpoint=mode)
    torch.manual_seed(1)
    pipe(torch.randn(6, 8)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


class Checkpoints(nn.Module):
    """A block with dropout before, in and after a part that it may checkpoint itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.reentrant = reentrant

    def block(self, x):
        return nn.functional.dropout(self.linear(nn.functional.dropout(x, 0.3)).tanh(), 0.3)

    def forward(self, x):
        x = nn.functional.dropout(x, 0.3)
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = torch_checkpoint(self.block, x, use_reentrant=self.reentrant)
        return nn.functional.dropout(x, 0.3)


def make_model(reentrant):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Checkpoints(reentrant), Checkpoints(reentrant), nn.Linear(8, 8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_repeat_their_draws(reentrant, mode):
    assert all(map(torch.equal, step(make_model(reentrant), mode), step(make_model(None), mode)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_repeat_their_draws_in_the_reference(reentrant):
    def gradients(reentrant):
        model = make_model(reentrant)
        gpipe.reference(model, torch.randn(6, 8), chunks=3).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(reentrant), gradients(None)))


def test_a_submodule_made_in_a_later_forward_fails_that_call():
    class GrowsLater(nn.Module):
        grows = False

        def forward(self, x):
            if self.grows and not hasattr(self, "body"):
                self.body = nn.Linear(8, 8)
            return self.body(x) if self.grows else x * 1

    layer, x = GrowsLater(), torch.rand(6, 8)
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(8, 8), layer), [1, 1], chunks=3, checkpoint="always")
    pipe(x).sum().backward()
    layer.grows = True
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match="stage 1 made a parameter in a forward that is recomputed; repeat the call"):
        loss.backward()
    pipe(x).sum().backward()
    assert layer.body.weight.grad is not None


class Draws(nn.Module):
    """Scales its output with draws of Python's and NumPy's generators."""

    def forward(self, x):
        return x * random.random() + numpy.random.rand()


def test_draws_in_nested_pipelines_do_not_deadlock():
    inner = gpipe.GPipe(nn.Sequential(Draws(), Draws()), [1, 1], chunks=2, checkpoint="always")
    outer = gpipe.GPipe(nn.Sequential(Draws(), inner, Draws()), [1, 1, 1], chunks=2, checkpoint="always")
    loss = outer(torch.randn(8, 8, requires_grad=True)).sum()
    with contextlib.suppress(RuntimeError):  # the inner stages may have drawn in another order
        loss.backward()


def test_a_recompute_that_draws_other_numbers_is_an_error():
    class Disturbed(nn.Module):
        def forward(self, x):
            if not gpipe.is_recomputing():
                random.random()
            return x * random.random()

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(8, 8), Disturbed()), [2], checkpoint="always")
    with pytest.raises(RuntimeError, match="drew other numbers"):
        pipe(torch.randn(8, 8)).sum().backward()
