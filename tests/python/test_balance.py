"""Profiles, balances, predictions and plans."""

import copy

import pytest
import torch
from torch import nn

import gpipe
from gpipe import balance
from helpers import Add, Double, Fail, Stash, make_tied_model, tied_batch


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), Stash(), nn.Linear(64, 64), Add(), nn.Dropout(0.5)
    )


def test_a_profile_leaves_the_model_unchanged():
    layers, x = model(), torch.rand(8, 64)
    layers[6].eval()
    layers[0].weight.grad = torch.ones(64, 64)
    state = copy.deepcopy(layers.state_dict())
    random = torch.get_rng_state()
    measured = balance.profile(layers, x, workers=2, seconds=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[key], value) for key, value in layers.state_dict().items())
    assert torch.equal(layers[0].weight.grad, torch.ones(64, 64))
    assert [layer.training for layer in layers] == [True] * 6 + [False]
    assert [(skip.name, skip.from_layer, skip.reader_layers) for skip in measured.skips] == [("skip", 3, [5])]
    assert balance.Profile.from_json(measured.to_json()).layers[1].buffers == measured.layers[1].buffers > 0
    prediction = balance.predict(measured, [3, 4], 4, "always")
    assert prediction.balance == [3, 4] and prediction.seconds > 0 and prediction.timeline.workers == 2
    assert balance.predict(measured, [2, 2, 2, 1], 4, schedule="gpipe", placement="v").placement == [0, 1, 1, 0]


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


def test_memory_is_a_dial():
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())))
    x, y = torch.randn(8, 4, 24, 24), torch.randn(8, 4, 24, 24)
    options = {"chunks": 4, "schedule": "1f1b", "seconds": 0}
    most = max(gpipe.plan(layers, x, 2, checkpoint="never", balance=[9, 9], **options).best.bytes)
    memory = f"{most // 10 * 8}B"
    pipe = gpipe.GPipe.from_module(layers, x, devices=["cpu"] * 2, memory=memory, **options)
    timeline = gpipe.Timeline()
    for _ in range(2):
        pipe.step(x, y, nn.functional.mse_loss)
    pipe.trace(timeline)
    pipe.step(x, y, nn.functional.mse_loss)
    parameters = sum(each.nbytes for each in layers.parameters())
    # Layers this short take other times than in the profile, and so a worker may free what it got a little later.
    assert max(timeline.peak_bytes()) < int(memory[:-1]) + x[:2].nbytes and int(memory[:-1]) < most + 4 * parameters


def test_profiles_plan_replicas_on_hosts():
    profiles = [balance.profile(model(), torch.rand(samples, 64), seconds=0) for samples in (4, 8)]
    found = gpipe.plan(profiles, 64, 16, hosts=2, replicas=None, bandwidth=1e10, between=1e8)
    assert found.fits and {each.replicas for each in found.plans} >= {4, 8}
    with pytest.raises(ValueError, match="hosts is 3, which does not divide the 16 devices"):
        gpipe.plan(profiles, 64, 16, hosts=3)


def test_errors_of_layers_and_of_progress_end_the_measurement():
    with pytest.raises(RuntimeError, match=r"layer '1' failed in its forward: .*from the layer$") as raised:
        balance.profile(nn.Sequential(Double(), Fail()), torch.rand(8, 64), seconds=0)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ZeroDivisionError):
        balance.profile(model(), torch.rand(8, 64), seconds=0, progress=lambda part: 1 / 0)
