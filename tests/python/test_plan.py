"""Profiles, balances and plans: how from_module() chooses one. Evaluation and verification of a pipeline."""

import json
import re
import threading
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
import typed_program
from gpipe import balance
from helpers import Add, Double, Fail, Stash, make_tied_model, tied_batch
from test_ranks import batch as ranked_batch
from test_ranks import make_model as make_ranked_model


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 3))


def test_a_plan_keeps_what_is_given_and_makes_an_equal_pipeline_without_measuring(monkeypatch):
    x, y = torch.randn(12, 8), torch.randint(3, (12,))
    given = {"chunks": 3, "checkpoint": "always", "schedule": "1f1b"}
    pipe = gpipe.GPipe.from_module(perceptron(), x, stages=2, seconds=0.1, **given)
    plan = json.loads(json.dumps(pipe.plan))
    own = {"deferred_batch_norm": False, "keep_memory": True}
    assert plan == {"balance": pipe.balance, "placement": [0, 1], **given, **own}
    pipe.plan["balance"].clear()
    assert plan == pipe.plan
    monkeypatch.setattr("gpipe.planning.plan", None)
    again = gpipe.GPipe.from_module(perceptron(), x, **plan)
    assert again.plan == plan
    loss = F.cross_entropy
    assert torch.equal(again.step(x, y, loss), gpipe.GPipe(perceptron(), **plan).step(x, y, loss))


@pytest.mark.parametrize("given, measures", [
    ({"balance": [4, 5]}, True),
    ({"balance": [2, 2, 2, 3], "devices": ["cpu"] * 2, "placement": "v"}, True),
    ({"balance": [4, 5], "schedule": "1f1b", "chunks": 3}, True),
    ({"balance": [2, 2, 2, 3], "devices": ["cpu"] * 2, "schedule": "zb_v"}, True),
    ({"placement": [1, 0], "schedule": "gpipe"}, True),
    ({"stages": 2, "checkpoint": ["never", "always"]}, True),
    ({"balance": [4, 5], "schedule": "1f1b", "chunks": 3, "checkpoint": "never"}, False),
])  # fmt: skip
def test_an_option_fixes_what_it_names_and_the_rest_is_chosen(given, measures, monkeypatch):
    if not measures:
        monkeypatch.setattr("gpipe.pipeline.choose_plan", None)
    plan = gpipe.GPipe.from_module(perceptron(), torch.randn(12, 8), seconds=0.1, **given).plan
    assert plan.items() >= {name: each for name, each in given.items() if name in plan and name != "placement"}.items()
    place = given.get("placement", plan["placement"])
    assert plan["placement"] == ([0, 1, 1, 0] if place == "v" else place)
    assert not measures or plan["chunks"] in ([3] if "chunks" in given else (2, 4, 8, 12))


def test_a_sequence_is_not_converted_if_a_pipeline_takes_it():
    x, shared = torch.randn(12, 8), nn.Tanh()
    plain = nn.Sequential(nn.Linear(8, 8), Stash(), nn.Linear(8, 8), Add())
    plan = {"balance": [2, 2], "chunks": 2, "checkpoint": "never", "schedule": "1f1b"}
    assert list(gpipe.GPipe.from_module(plain, x, **plan)) == list(plain)
    twice = nn.Sequential(nn.Linear(8, 8), shared, nn.Linear(8, 8), shared)
    pipe = gpipe.GPipe.from_module(twice, x, **plan)
    torch.testing.assert_close(pipe(x), twice(x))
    pipe = gpipe.GPipe.from_module(nn.Sequential(perceptron()), x, stages=2, seconds=0.1)
    assert len(pipe) == 9


def test_a_plan_has_its_number_of_micro_batches_by_default_only_without_batch_norm():
    x = torch.randn(12, 8)
    chosen = gpipe.GPipe.from_module(perceptron(), x, seconds=0.1)
    assert chosen.chunks in (2, 4, 8, 12)
    with pytest.warns(UserWarning, match="so for one micro-batch; give a mini-batch of the size you train with"):
        gpipe.GPipe.from_module(perceptron(), x[:1], seconds=0)
    with_norm = gpipe.to_sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), x)
    pipe = gpipe.GPipe.from_module(with_norm, x, seconds=0.1)
    assert pipe.chunks == 4 and list(pipe) == list(with_norm)


