"""Schedules that split backwards, compared bit by bit with 1f1b, which does not."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gpipe

WIDE = 128
SAMPLES = 48  # three micro-batches, large enough for products to be split


class Counted(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(context, x, w):
        context.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(context, gradient):
        Counted.backwards += 1
        x, w = context.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDE, WIDE) / 10)

    def forward(self, x):
        return Counted.apply(x, self.w)


class Checkpointed(nn.Sequential):
    def __init__(self, use_reentrant):
        super().__init__(nn.Linear(WIDE, WIDE), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDE, WIDE))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class CheckpointedNorm(nn.Module):
    """A checkpointed region that changes and reads buffers."""

    def __init__(self):
        super().__init__()
        self.region = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))

    def forward(self, x):
        return checkpoint(self.region, x, use_reentrant=False)


class Selective(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))

    def forward(self, x):
        saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(self.region, x, use_reentrant=False, context_fn=saved)


LAYERS = {
    "custom": Custom,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "checkpointed norm": CheckpointedNorm,
    "selective checkpoint": Selective,
}


def step(make, schedule, mode, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), make(), nn.Linear(WIDE, WIDE))
    pipe = gpipe.GPipe(model, [2, 2], devices=["cpu", "cpu"], chunks=3, checkpoint=mode, schedule=schedule, **options)
    x = torch.randn(SAMPLES, WIDE, requires_grad=True)
    for _ in range(2):
        pipe.step(x, torch.zeros(SAMPLES, WIDE), nn.functional.mse_loss)
    return [x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_equal_those_of_whole_backwards(layer, mode):
    expected = step(LAYERS[layer], "1f1b", mode)
    for schedule in ("zb_h1", "zb_h2"):
        for got, want in zip(step(LAYERS[layer], schedule, mode), expected, strict=True):
            assert torch.equal(got, want)


def test_a_reentrant_checkpoint_adds_its_gradients_once():
    expected = step(lambda: Checkpointed(use_reentrant=True), "1f1b", "never")
    got = step(lambda: Checkpointed(use_reentrant=True), "zb_h1", "never")
    torch.testing.assert_close(got, expected)


def test_custom_functions_and_hooks_run_once_per_micro_batch():
    calls = {"full": 0, "tensor": 0}

    class Hooked(Custom):
        def forward(self, x):
            y = super().forward(x.tanh() @ self.w)
            y.register_hook(lambda gradient: calls.update(tensor=calls["tensor"] + 1))
            return y

    def make():
        layer = Hooked()
        layer.register_full_backward_hook(lambda *_: calls.update(full=calls["full"] + 1))
        return layer

    Counted.backwards = 0
    step(make, "zb_h1", "never")
    assert (Counted.backwards, calls) == (6, {"full": 6, "tensor": 6})
