"""Conversion of modules that compute otherwise in evaluation mode than in training mode."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import gpipe
from converted_models import batch, outputs_in_each_mode


class ByMode(nn.Module):
    """Calls a function with itself and the input."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4).double() for _ in range(4))
        self.shift, self.factor = (nn.Parameter(torch.rand(4).double()) for _ in range(2))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Outputs(NamedTuple):
    out: torch.Tensor
    aux: torch.Tensor


def another_layer(m, x):
    return m.d(m.b(x) if m.training else m.c(x))


def more_layers(m, x):
    y = m.a(x)
    z = m.c(m.b(y) * 2) + x if m.training else y * 3
    return m.d(z) + z


def another_order(m, x):
    return m.d(m.b(m.c(x)) if m.training else m.c(m.b(x)))


def another_value(m, x):
    y, z = m.a(x), m.b(x)
    return m.d(m.c(y if m.training else z)) + y * z


def other_arguments(m, x):
    y = m.a(x)
    return m.d(torch.cat([y, m.b(y), x] if m.training else [y, x], 1).view(x.shape[0], -1, 4).mean(1))


def another_parameter(m, x):
    return m.b(m.a(x) * (m.shift if m.training else m.factor)) + m.shift


def auxiliary_or_none(m, x):
    y = m.a(x)
    z = m.c(m.b(y).tanh()) if m.training else None
    return {"aux": z, "out": m.d(y)}


def auxiliary_or_nothing(m, x):
    y = m.a(x)
    z = m.b(y)
    return Outputs(m.d(y), m.c(z)) if m.training else m.d(y) + z


def more_in_evaluation(m, x):
    y = m.a(x)
    return m.b(y) if m.training else [m.b(y), (m.c(y), m.d(x).relu())]


def changed_in_place(m, x):
    y = m.a(x)
    if m.training:
        y.mul_(m.b(x)).add_(1)
    return m.d(y) + y


FUNCTIONS = [
    another_layer,
    more_layers,
    another_order,
    another_value,
    other_arguments,
    another_parameter,
    auxiliary_or_none,
    auxiliary_or_nothing,
    more_in_evaluation,
    changed_in_place,
]


def total(output):
    return sum(leaf.sin().sum() for leaf in tree_leaves(output) if leaf is not None)


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_model_computes_and_returns_follows_the_mode(function):
    model = ByMode(function)
    sequence = gpipe.to_sequential(model, batch())
    pipe = gpipe.GPipe(copy.deepcopy(sequence), [1] * len(sequence), chunks=2, checkpoint="always")
    plain = copy.deepcopy(model)
    for mode in (True, False, True):
        outputs = []
        for module in (plain, sequence, pipe):
            module.train(mode).zero_grad()
            outputs.append(module(batch()))
            total(outputs[-1]).backward()
            assert type(outputs[-1]) is type(outputs[0])
            torch.testing.assert_close(outputs[-1], outputs[0])
            torch.testing.assert_close(gradients(module), gradients(plain))
    for module in (plain, pipe):
        module.zero_grad()
    pipe.step(batch(), batch(), lambda output, target: total(output), reduction="sum")
    total(plain(batch())).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))


class Skipping(nn.Module):
    """Does nothing in evaluation mode."""

    def forward(self, x):
        return x * torch.rand_like(x[:, :1]) if self.training else x


class Nested(nn.Module):
    """Has modules that decide by their own mode, and by that of the module around them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = ByMode(another_layer), ByMode(another_order)
        self.skip, self.last = Skipping(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()

    def forward(self, x):
        return self.last(self.skip(self.second(self.first(x))))


FROZEN = ["", "first", "first.b", "first.c", "second", "second.b", "skip", "last", "last.1", "last.2"]


@pytest.mark.parametrize("frozen", FROZEN)
def test_modules_follow_their_own_mode(frozen):
    model = Nested()
    if frozen:
        model.get_submodule(frozen).eval()
    sequence, plain = gpipe.to_sequential(model, batch()), copy.deepcopy(model)
    for outputs in outputs_in_each_mode(sequence, plain, batch()):
        torch.testing.assert_close(*outputs)
    assert model.training and not (frozen and model.get_submodule(frozen).training)  # as before


class Counts(nn.Module):
    """Counts its calls in training mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1 if self.training else 0
        return x * (self.count + 1)


def test_modules_that_only_one_mode_calls_are_refused_in_the_other_mode():
    model = nn.ModuleDict({"counts": Counts(), "linear": nn.Linear(4, 4)}).double()
    model.forward = lambda x: model["linear"](model["counts"](x) if model.training else x)
    model["counts"].eval()
    with pytest.raises(ValueError, match="some of its modules are in training mode and others in evaluation"):
        gpipe.to_sequential(model, batch())
    assert model["counts"].count == 0


@pytest.mark.parametrize("frozen", ["skip", "second"])
def test_modes_that_an_export_does_not_show_are_refused(frozen):
    model = Nested()
    model.forward = lambda x: model.second(model.skip(x))
    sequence = gpipe.to_sequential(model, batch())
    sequence.eval()(batch())
    model.get_submodule(frozen).eval()
    sequence = gpipe.to_sequential(model, batch())
    with pytest.raises(RuntimeError, match="'skip' and 'second' are in different modes, .*; call train"):
        sequence(batch())
    assert torch.equal(sequence.eval()(batch()), model.eval()(batch()))