def test_a_model_that_is_faster_alone_is_told(monkeypatch):
    def with_a_fast_model(*arguments, **options):
        """Returns the plans of the real call. Only the time of the unpartitioned model is set here."""
        found = balance.plan(*arguments, **options)
        return SimpleNamespace(best=found.best, unpartitioned=SimpleNamespace(fits=True, seconds=found.best.seconds / 2))

    monkeypatch.setattr("gpipe.planning.plan", with_a_fast_model)
    with pytest.warns(UserWarning, match="plain PyTorch .* predicted to be 2.00 times as fast") as warned:
        made = gpipe.GPipe.from_module(perceptron(), torch.randn(12, 8), seconds=0.1).plan
    assert made["schedule"] not in ("gpipe", "looped_bfs"), "gradients are added in one order, whichever plan is chosen"
    assert warned[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_warnings_are_of_what_was_given():
    x, plan = torch.randn(12, 8), {"balance": [5, 4], "chunks": 4, "checkpoint": "never", "placement": [0, 1]}
    gpipe.GPipe.from_module(perceptron(), x, stages=2, seconds=0.1)(x)
    with pytest.raises(UserWarning, match=r"only step\(\) has schedule='1f1b'"):
        gpipe.GPipe.from_module(perceptron(), x, schedule="1f1b", **plan)(x)
    with pytest.raises(UserWarning, match="runs one stage at a time; give chunks, such as chunks=8"):
        gpipe.GPipe(perceptron(), [4, 5])
    gpipe.GPipe(perceptron(), [9])
    gpipe.GPipe(perceptron(), [4, 5], chunks=1)


def test_a_plan_is_made_for_a_schedule_from_a_file_and_for_a_model_of_one_layer(tmp_path):
    x = torch.randn(12, 8)
    (tmp_path / "schedule").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    given = {"chunks": 2, "schedule": f"@{tmp_path}/schedule", "devices": ["cpu"] * 2}
    pipe = gpipe.GPipe.from_module(perceptron(), x, seconds=0, **given)
    assert pipe.schedule == given["schedule"] and pipe.step(x, x[:, :3], F.mse_loss).isfinite()
    assert gpipe.GPipe.from_module(nn.Linear(8, 8), kwargs=UserDict(input=x), seconds=0).balance == [1]


def test_evaluate_is_the_loss_in_evaluation_mode_and_restores_the_modes():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = torch.randn(12, 8), torch.randint(3, (12,))
    pipe = gpipe.GPipe(model, [2, 2], chunks=3)
    pipe.step(x, y, F.cross_entropy)
    model[2].eval()
    modes = [module.training for module in pipe.modules()]
    loss = pipe.evaluate(x, y, F.cross_entropy)
    assert not loss.requires_grad
    assert [module.training for module in pipe.modules()] == modes
    with torch.no_grad():
        torch.testing.assert_close(loss, F.cross_entropy(model.eval()(x), y))
        output = model(x)
    assert pipe.evaluate(x, y, lambda output, y: (output.argmax(1) == y).sum().item()) == (output.argmax(1) == y).sum()
    torch.testing.assert_close(pipe.evaluate(x, y, lambda output, y: {"all": [output, y]}), {"all": [output, y]})


def test_a_plan_can_be_run_and_saved(tmp_path):
    layers, (x, _) = make_tied_model(), tied_batch()
    found = gpipe.plan(layers, x, ["cpu", "cpu"], chunks=[4], seconds=0)
    best = found.best
    assert best.measured > 0 and "recomputed" in str(found)
    pipe = gpipe.GPipe(layers, **best.arguments)
    pipe(x).sum().backward()
    assert layers[0].weight.grad is not None
    best.save(tmp_path / "plan")
    again = gpipe.GPipe.from_module(layers, x, plan=tmp_path / "plan")
    assert again.plan == pipe.plan
    with pytest.raises(ValueError, match="is not a plan that was saved"):
        gpipe.GPipe.from_module(layers, x, plan=__file__)
    large = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1000))
    assert balance.balance_by_size(2, large, torch.rand(8, 8), chunks=2, param_scale=4) == [2, 1]
    too_small = gpipe.plan(layers, x, ["cpu"], chunks=[1], memory=10, seconds=0)
    assert not too_small.fits and "nothing fits" in too_small.reason
    with pytest.raises(RuntimeError, match="nothing fits"):
        too_small.best


def test_profiles_plan_replicas_on_hosts():
    profiles = [balance.profile(perceptron(), torch.rand(samples, 8), seconds=0) for samples in (4, 8)]
    found = gpipe.plan(profiles, 64, 16, hosts=2, replicas=None, bandwidth=1e10, between=1e8)
    assert found.fits and {each.replicas for each in found.plans} >= {4, 8}
    with pytest.raises(ValueError, match="hosts is 3, which does not divide the 16 devices"):
        gpipe.plan(profiles, 64, 16, hosts=3)


def test_errors_of_layers_and_of_progress_end_the_measurement():
    with pytest.raises(RuntimeError, match=r"layer '1' failed in its forward: .*from the layer$") as raised:
        balance.profile(nn.Sequential(Double(), Fail()), torch.rand(8, 64), seconds=0)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ZeroDivisionError):
        balance.profile(perceptron(), torch.rand(8, 8), seconds=0, progress=lambda part: 1 / 0)


def test_a_typed_program_runs(tmp_path):
    typed_program.main(tmp_path)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_pipeline_is_its_layers(schedule):
    pipe = gpipe.GPipe(make_ranked_model(), [2, 2, 4], chunks=3, schedule=schedule, devices=["cpu"] * 3)
    x, target = ranked_batch(8)
    pipe.step(x, target, F.cross_entropy)
    before = {**pipe.state_dict()}, [each.grad.clone() for each in pipe.parameters()], torch.get_rng_state()
    before[0].update((name, each.clone()) for name, each in before[0].items())
    gpipe.verify(pipe, x, target, F.cross_entropy)
    assert all(torch.equal(each, before[0][name]) for name, each in pipe.state_dict().items())
    assert all(map(torch.equal, [each.grad for each in pipe.parameters()], before[1]))
    assert torch.equal(torch.get_rng_state(), before[2])


def more_on_a_worker(value):
    return value if threading.current_thread() is threading.main_thread() else value * 1.25


def more_gradient(layer, inputs, output):
    if output.requires_grad:
        output.register_hook(more_on_a_worker)


@pytest.mark.parametrize("hook, message", [
    (lambda layer, inputs, output: more_on_a_worker(output), "the output of layer '7' differs"),
    (more_gradient, "the gradient of '0.weight' differs"),
])  # fmt: skip
def test_what_differs_is_named(hook, message):
    model = make_ranked_model()
    model[7].register_forward_hook(hook)
    model.append(nn.Tanh())
    pipe = gpipe.GPipe(model, [4, 5], chunks=2, schedule="1f1b", devices=["cpu"] * 2)
    with pytest.raises(AssertionError, match=re.escape(message) + ".* by 0.2.* the last is the gradient of '7.bias'"):
        gpipe.verify(pipe, torch.randn(8, 4), torch.zeros(8, 3), F.mse_loss)
