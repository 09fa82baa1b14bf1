"""Values that many later layers read, in converted models: attention residuals, DenseNet, U-Net++."""

import copy
import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe
from helpers import results_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "python"))
from attention_residuals import Transformer, cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [3, 3, 3, 2]  # of the micro-batches


@functools.cache
def make_sequence():
    """Returns a transformer with two blocks, as a sequence, and a mini-batch. Its queries are not zero."""
    torch.manual_seed(0)
    model = Transformer(layers=4, block=2, width=8, length=6, residuals=True, heads=2).double()
    for read in model.reads:
        torch.nn.init.normal_(read.query)
    input, target = torch.randint(256, (2, sum(SIZES), 6))
    return gpipe.to_sequential(model, input), input, target


@functools.cache
def reference():
    """Returns the outputs and the gradients of the sequence, run micro-batch by micro-batch."""
    sequence, input, target = make_sequence()
    sequence.zero_grad()
    outputs = []
    for part, of_part in zip(input.split(SIZES), target.split(SIZES)):
        outputs.append(sequence(part))
        (cross_entropy(outputs[-1], of_part) * len(part) / sum(SIZES)).backward()
    return torch.cat(outputs).detach(), gradients_of(sequence)


def gradients_of(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def equal_parts(layers, stages):
    cuts = [layers * stage // stages for stage in range(stages + 1)]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def step(schedule, placement, checkpoint, group=None):
    """Returns the output and the gradients of a step."""
    sequence, input, target = make_sequence()
    options = {"checkpoint": checkpoint, "schedule": schedule, "placement": placement, "group": group}
    model = sequence if group is None else copy.deepcopy(sequence)  # a rank keeps its own layers only
    pipe = gpipe.GPipe(model, equal_parts(len(sequence), len(placement)), chunks=len(SIZES), **options)
    pipe.zero_grad()
    _, output = pipe.step(input, target, cross_entropy, return_output=True)
    return output, gradients_of(pipe)


def assert_equals_the_reference(output, gradients):
    expected, of_reference = reference()
    assert torch.equal(output, expected) and gradients.keys() == of_reference.keys()
    for name, gradient in gradients.items():
        largest = of_reference[name].abs().max().item()
        torch.testing.assert_close(gradient, of_reference[name], rtol=0, atol=1e-10 * largest)


RUNS = [("1f1b", [0, 1, 2], "always"), ("interleaved_1f1b", [0, 1, 0, 1], "always"), ("zb_v", [0, 1, 1, 0], "never")]


@pytest.mark.parametrize("run", RUNS)
def test_attention_residuals_equal_the_sequence(run):
    assert_equals_the_reference(*step(*run))


def steps_of_a_rank(ranks):
    return [step(*each, group=ranks) for each in RUNS[1:]]


def test_attention_residuals_over_two_ranks_equal_one_process():
    for each, (first, mine), (second, others) in zip(RUNS[1:], *results_of(2, steps_of_a_rank), strict=True):
        output, gradients = step(*each)
        assert first.is_meta != second.is_meta and torch.equal(second if first.is_meta else first, output)
        assert len(mine) + len(others) == len(gradients)
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in (mine | others).items())


def test_layers_set_the_modes_of_the_modules_whose_tensors_they_use():
    sequence, *_ = make_sequence()
    for mode in (False, True):
        nn.Sequential(*sequence).train(mode)
        assert {each.training for each in sequence.modules() if [*each.parameters(recurse=False)]} == {mode}
