"""A pipeline as a module: attributes, options, micro-batches, copies, hooks and timelines."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gpipe
from helpers import Double, make_linears


CPUS = ["cpu"] * 4


def test_attributes_and_layers():
    layers = make_linears()
    pipe = gpipe.GPipe(layers, [1, 3], devices=CPUS, chunks=42.0, checkpoint="always")
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert pipe.chunks == 42
    assert pipe.checkpoint == "always"
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert [len(partition) for partition in pipe.partitions] == [1, 3]
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert len(pipe) == 4
    assert list(pipe) == list(layers)
    assert pipe[0] is layers[0]
    assert pipe[-1] is layers[3]
    with pytest.raises(IndexError):
        pipe[4]
    with pytest.raises(TypeError):
        pipe[1:]
    assert "partitions.1.3" in dict(pipe.named_modules())


def test_repr_shows_options_and_layers():
    text = repr(gpipe.GPipe(make_linears(2), [1, 1], devices=CPUS, chunks=8, checkpoint="always"))
    first, options, *children = text.splitlines()
    assert first == "GPipe("
    assert options == "  balance=[1, 1], devices=[cpu, cpu], chunks=8, checkpoint='always', schedule='gpipe'"
    assert "(partitions)" in children[0] and text.count("Partition(") == 2
    assert text.count("Linear(in_features=3, out_features=3, bias=True)") == 2
    deferred = gpipe.GPipe(make_linears(), [2, 2], deferred_batch_norm=True)
    assert repr(deferred).splitlines()[1].endswith("checkpoint='except_last', schedule='gpipe', deferred_batch_norm=True")


def test_a_model_without_layers_returns_its_input():
    pipe = gpipe.GPipe(nn.Sequential(), [])
    x = torch.zeros(2)
    assert pipe(x) is x
    with pytest.raises(TypeError):
        pipe([1])


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_are_independent(copies):
    pipe = gpipe.GPipe(make_linears(), [2, 2], chunks=2)
    x = torch.rand(4, 3)
    expected = pipe(x)
    copied = copies(pipe)
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert torch.equal(pipe(x), expected)
    assert not torch.equal(copied(x), expected)


def replace_in_its_stage(pipe):
    pipe.partitions[1][1] = Double()


def replace_by_name(pipe):
    setattr(pipe, "3", Double())


@pytest.mark.parametrize("replace", [replace_in_its_stage, replace_by_name])
def test_layers_can_be_replaced(replace):
    pipe = gpipe.GPipe(make_linears(), [2, 2], chunks=2)
    x = torch.rand(4, 3)
    pipe(x)
    replace(pipe)
    assert isinstance(pipe[3], Double) and set(dict(pipe.named_children())) == {"partitions"}
    expected = nn.Sequential(*pipe)(x)
    y = pipe(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()


def test_hooks_of_pipeline_stages_layers_and_parameters_run():
    pipe = gpipe.GPipe(make_linears(), [2, 2], chunks=2, checkpoint="never")
    seen = []
    pipe.register_forward_hook(lambda module, args, output: seen.append("pipe"))
    pipe.partitions[1].register_forward_pre_hook(lambda module, args: seen.append("before 1"))
    pipe[3].register_forward_hook(lambda module, args, output: seen.append("after 3"))
    pipe[0].weight.register_hook(lambda gradient: seen.append("gradient"))
    pipe(torch.rand(4, 3)).sum().backward()
    assert seen == ["before 1", "after 3"] * 2 + ["pipe", "gradient"]


def test_a_timeline_records_every_action():
    pipe = gpipe.GPipe(make_linears(), [2, 2], chunks=3, checkpoint="always")
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    pipe(torch.rand(6, 3)).sum().backward()
    pipe.trace(None)
    assert timeline.workers == 2
    assert timeline.makespan() > 0
    assert timeline.to_svg().count("<title>") == 18
    assert '"traceEvents"' in timeline.to_chrome_json()
