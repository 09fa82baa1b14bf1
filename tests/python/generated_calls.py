"""How test_plain_loop.py calls pipelines: ``INPUTS`` makes the input of a leaf tensor. ``BETWEEN`` is what happens
between a forward and its backward."""

import contextlib
import random

import numpy
import pytest
import torch
from torch import nn

import gpipe
from generated_states import CONTEXT, Draw, Marked

INPUTS = {
    "": lambda leaf: leaf,
    "expanded": lambda leaf: leaf[:1].expand_as(leaf),
    "strided": lambda leaf: torch.cat([leaf, leaf], 1)[:, 1:-3],
    "transposed": lambda leaf: leaf.t().contiguous().t(),
    "without gradient": lambda leaf: leaf.detach(),
    "used elsewhere": lambda leaf: leaf + 0,
    "marked": lambda leaf: leaf.as_subclass(Marked),
}


class Fails(nn.Module):
    """Fails on demand."""

    now = False

    def forward(self, x):
        if Fails.now:
            raise ArithmeticError("on purpose")
        return x


# What happens between a forward and its backward, as functions of the pipeline or plain model, its forward and another
# input. Each returns the outputs of other calls that also get a backward.


@contextlib.contextmanager
def evaluation(model, forward, x):
    model.eval()
    yield []
    model.train()


@contextlib.contextmanager
def seeds(model, forward, x):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    yield []


@contextlib.contextmanager
def another_context(model, forward, x):
    token = CONTEXT.set(-3.0)
    yield []
    CONTEXT.reset(token)


@contextlib.contextmanager
def another_call(model, forward, x):
    yield [forward(x)]


@contextlib.contextmanager
def inference(model, forward, x):
    model.eval()
    with torch.no_grad():
        forward(x)
    model.train()
    yield []


@contextlib.contextmanager
def inference_mode(model, forward, x):
    with torch.inference_mode():
        forward(x)
    yield []


@contextlib.contextmanager
def abandoned_call(model, forward, x):
    forward(x)
    yield []


@contextlib.contextmanager
def failed_call(model, forward, x):
    if isinstance(model, gpipe.GPipe):
        drawn = {module: len(module.log) for module in model.modules() if isinstance(module, Draw)}
        Fails.now = True
        with pytest.raises(ArithmeticError):
            forward(x)
        Fails.now = False
        for module, count in drawn.items():
            while len(module.log) > count:
                module.log.pop()
    yield []


BETWEEN = {
    "": lambda *_: contextlib.nullcontext([]),
    "evaluation": evaluation,
    "seeds": seeds,
    "another context": another_context,
    "another call": another_call,
    "another call, later backward": another_call,
    "another thread": lambda *_: contextlib.nullcontext([]),
    "inference": inference,
    "inference mode": inference_mode,
    "abandoned call": abandoned_call,
    "failed call": failed_call,
}
