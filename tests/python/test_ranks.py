"""Pipelines over several processes. They must compute the same bits as in one process."""

import copy
import pickle
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe import structure
from helpers import Add, Join, Mix, Pair, Split, Stash, named_gradients, results_of, run_job
from small_models import Returns


def make_model(in_device="cpu"):
    torch.manual_seed(0)
    with torch.device(in_device):
        return nn.Sequential(
            nn.Linear(4, 6),
            Stash(),
            nn.BatchNorm1d(6),
            Split(),
            Join(),
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
            Add(),
            nn.Linear(6, 3),
        )


def batch(samples=11):
    torch.manual_seed(1)
    return torch.randn(samples, 4), torch.randint(3, (samples,))


def own_layers(ranks):
    model = make_model("meta")
    layers = list(model)
    pipe = gpipe.GPipe(model, [2, 2, 2, 2], placement="v", group=ranks)
    for copied in (lambda: copy.deepcopy(pipe), lambda: pickle.dumps(pipe), lambda: pickle.dumps(ranks)):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied()
    on_meta = [index for index, layer in enumerate(layers) if any(p.is_meta for p in layer.parameters())]
    return [layers.index(layer) for layer in pipe], list(pipe.state_dict()), on_meta


def test_each_rank_holds_its_own_layers_only():
    first, second = results_of(2, own_layers)
    assert first == ([0, 1, 6, 7], ["0.weight", "0.bias", "7.weight", "7.bias"], [2, 5])
    assert second[::2] == ([2, 3, 4, 5], [0, 7])


def test_a_pipeline_without_a_group_warns_in_a_job_of_several_processes(monkeypatch, recwarn):
    monkeypatch.setenv("WORLD_SIZE", "1")
    gpipe.GPipe(make_model(), [8])
    assert not recwarn.list
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4, .* a whole pipeline of its own; pass group=gpipe.Ranks.from_env"):
        gpipe.GPipe(make_model(), [8])


def misuse(ranks):
    for arguments, error, message in (
        ({"group": 3}, TypeError, "process group"),
        ({"group": dist.GroupMember.NON_GROUP_MEMBER}, TypeError, "process group"),
        ({"balance": [8]}, ValueError, "1 workers, but the job has 2 ranks"),
        ({"module": nn.Sequential(), "balance": []}, ValueError, "no layers"),
    ):
        with pytest.raises(error, match=message):
            gpipe.GPipe(**{"module": make_model(), "balance": [4, 4], "group": ranks} | arguments)
    pipes = [gpipe.GPipe(make_model(), [4, 4], group=dist.group.WORLD) for _ in range(2)]
    assert pipes[0].ranks is pipes[1].ranks is not ranks
    for timeout in (-1, float("inf")):
        with pytest.raises(ValueError, match="must be positive and below"):
            gpipe.Ranks(dist.group.WORLD, timeout=timeout)
    pipe = gpipe.GPipe(make_model(), [4, 4], chunks=2, schedule="auto", group=ranks)
    pipe.step(*batch(8), F.cross_entropy)
    if ranks.rank:
        setattr(pipe, "7", nn.Linear(6, 3))
    with pytest.raises(RuntimeError, match="make a new pipeline on all ranks"):
        pipe.step(*batch(8), F.cross_entropy)
    return pipe.schedule


def test_misuse_is_refused():
    schedule, other = results_of(2, misuse)
    assert schedule == other and schedule in gpipe.SCHEDULES


def call_differently(ranks):
    """Each error of rank 1 ends the same call of rank 0. The calls stay in step."""
    pipe = gpipe.GPipe(make_model(), [4, 4], chunks=2, group=ranks)
    x, y = batch(8)
    scaler = torch.amp.GradScaler("cpu")
    wrong = [
        (lambda: pipe.team.largest(3), lambda: pipe.team.largest(-1)),
        (lambda: pipe.team.sum_over_replicas([3.0]), lambda: pipe.team.sum_over_replicas(["3"])),
        (lambda: pipe.team.gather(b"a"), lambda: pipe.team.gather("a")),
        (lambda: pipe.team.gather_timeline(gpipe.Timeline()), lambda: pipe.team.gather_timeline(None)),
        (lambda: pipe.clip_grad_norm_(1.0), lambda: pipe.clip_grad_norm_("x")),
        (lambda: pipe.step(x, y, F.cross_entropy), lambda: pipe.step(x, y, F.cross_entropy, scale=scaler)),
        (lambda: pipe.step(x, y, F.cross_entropy), lambda: pipe.step("x", y, F.cross_entropy)),
        (lambda: pipe(x), lambda: pipe(x, y)),
    ]
    for right, other in wrong:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            (other if ranks.rank else right)()
        assert pipe.team.largest(7 + ranks.rank) == 8
    pipe.step(x, y, F.cross_entropy)


