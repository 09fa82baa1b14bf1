"""torch.utils.checkpoint around a pipeline."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import gpipe


def make_pipe(mode):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return gpipe.GPipe(layers, [2, 3], chunks=2, checkpoint=mode)


def plain(pipe, before, after, x):
    return after(torch.tanh(pipe(torch.tanh(before(x)))))


def around_the_pipeline(pipe, before, after, x):
    return after(torch.tanh(checkpoint(pipe, torch.tanh(before(x)), use_reentrant=False)))


def around_all(pipe, before, after, x):
    return checkpoint(plain, pipe, before, after, x, use_reentrant=False)


def nested(pipe, before, after, x):
    def inner(x):
        return torch.tanh(checkpoint(lambda x: pipe(torch.tanh(before(x))), x, use_reentrant=False))

    return checkpoint(lambda x: after(inner(x)), x, use_reentrant=False)


def reentrant(pipe, before, after, x):
    return checkpoint(plain, pipe, before, after, x, use_reentrant=True)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("call", [around_the_pipeline, around_all, nested, reentrant])
def test_gradients_are_those_without_a_checkpoint(call, mode):
    def step(call):
        pipe = make_pipe(mode)
        before, after = nn.Linear(3, 3), nn.Linear(3, 3)
        x = torch.rand(6, 3, requires_grad=True)
        torch.manual_seed(1)
        y = call(pipe, before, after, x)
        y.square().sum().backward()
        parameters = [*pipe.parameters(), *before.parameters(), *after.parameters()]
        return [y.detach(), x.grad, *(parameter.grad for parameter in parameters)]

    actual, expected = step(call), step(plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_other_saved_tensor_hooks_reach_the_layers():
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    pipe = make_pipe("never")
    x = torch.rand(6, 3)

    def call(x):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return pipe(x)

    checkpoint(call, x, use_reentrant=False).sum().backward()
    assert packed.count((3, 8)) >= 2  # an activation of a micro-batch
    packed.clear()
    pipe(x).sum().backward()
    assert not packed
