"""Compiled layers and pipelines."""

import copy

import pytest
import torch
from torch import nn

import gpipe
from layers import make_dropouts, training_step
from processes import run


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_compiled_layers_compute_the_same(checkpoint):
    model = make_dropouts()
    x = torch.rand(6, 4)
    expected = training_step(gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=2), x)
    compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in copy.deepcopy(model)))
    pipe = gpipe.GPipe(compiled, [2, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):  # the first step compiles
        torch.testing.assert_close(training_step(pipe, x), expected)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # it runs uncompiled
def test_a_compiled_pipeline_computes_the_same():
    model = make_dropouts()
    x = torch.rand(6, 4)
    expected = training_step(gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=2), x)
    pipe = torch.compile(gpipe.GPipe(model, [2, 1], chunks=2), backend="aot_eager")
    torch.testing.assert_close(training_step(pipe, x), expected)


def test_compilation_after_a_pipeline_has_ended():
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
