"""PyTorch's tools in and around a pipeline: compilation, checkpoints, dispatch modes, tracing, the profiler."""

import copy
import itertools
import random
import threading
from collections import OrderedDict

import numpy
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gpipe
from helpers import gradients, make_dropouts, make_linears, training_step
from small_models import Returns


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


def draw(x):
    """Draws with operators that take a generator and with operators that do not."""
    return x * torch.rand_like(x)[:, torch.randperm(4)] + torch.native_dropout(x, 0.5, True)[0]


def test_a_dispatch_mode_sees_the_operators_and_changes_no_draws():
    model = nn.Sequential(Returns(draw), *make_dropouts(), Returns(draw))
    pipe = gpipe.GPipe(model, [2, 3], chunks=2, checkpoint="always")
    x = torch.rand(6, 4)
    expected = training_step(pipe, x)
    before = torch.get_rng_state()
    with Count() as count:
        actual = training_step(pipe, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert {"aten::rand_like", "aten::randperm", "aten::native_dropout"} <= set(count.names)


def make_pipe(chunks=1, mode="except_last"):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    return gpipe.GPipe(layers, [2, 2], chunks=chunks, checkpoint=mode)


def under_fake_tensors(pipe, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        pipe(x)


def with_a_parameters_tangent(pipe, x):
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(pipe[0].weight.detach(), torch.ones(3, 3))
        torch.func.functional_call(pipe, {"partitions.0.0.weight": weight}, (x,))


@pytest.mark.parametrize("call, message", [
    (lambda pipe, x: torch.export.export(pipe, (x,)), r"cannot be traced \(torch.export\)"),
    (lambda pipe, x: make_fx(pipe)(x), r"cannot be traced \(make_fx\)"),
    (under_fake_tensors, r"cannot be traced \(FakeTensorMode\)"),
    (lambda pipe, x: torch.jit.trace(pipe, (x,)), "torch.jit.trace cannot trace a pipeline"),
    (lambda pipe, x: torch.func.vmap(pipe)(x[None]), "cannot run under a torch.func transform"),
    (lambda pipe, x: torch.func.grad(lambda x: pipe(x).sum())(x), "cannot run under a torch.func transform"),
    (lambda pipe, x: torch.func.functionalize(pipe)(x), "cannot run under a torch.func transform"),
    (with_a_parameters_tangent, "no forward-mode derivative"),
])  # fmt: skip
def test_tracing_and_transforms_are_refused(call, message):
    pipe, x = make_pipe(), torch.rand(4, 3)
    state = copy.deepcopy(pipe.state_dict())
    with pytest.raises(NotImplementedError, match=message):
        call(pipe, x)
    assert all(torch.equal(value, state[key]) for key, value in pipe.state_dict().items())
    assert pipe(x).shape == (4, 3)


def test_the_profiler_shows_actions_and_layers():
    pipe, x = gpipe.GPipe(make_linears(3), [1, 2], chunks=2, checkpoint="always"), torch.rand(4, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(x, x, nn.functional.mse_loss)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert all(counts[f"gpipe {stage}{kind}{number}"] == 1 for stage in (0, 1) for kind in "FRB" for number in (0, 1))
    assert [counts[f"gpipe layer {layer}"] for layer in ("0", "1", "2", "loss")] == [4, 4, 4, 2]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_layers_compute_the_same():
    model, x = make_dropouts(), torch.rand(6, 4)
    expected = training_step(gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=2), x)
    compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in copy.deepcopy(model)))
    pipe = gpipe.GPipe(compiled, [2, 1], chunks=2, checkpoint="always")
    for _ in range(2):  # the first step compiles
        torch.testing.assert_close(training_step(pipe, x), expected)
    for schedule in ("1f1b", "zb_h1"):  # whole and split backwards
        pipe = gpipe.GPipe(compiled, [2, 1], chunks=2, checkpoint="never", schedule=schedule)
        pipe.zero_grad()
        torch.manual_seed(1)
        pipe.step(x, x, gpipe.Loss(lambda output, _: output.sum(), reduction="sum"))
        torch.testing.assert_close(gradients(pipe), expected[1:])
    whole = torch.compile(gpipe.GPipe(model, [2, 1], chunks=2), backend="aot_eager")  # runs uncompiled
    torch.testing.assert_close(training_step(whole, x), expected)


