"""Dispatch modes around a pipeline, and the modes that it refuses."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gpipe
from layers import make_dropouts, training_step


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


class Draw(nn.Module):
    """Draws with operators that take a generator and with operators that do not."""

    def forward(self, x):
        return x * torch.rand_like(x)[:, torch.randperm(4)] + torch.native_dropout(x, 0.5, True)[0]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_dispatch_mode_sees_the_operators_and_changes_no_draws(checkpoint):
    model = nn.Sequential(Draw(), *make_dropouts(), Draw())
    pipe = gpipe.GPipe(model, [2, 3], chunks=2, checkpoint=checkpoint)
    x = torch.rand(6, 4)
    expected = training_step(pipe, x)
    before = torch.get_rng_state()
    with Count() as count:
        actual = training_step(pipe, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert {"aten::rand_like", "aten::randperm", "aten::native_dropout"} <= set(count.names)


def make_pipe(chunks=1):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    return gpipe.GPipe(layers, [2, 2], chunks=chunks, checkpoint="except_last")


def under_fake_tensors(pipe, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return pipe(x)


def with_a_tangent(pipe, x):
    with forward_ad.dual_level():
        return pipe(forward_ad.make_dual(x, torch.ones_like(x)))


def with_a_parameters_tangent(pipe, x):
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(pipe[0].weight.detach(), torch.ones(3, 3))
        return torch.func.functional_call(pipe, {"partitions.0.0.weight": weight}, (x,))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda pipe, x: torch.export.export(pipe, (x,)), r"cannot be traced \(torch.export\)"),
        (lambda pipe, x: make_fx(pipe)(x), r"cannot be traced \(make_fx\)"),
        (under_fake_tensors, r"cannot be traced \(FakeTensorMode\)"),
        (lambda pipe, x: torch.jit.trace(pipe, (x,)), "torch.jit.trace cannot trace a pipeline"),
        (lambda pipe, x: torch.func.jvp(pipe, (x,), (x,)), "cannot run under a torch.func transform"),
        (lambda pipe, x: torch.func.vjp(pipe, x), "cannot run under a torch.func transform"),
        (lambda pipe, x: torch.func.vmap(pipe)(x[None]), "cannot run under a torch.func transform"),
        (lambda pipe, x: torch.func.grad(lambda x: pipe(x).sum())(x), "cannot run under a torch.func transform"),
        (lambda pipe, x: torch.func.functionalize(pipe)(x), "cannot run under a torch.func transform"),
        (with_a_tangent, "no forward-mode derivative"),
        (with_a_parameters_tangent, "no forward-mode derivative"),
    ],
)
def test_tracing_and_transforms_are_refused(call, message):
    pipe, x = make_pipe(), torch.rand(4, 3)
    state = copy.deepcopy(pipe.state_dict())
    with pytest.raises(NotImplementedError, match=message):
        call(pipe, x)
    assert all(torch.equal(value, state[key]) for key, value in pipe.state_dict().items())
    assert pipe(x).shape == (4, 3)


def test_strict_export_is_refused():
    with pytest.raises(RuntimeError, match=r"cannot be traced \(torch.export\)"):
        torch.export.export(make_pipe(), (torch.rand(4, 3),), strict=True)


def test_fake_tensors_as_inputs_are_refused():
    with FakeTensorMode():
        x = torch.rand(4, 3)
    with pytest.raises(TypeError, match="a FakeTensor cannot enter or leave a stage"):
        make_pipe()(x)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_profiler_shows_actions_and_layers(checkpoint):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = gpipe.GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(torch.rand(4, 4), torch.rand(4, 4), nn.functional.mse_loss)
    counts = {event.key: event.count for event in profile.key_averages()}
    passes = 1 if checkpoint == "never" else 2
    for stage, micro_batch in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        for kind in "FB" if checkpoint == "never" else "FRB":
            assert counts[f"gpipe {stage}{kind}{micro_batch}"] == 1
    for layer in ["0", "1", "2"]:
        assert counts[f"gpipe layer {layer}"] == 2 * passes
    assert counts["gpipe layer loss"] == 2
