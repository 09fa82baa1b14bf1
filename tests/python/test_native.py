"""Stages of converted models that run without Python, and what makes them run with it."""

import copy
import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from gpipe.losses import native_loss
from helpers import named_gradients
from small_models import batch, make_net

CHUNKS = 3


def make_pipe(checkpoint="except_last", schedule="1f1b"):
    net, x, y = make_net(), batch(9), torch.randint(3, (9,))
    sequence = gpipe.to_sequential(net, x, native=True)
    return gpipe.GPipe(sequence, [6, 6], chunks=CHUNKS, checkpoint=checkpoint, schedule=schedule), x, y


def entered_in(pipe, step):
    """Returns the names of the Python functions that the workers enter in a step."""
    entered = []

    def on_each_worker(function):
        def hook(*_):
            sys.setprofile(function)

        handles = [stage[0].register_forward_pre_hook(hook) for stage in pipe.partitions]
        step()
        for handle in handles:
            handle.remove()

    on_each_worker(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    assert "forward" in entered  # with hooks, layers run as Python modules
    entered.clear()
    step()
    names = list(entered)
    on_each_worker(None)
    return names


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_step_enters_no_python_function(checkpoint):
    pipe, x, y = make_pipe(checkpoint)
    assert entered_in(pipe, lambda: pipe.step(x, y, F.cross_entropy)) == []

    def loss(output, target):
        return F.cross_entropy(output, target)

    assert entered_in(pipe, lambda: pipe.step(x, y, loss)).count("loss") == CHUNKS


def results_of(pipe, x, y):
    torch.manual_seed(1)
    loss = pipe.step(x, y, F.cross_entropy)
    return loss, named_gradients(pipe), {name: buffer.clone() for name, buffer in pipe.named_buffers()}


def test_layers_compute_the_same_with_python():
    native, x, y = make_pipe("always")
    hooked, *_ = make_pipe("always")
    seen = []
    hooked[0].register_forward_hook(lambda *_: seen.append(None))
    torch.testing.assert_close(results_of(native, x, y), results_of(hooked, x, y), rtol=0, atol=0)
    assert len(seen) == 2 * CHUNKS


def test_a_recompute_repeats_what_its_forward_did():
    """Modes, hooks and parameters change between a forward and its backward."""
    pipe, x, y = make_pipe("always", "gpipe")
    expected, *_ = make_pipe("always", "gpipe")
    for each in (pipe, expected):
        torch.manual_seed(1)
        loss = F.cross_entropy(each(x), y)
        if each is pipe:
            each.eval()
            handle = each[0].register_forward_hook(lambda *_: pytest.fail("the forward had no hook"))
            with torch.no_grad():
                handle.remove()
                each(x)
            each[0].register_forward_hook(lambda *_: pytest.fail("the forward had no hook"))
        loss.backward()
    torch.testing.assert_close(named_gradients(pipe), named_gradients(expected), rtol=0, atol=0)


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0])
LOSSES = [
    nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, label_smoothing=0.1),
    functools.partial(F.cross_entropy, reduction="sum", weight=WEIGHT),
    functools.partial(F.nll_loss, ignore_index=1),
    nn.MSELoss(reduction="sum"),
    F.l1_loss,
    functools.partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT),
    nn.BCEWithLogitsLoss(weight=WEIGHT),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_torch_are_computed_without_python(loss, monkeypatch):
    assert native_loss(loss) is not None
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    of_classes = "ignore_index" in gpipe.losses._settings_of(loss)
    x, y = torch.randn(8, 4), torch.randint(4, (8,)) if of_classes else torch.rand(8, 4)
    results = []
    for _ in range(2):
        pipe = gpipe.GPipe(copy.deepcopy(model), [1, 1], chunks=CHUNKS)
        results.append((pipe.step(x, y, loss), named_gradients(pipe)))
        monkeypatch.setattr("gpipe.pipeline.native_loss", lambda loss: None)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_what_only_the_python_loss_does():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(4, 4)), [1], chunks=2)
    x, y = torch.randn(8, 4), torch.rand(8, 4)
    with pytest.warns(UserWarning, match="target size"):
        pipe.step(x, y[:, :1], F.mse_loss)
    hooked, seen = nn.MSELoss(), []
    hooked.register_forward_hook(lambda *_: seen.append(None))
    pipe.step(x, y, gpipe.Loss(hooked, check=False))
    assert len(seen) == 2
    for loss in (nn.Linear(4, 1), nn.GaussianNLLLoss(), lambda output, target: output.sum(), F.kl_div):
        assert native_loss(loss) is None
