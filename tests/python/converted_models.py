"""Models that tests of conversions share."""

import torch
from torch import nn


class Block(nn.Module):
    """A residual block whose last module is called twice."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.act = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = self.act(self.norm(self.linear(x)))
        return self.act(x + self.scale * y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.head(self.drop(self.second(self.first(x + self.table))))


def make_net():
    torch.manual_seed(0)
    return Net().double()


def batch(samples=6):
    torch.manual_seed(1)
    return torch.randn(samples, 4).double()


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def outputs_in_each_mode(sequence, plain, x):
    """Yields the outputs of a conversion and of the plain model, with the same random numbers: as they are, in evaluation and
    in training mode. Their states must stay equal."""
    for mode in (None, False, True):
        for module in (sequence, plain) if mode is not None else ():
            module.train(mode)
        outputs = []
        for module in (sequence, plain):
            torch.manual_seed(2)
            outputs.append(module(x))
        yield outputs
        torch.testing.assert_close(dict(sequence.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
