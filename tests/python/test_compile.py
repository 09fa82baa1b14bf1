"""Compiled layers, modes that see what layers run, and what would trace or transform a pipeline."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gpipe
from processes import run


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


def step(pipe, x):
    """The output of a training step, and all gradients."""
    torch.manual_seed(1)
    pipe.zero_grad()
    y = pipe(x)
    y.sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in pipe.parameters())]


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_compiled_layers(checkpoint):
    model = make_model()
    x = torch.rand(6, 4)
    expected = step(gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=2), x)
    compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in copy.deepcopy(model)))
    pipe = gpipe.GPipe(compiled, [2, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):  # the first compiles
        torch.testing.assert_close(step(pipe, x), expected)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # and runs it as it is
def test_compiled_pipeline():
    model = make_model()
    x = torch.rand(6, 4)
    expected = step(gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=2), x)
    pipe = torch.compile(gpipe.GPipe(model, [2, 1], chunks=2), backend="aot_eager")
    torch.testing.assert_close(step(pipe, x), expected)


def test_pipelines_that_compiled_and_went():
    code, text = run(
        """
        for width in 2, 3, 4:
            torch._dynamo.reset()
            layers = [torch.compile(nn.Linear(width, width), backend="eager") for _ in range(2)]
            gpipe.GPipe(nn.Sequential(*layers), [1, 1])(torch.zeros(1, width))
        print("done")
        """
    )
    assert (code, text) == (0, "done\n")


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


class Draw(nn.Module):
    """Draws by operators that take a generator and by such that have no argument for one."""

    def forward(self, x):
        return x * torch.rand_like(x)[:, torch.randperm(4)] + torch.native_dropout(x, 0.5, True)[0]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_dispatch_mode(checkpoint):
    model = nn.Sequential(Draw(), *make_model(), Draw())
    pipe = gpipe.GPipe(model, [2, 3], chunks=2, checkpoint=checkpoint)
    x = torch.rand(6, 4)
    expected = step(pipe, x)
    before = torch.get_rng_state()
    with Count() as count:
        actual = step(pipe, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert {"aten::rand_like", "aten::randperm", "aten::native_dropout"} <= set(count.names)


class Raise(TorchDispatchMode):
    """Raises instead of one of the operators, by its number."""

    def __init__(self, number):
        super().__init__()
        self.error = KeyError(f"operator {number}")
        self.left = number

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return function(*arguments, **(options or {}))


def make_pipe(chunks=1):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    return gpipe.GPipe(layers, [2, 2], chunks=chunks, checkpoint="except_last")


def raise_from_each_operator(make_call):
    """Has each operator of a call raise, in turn; returns how many there were. A call is of a new pipeline."""
    for number in range(1000):
        pipe, call = make_call()
        state = copy.deepcopy(pipe.state_dict())
        with Raise(number) as mode:
            try:
                call()
            except KeyError as raised:
                assert raised is mode.error
            else:
                return number
        for key, value in pipe.state_dict().items():
            assert torch.equal(value, state[key]), (number, key)
        assert pipe(torch.rand(4, 3)).shape == (4, 3)


def test_a_mode_that_raises_in_the_forward():
    def make_call():
        pipe, x = make_pipe(chunks=2), torch.rand(4, 3)
        return pipe, lambda: pipe(x)

    assert raise_from_each_operator(make_call) > 30


def test_a_mode_that_raises_in_the_backward():
    def make_call():
        pipe = make_pipe(chunks=2)
        loss = pipe(torch.rand(4, 3, requires_grad=True)).sum()
        return pipe, loss.backward

    assert raise_from_each_operator(make_call) > 30


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
        (lambda pipe, x: torch.jit.trace(pipe, (x,)), "cannot be traced by torch.jit.trace"),
        (lambda pipe, x: torch.func.jvp(pipe, (x,), (x,)), "cannot run under a transform of torch.func"),
        (lambda pipe, x: torch.func.vjp(pipe, x), "cannot run under a transform of torch.func"),
        (lambda pipe, x: torch.func.vmap(pipe)(x[None]), "cannot run under a transform of torch.func"),
        (lambda pipe, x: torch.func.grad(lambda x: pipe(x).sum())(x), "cannot run under a transform of torch.func"),
        (lambda pipe, x: torch.func.functionalize(pipe)(x), "cannot run under a transform of torch.func"),
        (with_a_tangent, "no forward-mode derivative"),
        (with_a_parameters_tangent, "no forward-mode derivative"),
    ],
)
def test_refuses_to_be_traced_or_transformed(call, message):
    pipe, x = make_pipe(), torch.rand(4, 3)
    state = copy.deepcopy(pipe.state_dict())
    with pytest.raises(NotImplementedError, match=message):
        call(pipe, x)
    assert all(torch.equal(value, state[key]) for key, value in pipe.state_dict().items())
    assert pipe(x).shape == (4, 3)


def test_refuses_strict_export():
    with pytest.raises(RuntimeError, match=r"cannot be traced \(torch.export\)"):
        torch.export.export(make_pipe(), (torch.rand(4, 3),), strict=True)


def test_fake_tensors_as_inputs():
    """What PyTorch says of them comes out as it is."""
    with FakeTensorMode():
        x = torch.rand(4, 3)
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors first"):
        make_pipe()(x)
