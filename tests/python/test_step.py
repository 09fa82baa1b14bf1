"""Training steps: losses, schedules, placements and split backwards."""

import contextlib
import copy
import functools
import gc
import pickle
import sys
import types
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from helpers import Add, Stash, gradients, notes


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Stash(), nn.Linear(6, 6), nn.Tanh(), Add(), nn.Linear(6, 3)).double()


def make_pipe(schedule="1f1b", **options):
    options = {"chunks": 3, "checkpoint": "always"} | options
    return gpipe.GPipe(make_model(), [2, 4], schedule=schedule, **options)


def batch(samples=7):
    torch.manual_seed(1)
    return torch.randn(samples, 4, dtype=torch.double), torch.randint(3, (samples,))


def test_a_grad_scaler_scales_gradients():
    pipe, plain, (x, y) = make_pipe(), make_pipe(), batch()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.testing.assert_close(pipe.step(x, y, F.cross_entropy, scale=scaler), plain.step(x, y, F.cross_entropy))
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        assert all(map(torch.equal, pipe.parameters(), plain.parameters()))  # powers of two are exact


def test_an_error_of_the_loss_is_raised_unchanged_and_leaves_no_gradients():
    pipe, error = make_pipe(), KeyError("from the loss")

    def loss(output, target):
        raise error

    with pytest.raises(KeyError) as raised:
        pipe.step(*batch(), loss)
    assert raised.value is error and gradients(pipe) == [None] * 6
    if sys.version_info >= (3, 11):  # exceptions have notes
        assert notes(error)[-1] == "[gpipe] in the recompute of micro-batch 0 on stage 1, layer 'loss'"


def test_the_first_step_chooses_a_schedule():
    pipe, timeline, (x, y) = make_pipe(schedule="auto", chunks=4), gpipe.Timeline(), batch(8)
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, y, lambda output, target: 1 / 0)
    assert pipe.schedule == "auto"
    pipe.trace(timeline)
    named = make_pipe(schedule="1f1b", chunks=4)
    for _ in range(2):
        assert torch.equal(pipe.step(x, y, F.cross_entropy), named.step(x, y, F.cross_entropy))
        assert all(torch.equal(a, b) for a, b in zip(gradients(pipe), gradients(named), strict=True))
    assert timeline.workers == 2 and '"0I1"' in timeline.to_chrome_json() and pipe.schedule != "auto"
    assert copy.deepcopy(pipe).schedule == pipe.schedule
    assert gpipe.GPipe(make_model(), [1, 2, 1, 2], devices=["cpu"] * 2, schedule="auto").placement == [0, 1, 0, 1]


WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.double)


def ignoring():
    """The second micro-batch of three samples has no target that counts, the first has one."""
    x, y = batch()
    y[1:6] = -100
    return x, y


@pytest.mark.parametrize(("loss", "count"), [
    (F.cross_entropy, None),
    (nn.CrossEntropyLoss(reduction="sum"), None),
    (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), None),
    (functools.partial(F.cross_entropy, weight=WEIGHTS), None),
    (functools.partial(F.cross_entropy, reduction="sum"), None),
    (lambda *both: F.cross_entropy(*both, weight=WEIGHTS), lambda target: WEIGHTS[target[target >= 0]].sum()),
])  # fmt: skip
def test_losses_have_the_gradients_of_the_whole_mini_batch(loss, count):
    pipe, (x, y) = make_pipe(), ignoring()
    expected = loss(nn.Sequential(*pipe)(x), y)
    expected_gradients = torch.autograd.grad(expected, list(pipe.parameters()))
    counted = gpipe.Loss(loss, count=count)
    torch.testing.assert_close(pipe.step(x, y, counted), expected)
    torch.testing.assert_close(gradients(pipe), list(expected_gradients))
    assert gpipe.losses.check_loss(counted, pipe(x), y, 3) == pytest.approx((expected.item(), expected.item()))


