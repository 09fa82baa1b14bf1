"""A pipeline trains like its model, with PyTorch's tools around it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from helpers import results_of
from helpers import Double
from test_tied import batch
from test_tied import make_model as make_tied_model


def test_autocast_and_grad_modes_reach_the_layers():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), Double()), [1, 1], chunks=2)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert pipe(torch.rand(4, 2)).dtype == dtype
    assert pipe(torch.rand(4, 2)).dtype == torch.float32
    with torch.no_grad():
        assert not pipe(torch.rand(4, 2)).requires_grad
    with torch.inference_mode():
        assert pipe(torch.rand(4, 2)).is_inference()


def test_optimizer_grad_scaler_and_clipping_train_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    plain = copy.deepcopy(model)
    pipe = gpipe.GPipe(model, [2, 2])
    x = torch.rand(16, 4).double()
    for module in (pipe, plain):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(module(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    states = pipe.state_dict(), plain.state_dict()
    assert all(torch.allclose(states[0][key], states[1][key]) for key in states[1])


def test_parameters_can_be_replaced():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2, bias=False), Double()), [1, 1])
    pipe(torch.rand(2, 2)).sum().backward()
    pipe[0].weight = nn.Parameter(torch.eye(2))
    x = torch.rand(2, 2)
    y = pipe(x)
    assert torch.equal(y, 2 * x)
    y.sum().backward()
    assert pipe[0].weight.grad is not None


def test_shallow_copies_recompute_with_their_own_draws():
    """Two pipelines share the layers. A recompute uses the draws of its own forward."""
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), [2, 1], checkpoint="always")
    other = copy.copy(pipe)
    x = torch.rand(8, 4)

    def gradient(*, use_other):
        torch.manual_seed(0)
        pipe.zero_grad()
        y = pipe(x)
        if use_other:
            other(x)
        y.sum().backward()
        return pipe[0].weight.grad.clone()

    assert torch.equal(gradient(use_other=False), gradient(use_other=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_scripted_layers_train_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))
    scripted = nn.Sequential(torch.jit.script(copy.deepcopy(model[0])), copy.deepcopy(model[1]))
    x = torch.rand(8, 4)
    pipes = [gpipe.GPipe(each, [1, 1], chunks=2, checkpoint="always") for each in (model, scripted)]
    for pipe in pipes:
        pipe(x).sum().backward()
    for ours, theirs in zip(pipes[1].state_dict().values(), pipes[0].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(pipes[1].parameters(), pipes[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_a_resumed_training_gives_the_same_bits(mode, one_thread):
    def begin():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        pipe = gpipe.GPipe(model, [1, 3], chunks=3, checkpoint=mode, schedule="1f1b")
        return pipe, torch.optim.Adam(pipe.parameters(), lr=0.01)

    def train(pipe, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            pipe.step(torch.randn(15, 6), torch.randn(15, 6), nn.functional.mse_loss)
            optimizer.step()

    whole, optimizer = begin()
    train(whole, optimizer, range(30))
    first, optimizer = begin()
    train(first, optimizer, range(13))
    resumed, resumed_optimizer = begin()
    resumed.load_state_dict(first.state_dict())
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    train(resumed, resumed_optimizer, range(13, 30))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


class Loss(nn.Module):
    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def forward(self, x, y):
        return self.pipe.loss(x, y, F.cross_entropy)


class Output(Loss):
    def forward(self, x, y):
        return F.cross_entropy(self.pipe(x), y)


def train_in_parallel(ranks):
    for kind in (Loss, Output):
        pipe = gpipe.GPipe(make_tied_model(), [1, 3, 3], devices=["cpu"] * 3, chunks=2, checkpoint="always")
        parallel, whole = nn.parallel.DistributedDataParallel(kind(pipe)), make_tied_model()
        for step in range(2):
            parallel.zero_grad()
            whole.zero_grad()
            parallel(*(tensor.chunk(2)[ranks.rank] for tensor in batch(step))).backward()
            x, y = batch(step)
            F.cross_entropy(whole(x), y).backward()
            for ours, theirs in zip(pipe.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_distributed_data_parallel_averages_the_gradients():
    results_of(2, train_in_parallel)
