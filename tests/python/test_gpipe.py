"""A pipeline as a module: attributes, options, copies and hooks. Batch norm with running statistics of whole mini-batches."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

import gpipe
from gpipe.batchnorm import DeferredBatchNorm
from helpers import Double, make_linears, make_tied_model, tied_batch


def test_attributes_and_layers():
    layers = make_linears()
    pipe = gpipe.GPipe(layers, [1, 3], devices=["cpu"] * 4, chunks=42.0, checkpoint="always")
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == ([1, 3], 42, "always")
    assert pipe.devices == [torch.device("cpu")] * 2 and pipe.module is layers
    assert [len(partition) for partition in pipe.partitions] == [1, 3]
    assert len(pipe) == 4 and list(pipe) == list(layers) and pipe[-1] is layers[3]
    for wrong, error in ((4, IndexError), (slice(1, None), TypeError)):
        with pytest.raises(error):
            pipe[wrong]
    assert dict(pipe.named_modules()).keys() == dict(layers.named_modules()).keys()
    text = repr(gpipe.GPipe(layers, [2, 2], chunks=8, checkpoint="always", placement=[1, 0], deferred_batch_norm=True))
    options = "balance=[2, 2], devices=[cpu, cpu], chunks=8, checkpoint='always', schedule='gpipe', placement=[1, 0]"
    assert text.startswith(f"GPipe(\n  {options}, deferred_batch_norm=True\n") and text.count("Linear(in_features=3") == 4
    x, empty = torch.zeros(2), gpipe.GPipe(nn.Sequential(), [])
    assert empty(x) is x
    with pytest.raises(TypeError):
        empty([1])


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_are_independent(copies):
    pipe = gpipe.GPipe(make_tied_model(), [1, 1, 2, 3], chunks=2, schedule="interleaved_1f1b", devices=["cpu"] * 2)
    x, y = tied_batch()
    expected = pipe.step(x, y, nn.functional.cross_entropy)
    copied = copies(pipe)
    assert (copied.schedule, copied.placement) == ("interleaved_1f1b", [0, 1, 0, 1])
    assert copied[0].weight is copied[6].weight
    assert torch.equal(copied.step(x, y, nn.functional.cross_entropy), expected)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert torch.equal(pipe.step(x, y, nn.functional.cross_entropy), expected)
    assert not torch.equal(copied.step(x, y, nn.functional.cross_entropy), expected)
    copied.partitions[3][2] = layer = Double()
    assert copied[6] is copied.module[6] is layer


def test_hooks_of_pipeline_stages_layers_and_parameters_run():
    pipe = gpipe.GPipe(make_linears(), [2, 2], chunks=2, checkpoint="never")
    seen = []
    pipe.register_forward_hook(lambda module, args, output: seen.append("pipe"))
    pipe.partitions[1].register_forward_pre_hook(lambda module, args: seen.append("before 1"))
    pipe[3].register_forward_hook(lambda module, args, output: seen.append("after 3"))
    pipe[0].weight.register_hook(lambda gradient: seen.append("gradient"))
    pipe[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    pipe(torch.rand(4, 3)).sum().backward()
    assert seen == ["before 1", "after 3"] * 2 + ["pipe", "gradient", "accumulated"]


def test_dtypes_change_and_the_present_device_stays():
    pipe = gpipe.GPipe(make_linears(), [2, 2])
    weight = pipe[0].weight
    for arguments in (["cpu"], [torch.device("cpu", 0)], [torch.zeros(1)]):
        assert pipe.to(*arguments) is pipe is pipe.cpu() is pipe.to(device="cpu", non_blocking=True)
        assert pipe[0].weight is weight and weight.dtype == torch.float32
    for move in (lambda: pipe.to("cpu", torch.float64), lambda: pipe.half().to(torch.float64)):
        assert move() is pipe
        assert pipe(torch.zeros(2, 3, dtype=torch.float64)).dtype == pipe[0].weight.dtype == torch.float64
    nn.Sequential(pipe).to("cpu", torch.float32)
    assert pipe(torch.zeros(2, 3)).dtype == torch.float32


def test_the_names_of_the_package_are_few_and_those_of_torchgpipe_are_where_it_has_them():
    assert len(gpipe.__all__) <= 14 and all(hasattr(gpipe, name) for name in gpipe.__all__)
    for module, names in {
        "": "GPipe is_checkpointing is_recomputing",
        ".balance": "balance_by_time balance_by_size",
        ".batchnorm": "DeferredBatchNorm",
        ".checkpoint": "is_checkpointing is_recomputing",
        ".skip": "skippable stash pop Namespace verify_skippables",
    }.items():
        for name in names.split():
            assert hasattr(importlib.import_module(f"gpipe{module}"), name), name


@pytest.mark.parametrize(("convert", "norm"), [(False, nn.BatchNorm2d(4)), (True, nn.BatchNorm2d(4, momentum=None))])
def test_statistics_equal_those_of_the_whole_mini_batch(convert, norm):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(norm), nn.ReLU())
    model = copy.deepcopy(plain)
    if convert:
        model = DeferredBatchNorm.convert_deferred_batch_norm(model)
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


def test_converting_shares_parameters_and_buffers():
    norm = nn.BatchNorm1d(2).eval()
    converted = DeferredBatchNorm.convert_deferred_batch_norm(norm, chunks=2)
    assert isinstance(converted, DeferredBatchNorm) and not converted.training
    assert converted.weight is norm.weight and converted.running_mean is norm.running_mean
    assert DeferredBatchNorm.convert_deferred_batch_norm(converted, chunks=2) is converted
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    assert DeferredBatchNorm.convert_deferred_batch_norm(untracked) is untracked
    nested = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)))
    assert isinstance(DeferredBatchNorm.convert_deferred_batch_norm(nested)[0][0], DeferredBatchNorm)
