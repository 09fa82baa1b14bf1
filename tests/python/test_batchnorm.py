"""Batch norm with running statistics of whole mini-batches."""

import copy

import pytest
import torch
from torch import nn

import gpipe
from gpipe.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm


def make_pipe(model, how, **options):
    if how == "option":
        return gpipe.GPipe(model, [1] * len(model), deferred_batch_norm=True, **options)
    return gpipe.GPipe(convert_deferred_batch_norm(model, options["chunks"]), [1] * len(model), **options)


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize(
    ("how", "kind", "momentum"),
    [
        ("option", nn.BatchNorm2d, 0.1),
        ("option", nn.InstanceNorm2d, 0.1),
        ("convert", nn.BatchNorm2d, None),
    ],
)
def test_statistics_equal_those_of_the_whole_mini_batch(how, kind, momentum, checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4, momentum=momentum, track_running_stats=True), nn.ReLU())
    plain = copy.deepcopy(model)
    pipe = make_pipe(model, how, chunks=4, checkpoint=checkpoint)
    for batch in (8, 3, 8):  # a batch of 3 makes only three micro-batches
        x = torch.rand(batch, 3, 8, 8)
        if batch == 3:
            pipe.step(x, x, lambda output, _: output.sum(), reduction="sum")
        else:
            pipe(x).sum().backward()
        plain(x)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(pipe[1], name), getattr(plain[1], name))
    pipe.eval()
    plain.eval()
    torch.testing.assert_close(pipe(x), plain(x))
    assert list(pipe.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_micro_batches_without_values(momentum):
    deferred = DeferredBatchNorm(2, momentum=momentum, chunks=2)
    plain = nn.BatchNorm1d(2, momentum=momentum)
    with pytest.raises(ValueError, match="more than 1 value"):  # and does not count
        deferred(torch.full((1, 2), 1e6))
    empty = torch.rand(0, 2)
    for parts in ([torch.rand(4, 2), empty], [empty, torch.rand(4, 2)], [empty, empty], [torch.rand(2, 2)] * 2):
        for part in parts:
            deferred(part)
        plain(torch.cat(parts))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(getattr(deferred, name), getattr(plain, name))


@pytest.mark.parametrize(("dtype", "mean", "rtol"), [(torch.float32, 1e4, 1e-3), (torch.bfloat16, 600, 1e-5)])
def test_the_variance_is_accurate_for_a_large_mean(dtype, mean, rtol):
    torch.manual_seed(0)
    x = (torch.randn(64, 2) * (1 if dtype == torch.float32 else 300) + mean).to(dtype)
    deferred = DeferredBatchNorm(2, chunks=2, momentum=1.0)
    for part in x.chunk(2):
        deferred(part)
    torch.testing.assert_close(deferred.running_var.double(), x.double().var(0), rtol=rtol, atol=0)


def test_converting_shares_parameters_and_buffers():
    norm = nn.BatchNorm1d(2).eval()
    converted = convert_deferred_batch_norm(norm, chunks=2)
    assert isinstance(converted, DeferredBatchNorm) and not converted.training
    assert converted.weight is norm.weight and converted.running_mean is norm.running_mean
    assert convert_deferred_batch_norm(converted, chunks=2) is converted
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    assert convert_deferred_batch_norm(untracked) is untracked
    nested = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)))
    assert isinstance(convert_deferred_batch_norm(nested)[0][0], DeferredBatchNorm)


def test_a_failed_forward_does_not_update_the_statistics():
    class Sometimes(nn.Module):
        def forward(self, x):
            if fail:
                raise ValueError
            return x

    pipe = make_pipe(nn.Sequential(nn.BatchNorm1d(2), Sometimes()), "convert", chunks=2)
    fail = True
    with pytest.raises(ValueError):
        pipe(torch.rand(4, 2))
    assert int(pipe[0].num_batches_tracked) == 0
    fail = False
    pipe(torch.rand(4, 2))
    assert int(pipe[0].num_batches_tracked) == 1


def test_states_saved_by_torchgpipe_can_be_loaded():
    pipe = gpipe.GPipe(nn.Sequential(nn.Sequential(nn.BatchNorm2d(2))), [1], deferred_batch_norm=True)
    state = {f"partitions.0.{key}": value for key, value in pipe.state_dict().items()}
    state["partitions.0.0.0.sum"] = state["partitions.0.0.0.sum_squares"] = torch.zeros(2)
    pipe.load_state_dict(state)
    norm = DeferredBatchNorm(2)
    norm.load_state_dict({**norm.state_dict(), "sum": torch.zeros(2), "sum_squares": torch.zeros(2)})
