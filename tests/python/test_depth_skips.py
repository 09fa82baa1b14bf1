"""Values that many later layers read, in converted models: attention residuals, DenseNet, U-Net++."""

import contextlib
import copy
import functools
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe
from gpipe import _C, checks
from gpipe.balance import predict, profile, suggest
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


def placements(schedule):
    """Returns the placements on two to four workers that a schedule fits: one or two stages per worker, and V."""
    loops = [list(range(workers)) for workers in (2, 3, 4)]
    fitting = []
    for placement in itertools.chain.from_iterable((loop, loop + loop, loop + loop[::-1]) for loop in loops):
        with contextlib.suppress(ValueError):
            checks.arrange_workers(None, len(placement), schedule, placement)
            fitting.append(placement)
    assert len(fitting) >= len(loops)
    return fitting


def assert_equals_the_reference(output, gradients):
    expected, of_reference = reference()
    assert torch.equal(output, expected) and gradients.keys() == of_reference.keys()
    for name, gradient in gradients.items():
        largest = of_reference[name].abs().max().item()
        torch.testing.assert_close(gradient, of_reference[name], rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize("schedule", gpipe.SCHEDULES)
def test_attention_residuals_equal_the_sequence(schedule):
    for placement, checkpoint in itertools.product(placements(schedule), ("never", "always")):
        assert_equals_the_reference(*step(schedule, placement, checkpoint))


RUNS = [("interleaved_1f1b", [0, 1, 0, 1], "always"), ("zb_v", [0, 1, 1, 0], "never")]


def steps_of_a_rank(ranks):
    return [step(*each, group=ranks) for each in RUNS]


def test_attention_residuals_over_two_ranks_equal_one_process():
    for each, (first, mine), (second, others) in zip(RUNS, *results_of(2, steps_of_a_rank), strict=True):
        output, gradients = step(*each)
        assert torch.equal(first, output) and torch.equal(second, output)
        assert len(mine) + len(others) == len(gradients)
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in (mine | others).items())


def values_of(sequence, input):
    """Returns the tensors that go from layer to layer: their bytes, the layer that makes each, and those that read it.
    A tensor that a layer changes in place becomes another one."""
    makers, readers, kept = {}, defaultdict(set), []

    def key(tensor):
        kept.append(tensor)  # so that no other tensor gets its memory
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version

    def make(index, tensor):
        makers.setdefault(key(tensor), (tensor.nbytes, index))
        return tensor

    def read(index, tensor):
        readers[key(tensor)].add(index)
        return tensor

    activation = ()
    for index, layer in enumerate(sequence):
        stashes, pops, peeks = layer.declared()
        for tensor in itertools.chain(activation, map(_C.peek, pops), map(_C.peek, peeks)):
            read(index, tensor)
        input = layer(input)
        for stashed in stashes:
            make(index, _C.peek(stashed))
        activation = [] if index + 1 == len(sequence) else [input] if torch.is_tensor(input) else input
        for tensor in activation:
            make(index, tensor)
    return [(*made, readers[each]) for each, made in makers.items()]


@pytest.mark.parametrize("workers", [2, 3])
def test_each_value_crosses_once_to_each_worker(workers):
    """A search predicts the fewest bytes possible: each value goes once to each worker that only reads it."""
    sequence, input, _ = make_sequence()
    values = values_of(sequence, input[: -(-len(input) // 2)])
    assert max(len(readers) for *_, readers in values) > 2
    candidates = suggest(sequence, input, ["cpu"] * workers, chunks=[2], seconds=0.5).candidates
    assert {len(each.placement) // workers for each in candidates} == {1, 2}
    for each in candidates:
        worker_of = [each.placement[stage] for stage, layers in enumerate(each.balance) for _ in range(layers)]
        least = sum(size * len({worker_of[i] for i in readers} - {worker_of[maker]}) for size, maker, readers in values)
        assert each.crossing == 2 * least, each.placement


class Losses(nn.Module):
    """Stands for a loss, whose bytes a profile does not have."""

    def forward(self, logits):
        return logits.logsumexp(2).mean(1)


@pytest.mark.parametrize(("placement", "checkpoint"), [([0], "never"), ([0], "always"), ([0, 0, 0], "never")])
def test_predicted_bytes_of_attention_residuals_are_the_counted_ones(placement, checkpoint):
    """On one worker, because the order of its actions does not depend on time."""
    sequence, input, _ = make_sequence()
    model = nn.Sequential(*sequence, Losses())
    balance = equal_parts(len(model), len(placement))
    options = {"chunks": 3, "checkpoint": checkpoint, "schedule": "gpipe", "placement": placement}
    pipe, timeline = gpipe.GPipe(model, balance, **options), gpipe.Timeline()
    for traced in (None, None, timeline):  # the first steps learn what layers change
        pipe.trace(traced)
        pipe.zero_grad()
        pipe.step(input[:9], input[:9], lambda output, _: output.mean())
    predicted = predict(profile(model, input[:3], seconds=0.1, repeats=1), balance, **options)
    assert predicted.timeline.peak_bytes() == pytest.approx(timeline.peak_bytes(), rel=0.02)
