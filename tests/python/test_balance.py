"""Profiles, balances, predictions and suggestions."""

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


def test_the_balance_by_size_gives_large_layers_their_own_stage():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1000))
    assert balance.balance_by_size(2, layers, torch.rand(8, 8), chunks=2, param_scale=4) == [2, 1]


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
    assert [layer.name for layer in measured.layers] == list("0123456")
    assert [(skip.name, skip.from_layer, skip.reader_layers) for skip in measured.skips] == [("skip", 3, [5])]
    assert all(layer.forward > 0 and layer.backward > 0 for layer in measured.layers)
    assert balance.Profile.from_json(measured.to_json()).layers[1].buffers == measured.layers[1].buffers > 0


def test_a_prediction_has_times_and_bytes_of_each_stage():
    measured = balance.profile(model(), torch.rand(4, 64), seconds=0)
    prediction = balance.predict(measured, [3, 4], 4, "always")
    assert prediction.balance == [3, 4]
    assert prediction.seconds > 0 and 0 <= prediction.bubble < 1
    assert len(prediction.stages) == len(prediction.bytes) == 2
    assert prediction.timeline.workers == 2
    looped = balance.predict(measured, [2, 2, 2, 1], 4, "never", schedule="looped_bfs", placement=[0, 1, 0, 1])
    assert (looped.placement, len(looped.stages), len(looped.bytes)) == ([0, 1, 0, 1], 4, 2)
    assert balance.predict(measured, [2, 2, 2, 1], 4, schedule="gpipe", placement="v").placement == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="one stage per worker"):
        balance.predict(measured, [2, 2, 2, 1], 4, schedule="1f1b", placement=[0, 1, 0, 1])


def test_a_suggestion_of_any_schedule_can_be_run():
    x = torch.rand(8, 64)
    suggestion = balance.suggest(model(), x, ["cpu", "cpu"], chunks=[4], seconds=0)
    assert {candidate.schedule for candidate in suggestion.candidates} >= {"gpipe", "1f1b", "zb_h1", "zb_v", "greedy"}
    for candidate in suggestion.candidates:
        options = {name: getattr(candidate, name) for name in ("balance", "chunks", "checkpoint", "schedule", "placement")}
        pipe = gpipe.GPipe(model(), devices=["cpu", "cpu"], **options)
        assert pipe.placement == candidate.placement
        pipe.step(x, x, nn.functional.mse_loss)
    v = next(each for each in suggestion.candidates if each.schedule == "zb_v")
    assert v.placement == [0, 1, 1, 0] and v.crossing > 0 and v.bubble >= 0
    too_small = balance.suggest(model(), x, ["cpu"], chunks=[1], memory_limit=10, seconds=0)
    assert not too_small.fits and "nothing fits" in too_small.reason
    with pytest.raises(RuntimeError, match="nothing fits"):
        too_small.best


def test_an_error_of_a_layer_names_it():
    with pytest.raises(RuntimeError, match=r"layer '1' failed in its forward: .*from the layer$") as raised:
        balance.profile(nn.Sequential(Double(), Fail()), torch.rand(8, 64), seconds=0)
    assert isinstance(raised.value.__cause__, ValueError)


def test_an_exception_in_progress_ends_the_measurement():
    with pytest.raises(ZeroDivisionError):
        balance.profile(model(), torch.rand(8, 64), seconds=0, progress=lambda part: 1 / 0)


def test_layers_that_share_a_parameter_can_be_separated():
    layers, (x, _) = make_tied_model(), tied_batch()
    costs = balance.profile(layers, x, workers=2, seconds=0)
    shared = layers[0].weight.nbytes
    assert [(tie.name, tie.layers, tie.bytes) for tie in costs.ties] == [("0.weight", [0, 2, 6], shared)]
    assert costs.cut_bytes() == 6 * [8 * 6 * 8 + shared] + [None]
    assert len(costs.balance_by_time(7)) == 7
    best = balance.suggest(layers, x, ["cpu", "cpu"], chunks=[4], seconds=0).best
    gpipe.GPipe(layers, best.balance, chunks=best.chunks, checkpoint=best.checkpoint)(x).sum().backward()
    assert layers[0].weight.grad is not None