def test_another_loss_is_compared_once_with_the_whole_mini_batch():
    pipe, (x, y) = make_pipe(), ignoring()

    def total(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    for _ in range(2):
        with pytest.raises(ValueError, match="the loss of the whole mini-batch is .* turn check off"):
            pipe.step(x, y, total)
    assert all(gradient is None for gradient in gradients(pipe))
    with pytest.raises(ValueError, match="but the micro-batches give nan"):
        pipe.step(x, y, lambda output, target: F.cross_entropy(output, target))
    pipe.step(x, y, gpipe.Loss(total, check=False))
    pipe.step(x, y, gpipe.Loss(total, reduction="sum"))
    # A loss that draws, or that takes no whole mini-batch, is not compared. A harmless hook changes no count.
    pipe.step(x, y, lambda output, target: F.dropout(output).square().mean())
    pipe.step(x, y, lambda output, target: output.sum() if len(target) <= 3 else 1 / 0)
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(pipe.step(x, y, hooked), hooked(pipe(x), y).detach())


def squares(output, target, total):
    return (output - target).square().sum() if total else (output - target).square().mean()


class Squares(nn.Module):
    def __init__(self, total):
        super().__init__()
        self.total = total

    def forward(self, output, target):
        return squares(output, target, self.total)


@pytest.mark.parametrize("make", [
    Squares,
    lambda total: Squares(total).forward,
    lambda total: lambda output, target: squares(output, target, total),
    lambda total: functools.partial(squares, total=total),
])  # fmt: skip
def test_each_loss_is_compared_once(make, monkeypatch):
    compared = []
    monkeypatch.setattr("gpipe.pipeline.hold_state", lambda *_: compared.append(None) or (lambda: None))
    x, y = torch.randn(7, 4).double(), torch.randn(7, 3).double()
    pipe, right = make_pipe(), make(False)
    for _ in range(3):
        pipe.step(x, y, right.__self__.forward if isinstance(right, types.MethodType) else right)
    assert len(compared) == 1
    for wrong in (make(True), gpipe.Loss(right, count=lambda target: 1)):
        with pytest.raises(ValueError, match="the loss of the whole mini-batch is"):
            pipe.step(x, y, wrong)
    loss = gpipe.Loss(right)
    for each in (pipe, pipe, make_pipe()):
        each.step(x, y, loss)
    assert len(compared) == 4
    for _ in range(2):  # made anew
        pipe.step(x, y, make(False))
    assert len(compared) == 6
    assert pickle.loads(pickle.dumps(gpipe.Loss(F.mse_loss, reduction="sum"))).reduction == "sum"


def test_losses_made_anew_are_told_and_not_kept():
    pipe, (x, y), alive = make_pipe(), batch(), weakref.WeakSet()
    with pytest.warns(UserWarning, match="made anew in each step; make it once, before the loop") as warned:
        for _ in range(6):
            loss = lambda output, target: output.square().mean()  # noqa: E731
            alive.add(loss)
            pipe.step(x, y, loss)
    assert len(warned) == 1 and warned[0].filename == __file__
    del loss
    gc.collect()
    assert not alive


class Meter:
    total = 0


TOTAL = Meter()


def test_the_comparison_leaves_the_state_of_a_loss():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.center, self.mean = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.zeros(3))
            self.calls, self.means, self.of_sizes, self.meter = 0, [], Counter(), Meter()

        def forward(self, output, target):
            self.calls += 1
            self.mean = output.detach().mean(0)
            self.center.lerp_(self.mean, 0.1)
            self.means.append(self.mean.clone())
            self.meter.total += 1
            self.of_sizes[len(output)] += 1
            return (output * self.scale).square().mean()

    def state_after(way, check):
        module, x, calls, kept = Centered().double(), batch()[0], 0, torch.zeros(3).double()

        def function(output, target):
            nonlocal calls
            calls += 1
            TOTAL.total += 1
            kept.add_(output.detach().sum(0))
            return module(output, target)

        ways = {"module": module, "function": function, "partial": functools.partial(function), "method": module.forward}
        TOTAL.total = 0
        make_pipe().step(x, x, gpipe.Loss(ways[way], check=check))
        tensors = [module.center, module.mean, kept, module.scale.grad]
        return [module.calls, calls, module.meter.total, TOTAL.total, module.of_sizes, *module.means, *tensors]

    for way in ("module", "function", "partial", "method"):
        compared = state_after(way, True)
        assert compared[0] == 3
        torch.testing.assert_close(compared, state_after(way, False), rtol=0, atol=0)
    x = batch()[0]
    make_pipe().step(x, x[:, :3], torch.jit.script(nn.MSELoss()))  # whose buffers are not in a dict


def ignores_class_0(module, inputs):
    return inputs[0], torch.where(inputs[1] == 0, -100, inputs[1])


def total_of_classes(output, target, **_):
    return F.nll_loss(output, target, reduction="sum")


@pytest.mark.parametrize("change", [
    lambda loss, patch: setattr(loss, "forward", total_of_classes),
    lambda loss, patch: patch.setattr(nn.CrossEntropyLoss, "forward", lambda self, *both: total_of_classes(*both)),
    lambda loss, patch: loss.register_forward_pre_hook(ignores_class_0),
    lambda loss, patch: nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: ignores_class_0(module, inputs) if module is loss else None
    ),
    lambda loss, patch: patch.setattr(F, "cross_entropy", total_of_classes),
])  # fmt: skip
def test_a_loss_of_torch_that_was_changed_is_compared(change, monkeypatch):
    x, y = batch(9)
    y[:] = torch.tensor([0, 0, 0, 1, 2, 1, 2, 2, 2])
    loss, function = nn.CrossEntropyLoss(), F.cross_entropy
    with change(loss, monkeypatch) or contextlib.nullcontext():
        for each in [loss] if F.cross_entropy is function else [loss, F.cross_entropy]:
            with pytest.raises(ValueError, match="the loss of the whole mini-batch is"):
                make_pipe().step(x, y, each)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_that_ignores_targets_is_refused_without_a_count_that_is_right(dtype):
    x, y = batch(9)
    pipe, x = make_pipe(checkpoint="never").to(dtype), x.to(dtype)
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)  # all losses are equal: only gradients differ

    def loss(output, target):
        return F.cross_entropy(output, target)

    pipe.step(x, y, loss)
    y[:2] = -100
    for wrong in (loss, gpipe.Loss(loss, reduction="mean"), gpipe.Loss(F.cross_entropy, count=len)):
        with pytest.raises(ValueError, match="gradients that are .* % off; if the loss ignores some targets, give count"):
            pipe.step(x, y, wrong)
    pipe.step(x, y, gpipe.Loss(loss, count=lambda target: (target >= 0).sum()))
