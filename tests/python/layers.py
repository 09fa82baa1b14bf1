"""Layers and models for the tests."""

import torch
from torch import nn

from gpipe.skip import pop, skippable, stash


def make_linears(layers=4):
    """Returns a model of linear layers of width 3."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def make_dropouts():
    """Returns a model of three layers of width 4 with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))


def training_step(pipe, x):
    """Returns the output of a training step and the gradients of all parameters."""
    torch.manual_seed(1)
    pipe.zero_grad()
    y = pipe(x)
    y.sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in pipe.parameters())]


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Fail(nn.Module):
    """Raises an error in its forward."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error or ValueError("from the layer")


class _FailBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("from the backward")


class FailBackward(nn.Module):
    def forward(self, x):
        return _FailBackward.apply(x)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        stash("skip", x)
        return x


@skippable(pop=["skip"])
class Add(nn.Module):
    def forward(self, x):
        return x + pop("skip")


@skippable(stash=["skip"])
class YieldStash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class YieldAdd(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip
