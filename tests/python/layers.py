"""Layers that the tests make models of."""

import torch
from torch import nn

from gpipe.skip import pop, skippable, stash


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Fail(nn.Module):
    """Raises in its forward: the error given, or one of its own."""

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
