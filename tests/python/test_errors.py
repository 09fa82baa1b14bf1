"""Errors of layers are raised unchanged, and the pipeline works after them."""

import pytest
import torch
from torch import nn

import gpipe
from helpers import Double, Fail, FailBackward


def notes(error):
    return getattr(error, "__notes__", [])


def test_an_error_in_a_forward_gets_a_note_of_its_place():
    error = ValueError("from the layer")
    pipe = gpipe.GPipe(nn.Sequential(Double(), nn.Sequential(Double(), Fail(error))), [1, 1], chunks=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="from the layer") as raised:
            pipe(torch.zeros(4, 1))
        assert raised.value is error
        assert "forward" in [entry.name for entry in raised.traceback]
        assert notes(error)[-1] == "[gpipe] in the forward of micro-batch 0 on stage 1, layer '1'"


def test_a_batch_norm_that_gets_one_sample_tells_what_to_do():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        gpipe.GPipe(model, [1, 1], chunks=2)(torch.rand(2, 3))
    assert "use fewer chunks" in notes(raised.value)[0] and "drop_last=True" in notes(raised.value)[0]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_error_in_a_backward_gets_a_note_of_its_place(checkpoint):
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), FailBackward()), [1, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        y = pipe(torch.zeros(4, 1))
        with pytest.raises(ZeroDivisionError, match="from the backward") as raised:
            y.sum().backward()
        assert notes(raised.value)[0].startswith("[gpipe] in the backward of micro-batch 1 on stage 1")
        assert pipe[0].weight.grad is None
    assert torch.equal(pipe(torch.ones(2, 1)), pipe[0](torch.ones(2, 1)))


def test_an_error_in_a_recompute_gets_a_note_of_its_place():
    class FailLater(nn.Module):
        def forward(self, x):
            if gpipe.is_recomputing():
                raise LookupError("not twice")
            return x

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), FailLater()), [1, 1], checkpoint="always")
    with pytest.raises(LookupError, match="not twice") as raised:
        pipe(torch.zeros(4, 1)).sum().backward()
    assert notes(raised.value) == ["[gpipe] in the recompute of micro-batch 0 on stage 1, layer '1'"]


def test_only_tensors_cross_a_cut():
    class Collect(nn.Module):
        def forward(self, x):
            return {x, x}

    class First(nn.Module):
        def forward(self, xs):
            return next(iter(xs))

    with pytest.raises(TypeError, match="expected Tensor, but got <class 'set'>") as raised:
        gpipe.GPipe(nn.Sequential(Collect(), First()), [1, 1])(torch.zeros(1))
    assert "on stage 0" in notes(raised.value)[0]
    # Within a stage, layers may pass any object.
    assert gpipe.GPipe(nn.Sequential(Collect(), First()), [2])(torch.zeros(1)).shape == (1,)


def test_layers_learn_whether_they_are_recomputed():
    seen = []

    class Note(nn.Module):
        def forward(self, x):
            seen.append((gpipe.is_checkpointing(), gpipe.is_recomputing(), torch.is_grad_enabled()))
            return x * 1

    pipe = gpipe.GPipe(nn.Sequential(Note()), [1], chunks=2, checkpoint="except_last")
    # The first checkpointed forward builds its graph, to learn which outputs need gradients.
    for first in (True, False):
        pipe(torch.zeros(2, 1, requires_grad=True)).sum().backward()
        assert seen == [(True, False, first), (False, False, True), (False, True, True)]
        seen.clear()
    pipe.eval()
    pipe(torch.zeros(2, 1, requires_grad=True)).sum().backward()
    assert seen == [(False, False, True)] * 2
    assert not gpipe.is_checkpointing() and not gpipe.is_recomputing()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_errors_of_the_pipeline_itself_get_a_note_of_their_place(checkpoint):
    """The error has the same type and note in a recompute as in a forward."""
    foreign = torch.ones(1, requires_grad=True)

    class Use(nn.Module):
        def forward(self, x):
            return x * foreign

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Use()), [1, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(ValueError, match="parameter.* nor an input") as raised:
        pipe(torch.zeros(4, 1)).sum().backward()
    # Of the second cell: the first cell could have made the leaf itself.
    what = "forward" if checkpoint == "never" else "recompute"
    assert notes(raised.value)[-1].startswith(f"[gpipe] in the {what} of micro-batch 1 on stage 1")
