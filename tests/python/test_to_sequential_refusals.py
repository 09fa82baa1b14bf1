"""What a conversion refuses, and what a converted model does."""

import copy
import logging
import random

import pytest
import torch
from torch import nn

import gpipe
from converted_models import Returns, batch, make_net


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.view(6, 2, 2), "its code fixes dimension 0 of an input, the batch, to 6"),
        (lambda x: (x * 2, x.mean()), r"output 1 of 2 has the shape \(\), without the batch as dimension 0"),
        (lambda x: torch.cat([x, x]), r"output 0 of 1 has the shape \(2\*s\d+, 4\), without the batch"),
        (lambda x: (x * 2, 3), "output 1 of 2 is not a tensor"),
        (lambda x: x, "it computes nothing"),
        (lambda x: (x * 2, random.Random(0)), "it returns a random.Random; return tensors: .*, pass use_cache=False"),
        (lambda x: x @ x, r"\(Returns\), because it fails on this input: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_models_that_cannot_be_pipelines(function, message):
    with pytest.raises(ValueError, match=message):
        gpipe.to_sequential(Returns(function), batch())


def test_a_failed_export_prints_nothing(capfd):
    handler = logging.getLogger("torch").handlers[0]
    filters = list(handler.filters)
    for function in (lambda x: x * float(x.mean()), lambda x: x @ x, lambda x: x if torch.all(x > 0) else -x):
        with pytest.raises(ValueError, match="cannot convert the model"):
            gpipe.to_sequential(Returns(function), batch())
    assert capfd.readouterr() == ("", "")
    assert handler.filters == filters and "print" not in vars(torch.export._trace)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="module must be nn.Module, ExportedProgram or a path, but is <class 'int'>"):
        gpipe.to_sequential(3, batch())
    with pytest.raises(TypeError, match="opaque must be a list of subclasses of nn.Module, but has <class 'int'>"):
        gpipe.to_sequential(make_net(), batch(), opaque=int)
    with pytest.raises(ValueError, match="give an example input"):
        gpipe.to_sequential(make_net())
    with pytest.raises(ValueError, match="an input has no dimensions"):
        gpipe.to_sequential(make_net(), torch.tensor(1.0))
    net = make_net()
    net.second = torch.jit.script(nn.Linear(4, 4).double())
    with pytest.raises(ValueError, match="'second' is compiled by TorchScript; use the module that it was"):
        gpipe.to_sequential(net, batch())
    net = make_net()
    net.drop.register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match=r"'drop' \(Dropout\) has a hook"):
        gpipe.to_sequential(net, batch())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def hooked(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient / 2)
    return y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Reversed.apply, "calls Reversed, whose backward would be lost"),
        (
            lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True),
            "calls CheckpointFunction, whose backward would be lost",
        ),
        (lambda x: hooked(x), "registers a hook of a tensor"),
        (lambda x: x * random.random(), "draws random numbers from Python or NumPy"),
    ],
)
def test_what_an_export_would_lose_is_refused(function, message):
    register_hook = torch.Tensor.register_hook
    with pytest.raises(ValueError, match=message):
        gpipe.to_sequential(Returns(function), batch().requires_grad_())
    assert torch.Tensor.register_hook is register_hook
    Reversed.apply(batch())


def test_inputs_that_differ_from_the_example_in_more_than_samples_are_refused():
    sequence = gpipe.to_sequential(Returns(lambda x: x / x.shape[1]), batch())
    with pytest.raises(ValueError, match=r"input 0 has the shape \(6, 3\), but the model was converted for \('batch', 4\)"):
        sequence(batch()[:, :3])


@pytest.mark.parametrize(("condition", "wrong"), [(lambda n: n > 4, 3), (lambda n: n % 2 == 0, 5)])
def test_numbers_of_samples_that_the_code_distinguishes_are_refused(condition, wrong):
    model = Returns(lambda x: x * 3 if condition(x.shape[0]) else x * 2)
    sequence = gpipe.to_sequential(model, batch())
    assert torch.equal(sequence(batch(8)), batch(8) * 3)
    with pytest.raises(ValueError, match=f"converted for a number of samples with .*, but a micro-batch has {wrong}:"):
        sequence(batch(wrong))


def test_batch_norm_of_one_sample_is_refused_in_training_mode():
    model = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)]).double()
    model.forward = lambda x: model[1](model[0](x))
    sequence = gpipe.to_sequential(model, batch())
    with pytest.raises(ValueError, match=r"more than one value per channel .* has the shape \(1, 4\); give it more"):
        gpipe.GPipe(copy.deepcopy(sequence), [1, 1], chunks=6)(batch())
    assert torch.equal(sequence.eval()(batch(1)), model.eval()(batch(1)))
