"""Losses of a step: what their micro-batches weigh, and the comparison with the whole mini-batch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_step import batch, gradients, make_pipe, whole

WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.double)


def ignoring():
    """The second micro-batch of three samples has no target that counts, the first has one."""
    x, y = batch()
    y[1:6] = -100
    return x, y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
        functools.partial(F.cross_entropy, weight=WEIGHTS),
        functools.partial(F.cross_entropy, reduction="sum"),
    ],
)
def test_losses_of_torch_have_the_gradients_of_the_whole_mini_batch(loss, schedule):
    pipe = make_pipe(schedule=schedule)
    x, y = ignoring()
    expected, expected_gradients = whole(pipe, x, y, loss)
    torch.testing.assert_close(pipe.step(x, y, loss), expected)
    torch.testing.assert_close(gradients(pipe), list(expected_gradients))


def test_an_explicit_reduction_wins():
    pipe = make_pipe()
    x, y = batch()
    sums = [F.cross_entropy(part, target, reduction="sum") for part, target in zip(pipe(x).split(3), y.split(3))]
    mean = sum(each * len(target) / 7 for each, target in zip(sums, y.split(3)))
    torch.testing.assert_close(pipe.step(x, y, nn.CrossEntropyLoss(reduction="sum"), reduction="mean"), mean.detach())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_another_loss_is_compared_once_with_the_whole_mini_batch(checkpoint):
    pipe = make_pipe(checkpoint=checkpoint)
    x, y = ignoring()

    def total(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    for _ in range(2):
        with pytest.raises(ValueError, match="the loss of the whole mini-batch is .* check = false"):
            pipe.step(x, y, total)
    assert all(gradient is None for gradient in gradients(pipe))
    with pytest.raises(ValueError, match="but the micro-batches give nan"):
        pipe.step(x, y, lambda output, target: F.cross_entropy(output, target))
    pipe.step(x, y, total, check=False)
    pipe.step(x, y, total, reduction="sum")
    sizes = []

    def mean(output, target):
        sizes.append(len(target))
        return F.mse_loss(output[:, 0], target.double())

    pipe.step(x, y, mean)
    pipe.step(x, y, mean)
    assert sorted(sizes) == [1, 1, 3, 3, 3, 3, 7]


def test_a_loss_that_draws_or_takes_no_whole_mini_batch_is_not_compared():
    pipe = make_pipe()
    x, y = batch()

    def fixed_size(output, target):
        assert len(target) <= 3
        return output.sum()

    pipe.step(x, y, lambda output, target: F.dropout(output).square().mean())
    pipe.step(x, y, fixed_size)


def test_forward_and_backward_warn_of_another_schedule_once():
    pipe = make_pipe()
    x, _ = batch()
    with torch.no_grad():
        pipe(x)
    with pytest.warns(UserWarning, match="only step.. has schedule='1f1b'") as warned:
        pipe(x)
        pipe(x)
    assert len(warned) == 1 and warned[0].filename == __file__


def test_a_step_inside_ddp_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pipe = make_pipe()
        x, y = batch()
        ddp = nn.parallel.DistributedDataParallel(pipe)
        with pytest.raises(RuntimeError, match="inside DistributedDataParallel.* replicas"):
            ddp.module.step(x, y, F.cross_entropy)
        del ddp
        pipe.step(x, y, F.cross_entropy)
    finally:
        torch.distributed.destroy_process_group()
