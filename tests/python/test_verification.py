"""gpipe.verify() names what differs between a pipeline and its layers without stages."""

import re
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from test_ranks import batch, make_model


def on_worker():
    return threading.current_thread() is not threading.main_thread()


class Differs(torch.autograd.Function):
    """Computes something else on the thread of a worker than on the main thread, in one direction."""

    @staticmethod
    def forward(ctx, x, backward):
        ctx.backward = backward
        return x * 1.25 if on_worker() and not backward else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.25 if on_worker() and ctx.backward else grad, None


class DifferingLinear(nn.Linear):
    backward = False

    def forward(self, x):
        return Differs.apply(super().forward(x), self.backward)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_pipeline_is_its_layers(schedule):
    pipe = gpipe.GPipe(make_model(), [2, 2, 4], chunks=3, schedule=schedule, devices=["cpu"] * 3)
    x, target = batch(8)
    pipe.step(x, target, F.cross_entropy)
    before = {**pipe.state_dict()}, [each.grad.clone() for each in pipe.parameters()], torch.get_rng_state()
    before[0].update((name, each.clone()) for name, each in before[0].items())
    gpipe.verify(pipe, x, target, F.cross_entropy)
    assert all(torch.equal(each, before[0][name]) for name, each in pipe.state_dict().items())
    assert all(map(torch.equal, [each.grad for each in pipe.parameters()], before[1]))
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("backward, message", [
    (False, "the output of layer '7' differs"),
    (True, "the gradient of '0.weight' differs"),
])  # fmt: skip
def test_what_differs_is_named(backward, message):
    model = make_model()
    model[7] = DifferingLinear(6, 3)
    model[7].backward = backward
    model.append(nn.Tanh())
    pipe = gpipe.GPipe(model, [4, 5], chunks=2, schedule="1f1b", devices=["cpu"] * 2)
    with pytest.raises(AssertionError, match=re.escape(message) + ".* by 0.2.* the last is the gradient of '7.bias'"):
        gpipe.verify(pipe, torch.randn(8, 4), torch.zeros(8, 3), F.mse_loss)


def test_a_converted_model_and_one_whose_layers_run_without_python():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)

        def forward(self, x, *, scale):
            return self.last(self.drop(self.first(x)) * scale)

    for options in ({}, {"native": True}):
        x = {"x": torch.randn(6, 4), "scale": torch.randn(6, 1)}
        pipe = gpipe.GPipe.from_module(Model(), kwargs=x, balance=[1, 2], chunks=3, checkpoint="always", schedule="1f1b", **options)
        gpipe.verify(pipe, x, torch.randn(6, 2), F.mse_loss)
