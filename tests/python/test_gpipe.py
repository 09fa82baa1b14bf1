"""A pipeline as a module: attributes, options, micro-batches, copies, hooks and timelines."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

import gpipe
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
    text = repr(gpipe.GPipe(layers, [2, 2], chunks=8, checkpoint="always", deferred_batch_norm=True))
    options = "balance=[2, 2], devices=[cpu, cpu], chunks=8, checkpoint='always', schedule='gpipe'"
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


def test_parameters_and_layers_can_be_replaced():
    pipe, x = gpipe.GPipe(make_linears(), [2, 2], chunks=2), torch.rand(4, 3)
    for replace in (
        lambda: None,
        lambda: setattr(pipe[3], "weight", nn.Parameter(torch.eye(3))),
        lambda: pipe.partitions[1].__setitem__(1, Double()),
        lambda: setattr(pipe, "3", nn.Tanh()),
    ):
        replace()
        torch.testing.assert_close(pipe(x), nn.Sequential(*pipe)(x))


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
