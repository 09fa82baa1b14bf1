"""Compiled layers, and modes that see what layers run."""

import copy

import pytest
import torch
from torch import nn
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
