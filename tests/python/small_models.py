"""Models that tests of conversions convert, and what they compare."""

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


class Maybe(nn.Linear):
    """Returns one tensor more in training mode."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.sin() if self.training else None


class Calls(nn.Module):
    """Calls a function with itself and the input."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4).double() for _ in range(4))
        self.maybe = Maybe(4, 4).double()
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(4).double()) for _ in range(2)])
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.randn(4).double()) for name in ("class", "w-1")})
        self.register_buffer("count", torch.ones(4).double())
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def assert_equal_in_each_mode(sequence, plain, x):
    """Compares the outputs and states of a conversion and of the plain model, as they are and in each mode."""
    for mode in (None, False, True):
        outputs = []
        for module in (sequence, plain):
            if mode is not None:
                module.train(mode)
            torch.manual_seed(2)
            outputs.append(module(x))
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(dict(sequence.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def names_of(sequence):
    return [layer.name for layer in sequence]
