"""Batch norm with running statistics of whole mini-batches."""

import copy

import pytest
import torch
from torch import nn

import gpipe
from gpipe.batchnorm import DeferredBatchNorm

convert_deferred_batch_norm = DeferredBatchNorm.convert_deferred_batch_norm


@pytest.mark.parametrize(("convert", "norm"), [(False, nn.BatchNorm2d(4)), (True, nn.BatchNorm2d(4, momentum=None))])
def test_statistics_equal_those_of_the_whole_mini_batch(convert, norm):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(norm), nn.ReLU())
    model = copy.deepcopy(plain)
    if convert:
        model = convert_deferred_batch_norm(model)
    pipe = gpipe.GPipe(model, [1, 1, 1], chunks=4, checkpoint="always", deferred_batch_norm=not convert)
    for batch in (8, 3, 8):  # a batch of 3 makes only three micro-batches
        x = torch.rand(batch, 3, 8, 8)
        if batch == 3:
            pipe.step(x, x, gpipe.Loss(lambda output, _: output.sum(), reduction="sum"))
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


def test_the_variance_is_accurate_for_a_large_mean():
    torch.manual_seed(0)
    x = (torch.randn(64, 2) * 3000 + 1e5).bfloat16()
    deferred = DeferredBatchNorm(2, chunks=2, momentum=1.0)
    for part in x.chunk(2):
        deferred(part)
    torch.testing.assert_close(deferred.running_var.double(), x.double().var(0), rtol=1e-5, atol=0)


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
