"""Gradients do not depend, bit by bit, on the cut, the checkpoint mode, or the number of earlier calls."""

import copy

import pytest
import torch
from torch import nn

import gpipe

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ["never", "except_last", "always"]


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def linears(*functions):
    """Returns a model of linear layers with a function behind each."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for each in functions for layer in (nn.Linear(6, 6), Apply(each))))



MODELS = {
    "linear": lambda: linears(torch.tanh, torch.tanh),
    "identities": lambda: linears(lambda x: x, lambda x: x, lambda x: x),
    "slices": lambda: linears(lambda x: nn.functional.pad(x, (1, 1))[:, 1:-1], lambda x: nn.functional.pad(x, (3, 0))[:, 3:]),
    "chunks": lambda: linears(lambda x: torch.cat([x, x], dim=1).chunk(2, dim=1)[1], torch.relu_),
    "transposed": lambda: linears(lambda x: x.t().contiguous().t(), torch.tanh),
    "expanded": lambda: linears(lambda x: x.mean(1, keepdim=True).expand(-1, 6), torch.tanh),
}


def gradients_of(pipe, x, how):
    pipe.zero_grad()
    if how == "step":
        pipe.step(x, torch.zeros(len(x), 6), nn.functional.mse_loss)
    else:
        pipe(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in pipe.parameters()]


@pytest.mark.parametrize("how", ["forward", "step"])
@pytest.mark.parametrize("kind", MODELS)
def test_cuts_modes_and_calls_give_the_same_bits(kind, how):
    model = MODELS[kind]()
    x = torch.randn(15, 6)
    expected = None
    for balance in ([len(model)], [1] * len(model)):
        for mode in MODES:
            pipe = gpipe.GPipe(copy.deepcopy(model), balance, chunks=3, checkpoint=mode)
            for _ in range(4):
                gradients = gradients_of(pipe, x, how)
                expected = gradients if expected is None else expected
                assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_training_gives_the_same_bits(mode):
    def begin():
        pipe = gpipe.GPipe(linears(torch.tanh, torch.tanh), [1, 3], chunks=3, checkpoint=mode, schedule="1f1b")
        return pipe, torch.optim.Adam(pipe.parameters(), lr=0.01)

    def train(pipe, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            pipe.step(torch.randn(15, 6), torch.randn(15, 6), nn.functional.mse_loss)
            optimizer.step()

    whole, optimizer = begin()
    train(whole, optimizer, range(60))
    first, optimizer = begin()
    train(first, optimizer, range(25))
    resumed, resumed_optimizer = begin()
    resumed.load_state_dict(first.state_dict())
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    train(resumed, resumed_optimizer, range(25, 60))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