def test_calls_stay_in_step_after_an_error_of_one_rank():
    results_of(2, call_differently)


def end_early(ranks):
    pipe = gpipe.GPipe(make_model(), [4, 4], chunks=2, group=ranks)
    if ranks.rank == 1:
        raise FileNotFoundError("no data")
    pipe.step(*batch(8), F.cross_entropy)


def test_a_rank_that_ends_early_ends_the_calls_of_the_others():
    (_, first), (_, second) = run_job(2, end_early)
    assert "rank 1 failed: FileNotFoundError: no data" in first and second == "FileNotFoundError: no data"


def trim(tokens):
    """Leaves out the positions that are padding, 0, in all samples of a micro-batch."""
    return tokens[:, : int((tokens != 0).sum(1).max())]


def train_on_sequences(ranks, steps=8):
    """The lengths differ between steps, and between the micro-batches of each."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0, batch_first=True)
    model = nn.Sequential(Returns(trim), nn.Embedding(20, 8), encoder, Returns(lambda x: x[:, -1]), nn.Linear(8, 3))
    losses, shapes, gradients = [], [], []
    model[2].register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(lambda _: gradients.append(None)) and None)
    pipe = gpipe.GPipe(model, [2, 3], chunks=4, schedule="1f1b", group=ranks)
    pipe[1].register_forward_hook(lambda *arguments: shapes.append(arguments[-1].shape))
    for _ in range(steps):
        lengths = torch.randint(2, 9 + 3 * len(losses), (8,))
        tokens = torch.randint(1, 20, (8, int(lengths.max()))) * (torch.arange(lengths.max()) < lengths[:, None])
        losses.append(pipe.step(tokens, torch.randint(3, (8,)), F.cross_entropy))
    return losses, named_gradients(pipe), (len(set(shapes)), len(gradients))


def test_the_lengths_of_sequences_change_between_steps_and_micro_batches():
    losses, gradients, (lengths, hooks) = train_on_sequences(None)
    (ours, first, _), (theirs, second, (_, of_received)) = results_of(2, train_on_sequences)
    assert lengths > 8 and ours == theirs == losses
    assert of_received == hooks == 8 * 4  # once per step and micro-batch
    assert (first | second).keys() == gradients.keys()
    assert all(torch.equal(gradient, (first | second)[name]) for name, gradient in gradients.items())


def test_only_containers_are_decoded():
    for value in (
        {"a": (torch.ones(1), None), 3: torch.ones(1)},
        Pair(torch.ones(1), None),
        [OrderedDict(b=torch.ones(1)), torch.ones(1, 1).max(1)],
    ):
        tensors, taken = structure.take_apart(value)
        copied = structure.decode(structure.encode(taken))
        assert copied == taken and copied.build(tensors) == value
    harmful = ['["os:system", null, ["x"]]', '["torch:Tensor", null, [true]]', '["builtins:str", null, [true]]', '"os:system"']
    for text in (*harmful, '["builtins:dict", [["a"]], [true]]', "3", "", "?", "[" * 5000 + "]" * 5000):
        with pytest.raises(ValueError, match="not a structure"):
            structure.decode(text.encode())
    local = NamedTuple("local", [("a", Tensor)])
    for value in (local(torch.ones(1)), {(1, 2): torch.ones(1)}, {b"a": torch.ones(1)}):
        with pytest.raises(TypeError, match="cannot go to another rank"):
            structure.encode(structure.take_apart(value)[1])


def test_a_model_without_initial_values_is_initialized_by_its_layers():
    def make(balance):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(5, 3), nn.MultiheadAttention(3, 1), nn.BatchNorm1d(3), nn.Linear(3, 5))
        model[3].weight = model[0].weight
        torch.manual_seed(0)
        return gpipe.GPipe(model, balance).state_dict()

    one, three = make([4]), make([1, 2, 1])
    assert all(torch.equal(one[name], three[name]) for name in one) and one.keys() == three.keys()
    assert torch.equal(one["0.weight"], one["3.weight"]) and one["0.weight"].std() > 0.5  # as Embedding draws them
    assert torch.equal(one["1.in_proj_bias"], torch.zeros(9)) and torch.equal(one["2.running_var"], torch.ones(3))
    with pytest.raises(ValueError, match="layer '0' has a Mix on the meta device without reset_parameters"):
        gpipe.GPipe(nn.Sequential(Mix(nn.Parameter(torch.ones(2, 2))).to("meta")), [1])