def test_backwards_of_compiled_layers_overlap():
    torch.compiler.reset()  # other tests may have compiled as much as dynamo allows
    meeting, met = threading.Barrier(2), []

    def compiled(layer, number):
        """The backward of the layer waits in one of its calls for the other layer's."""
        calls = itertools.count()

        def call(graph, values):
            if next(calls) == number:
                met.append(meeting.wait(60))
            return graph(*values)

        backend = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(graph),
            bw_compiler=lambda graph, inputs: make_boxed_func(lambda *values: call(graph, values)),
        )
        return torch.compile(layer, backend=backend)

    model, x = make_dropouts()[:2], torch.rand(8, 4)
    expected = training_step(gpipe.GPipe(copy.deepcopy(model), [1, 1], chunks=4), x)
    both = nn.Sequential(compiled(model[0], 0), compiled(model[1], 1))
    torch.testing.assert_close(training_step(gpipe.GPipe(both, [1, 1], chunks=4), x), expected)
    assert sorted(met) == [0, 1]


def test_compilation_after_a_pipeline_has_ended():
    for width in 2, 3, 4:
        torch._dynamo.reset()
        layers = [torch.compile(nn.Linear(width, width), backend="eager") for _ in range(2)]
        assert gpipe.GPipe(nn.Sequential(*layers), [1, 1])(torch.zeros(1, width)).shape == (1, width)


def plain(pipe, before, after, x):
    return after(torch.tanh(pipe(torch.tanh(before(x)))))


def nested(pipe, before, after, x):
    def inner(x):
        return checkpoint(lambda x: pipe(torch.tanh(before(x))), x, use_reentrant=False)

    return checkpoint(lambda x: after(torch.tanh(inner(x))), x, use_reentrant=False)


def reentrant(*arguments):
    return checkpoint(plain, *arguments, use_reentrant=True)


@pytest.mark.parametrize("call", [nested, reentrant])
def test_gradients_are_those_without_a_checkpoint(call):
    x = torch.rand(6, 3, requires_grad=True)
    modules = nn.ModuleList([make_pipe(chunks=2, mode="always"), nn.Linear(3, 3), nn.Linear(3, 3)])
    results = []
    for each in (plain, call):
        modules.forward = lambda x, each=each: each(*modules, x)
        results.append(training_step(modules, x))
    assert all(map(torch.equal, *results))


def draws_from(generator):
    layer = Returns(lambda x: x * generator.random())
    layer.generator = generator
    return layer


class Replaces(nn.Module):
    """Replaces a buffer in its backward."""

    def __init__(self):
        super().__init__()
        self.sum = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: setattr(self, "sum", self.sum + gradient.sum()))
        return x * 2


@pytest.mark.parametrize("layer, message", [
    (Returns(lambda x: x * random.random()), "layer 'odd'"),
    (Returns(lambda x: x * numpy.random.rand()), "layer 'odd'"),
    (draws_from(random.Random(0)), "layer 'odd'"),
    (draws_from(numpy.random.default_rng(0)), "layer 'odd'"),
    (Replaces(), "replaced a buffer of layer 'odd'"),
])  # fmt: skip
def test_a_layer_that_cannot_be_repeated_is_not_recomputed(layer, message):
    x = torch.rand(4, 3, requires_grad=True)
    model = nn.Sequential(OrderedDict(one=nn.Linear(3, 3), odd=layer, two=nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match=message) as error:
        gpipe.GPipe(model, [1, 2], chunks=2, checkpoint="always")(x).sum().backward()
    assert "checkpoint='never'" in str(error.value)
    gpipe.GPipe(model, [1, 2], chunks=2, checkpoint="never").step(x, x.detach(), nn.functional.mse_loss)


def test_draws_beside_a_forward_are_not_the_layers():
    def passes(x):
        if not gpipe.is_recomputing():
            random.random()  # as another thread would
        return x

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(3, 3), Returns(passes)), [1, 1], chunks=2, checkpoint="always")
    pipe(torch.rand(4, 3)).sum().backward()
