"""Profiles, balances, predictions and suggestions."""

import copy
import json

import pytest
import torch
from torch import nn

import gpipe
from gpipe import balance
from helpers import Add, Double, Fail, Stash


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), Stash(), nn.Linear(64, 64), Add(), nn.Dropout(0.5)
    )


def test_the_balance_by_time_gives_slow_layers_their_own_stage():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 64), Double())
    assert balance.balance_by_time(3, layers, torch.rand(64, 64), timeout=0.5) == [2, 1, 2]


def test_the_balance_by_size_gives_large_layers_their_own_stage():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1000))
    assert balance.balance_by_size(2, layers, torch.rand(8, 8), chunks=2, param_scale=4) == [2, 1]


@pytest.mark.parametrize("function", [balance.balance_by_time, balance.balance_by_size])
def test_a_wrong_number_of_partitions_is_refused(function):
    with pytest.raises(ValueError, match="the number of stages must be between 1 and the number of layers, 7, but is 0"):
        function(0, model(), torch.rand(4, 64))
    with pytest.raises(ValueError, match="the number of stages must be between 1 and the number of layers, 7, but is 8"):
        function(8, model(), torch.rand(4, 64))


def test_models_and_samples_that_a_pipeline_refuses():
    batch = torch.rand(4, 64)
    calls = (
        lambda layers, sample: balance.profile(layers, sample, seconds=0),
        lambda layers, sample: balance.balance_by_time(1, layers, sample, timeout=0),
        lambda layers, sample: balance.balance_by_size(1, layers, sample),
        lambda layers, sample: balance.suggest(layers, sample, ["cpu"], seconds=0),
    )
    hooked = model()
    hooked.register_forward_hook(lambda *arguments: None)
    for call in calls:
        with pytest.raises(TypeError, match="module must be nn.Sequential"):
            call([nn.Linear(64, 64)], batch)
        with pytest.raises(ValueError, match="has a forward hook"):
            call(hooked, batch)
        with pytest.raises(ValueError, match="of a lazy layer is not initialized"):
            call(nn.Sequential(nn.LazyLinear(3)), batch)
        with pytest.raises(TypeError, match="expected Tensor, but got <class 'int'>"):
            call(model(), [1, 2])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, _: balance.balance_by_time(2.5, model(), x), "partitions must be an integer, but is 2.5"),
        (lambda x, _: balance.suggest(model(), x, "cpu"), "devices must be a list.*'cpu'"),
        (lambda x, _: balance.suggest(model(), x, ["cpu"], chunks=2), "chunks must be a list.*2"),
        (lambda x, _: balance.suggest(model(), x, ["cpu"], checkpoints="never"), "checkpoints must be a list.*'never'"),
        (lambda x, _: balance.suggest(model(), x, ["cpu"], memory_limit="6GB"), "memory_limit must be .*'6GB'"),
        (lambda x, profile: balance.predict(profile, 7, 2), "balance must be a list .*, but is 7"),
        (lambda x, profile: balance.predict(None, [7], 2), "profile must be a Profile.*but is None"),
    ],
)
def test_arguments_of_another_type_are_refused(call, message, measured):
    with pytest.raises(TypeError, match=message):
        call(torch.rand(4, 64), measured)


@pytest.fixture(scope="module")
def measured():
    return balance.profile(model(), torch.rand(4, 64), seconds=0)


def test_a_profile_leaves_the_model_unchanged():
    layers = model()
    x = torch.rand(8, 64)
    layers[6].eval()
    layers[0].weight.grad = torch.ones(64, 64)
    state = copy.deepcopy(layers.state_dict())
    torch.manual_seed(1)
    random = torch.get_rng_state()
    measured = balance.profile(layers, x, workers=2, seconds=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[key], value) for key, value in layers.state_dict().items())
    assert torch.equal(layers[0].weight.grad, torch.ones(64, 64))
    assert [layer.training for layer in layers] == [True] * 6 + [False]
    assert [layer.name for layer in measured.layers] == list("0123456")
    assert [(skip.name, skip.from_layer, skip.to_layer) for skip in measured.skips] == [("skip", 3, 5)]
    assert all(layer.forward > 0 and layer.backward > 0 for layer in measured.layers)
    assert balance.Profile.from_json(measured.to_json()).layers[1].buffers == measured.layers[1].buffers > 0
    assert "BatchNorm" not in str(measured) and str(measured)


def test_a_prediction_has_times_and_bytes_of_each_stage():
    measured = balance.profile(model(), torch.rand(8, 64), seconds=0)
    prediction = balance.predict(measured, [3, 4], 4, "always")
    assert prediction.balance == [3, 4]
    assert prediction.seconds > 0 and 0 <= prediction.bubble < 1
    assert len(prediction.stages) == len(prediction.bytes) == 2
    assert prediction.timeline.workers == 2
    looped = balance.predict(measured, [2, 2, 2, 1], 4, "never", schedule="looped_bfs", stages_per_worker=2)
    assert (looped.placement, len(looped.stages), len(looped.bytes)) == ([0, 1, 0, 1], 4, 2)
    assert balance.predict(measured, [2, 2, 2, 1], 4, schedule="gpipe", placement="v").placement == [0, 1, 1, 0]
    alternating = balance.predict(measured, [3, 4], 8, "never", schedule="1f1b")
    assert alternating.bytes[1] < balance.predict(measured, [3, 4], 8, "never", schedule="gpipe").bytes[1]
    with pytest.raises(ValueError, match="one stage per worker"):
        balance.predict(measured, [2, 2, 2, 1], 4, schedule="1f1b", stages_per_worker=2)
    with pytest.raises(ValueError):
        balance.predict(measured, [3, 3], 4)
    with pytest.raises(ValueError, match="checkpoint must be .*, but is 'sometimes'"):
        balance.predict(measured, [3, 4], 4, "sometimes")


def test_a_suggestion_of_any_schedule_can_be_run():
    x = torch.rand(8, 64)
    suggestion = balance.suggest(model(), x, ["cpu", "cpu"], chunks=[4], seconds=0)
    assert {candidate.schedule for candidate in suggestion.candidates} >= {"gpipe", "1f1b", "zb_h1", "zb_v", "greedy"}
    placed = {"schedule": {}, "stages_per_worker": {"stages_per_worker": 2}, "v": {"placement": "v"}}
    for candidate in suggestion.candidates:
        pipe = gpipe.GPipe(
            model(),
            candidate.balance,
            devices=["cpu", "cpu"],
            chunks=candidate.chunks,
            checkpoint=candidate.checkpoint,
            schedule=candidate.schedule,
            **placed[candidate.placed_by],
        )
        assert pipe.placement == candidate.placement
        pipe.step(x, x, nn.functional.mse_loss)
    v = next(each for each in suggestion.candidates if each.schedule == "zb_v")
    assert v.placement == [0, 1, 1, 0] and v.crossing > 0 and v.bubble >= 0


def test_suggestions():
    x = torch.rand(8, 64)
    suggestion = balance.suggest(model(), x, ["cpu", "cpu"], chunks=[1, 2], seconds=0, schedule=None)
    assert suggestion.fits and len(suggestion.candidates) == 6
    options = {"schedule": "looped_bfs", "stages_per_worker": 2}
    looped = balance.suggest(model(), x, ["cpu", "cpu"], chunks=[4], seconds=0, **options).best
    assert (looped.schedule, looped.placement, len(looped.balance)) == ("looped_bfs", [0, 1, 0, 1], 4)
    too_small = balance.suggest(model(), x, ["cpu"], chunks=[1], memory_limit=10, seconds=0)
    assert not too_small.fits and "nothing fits" in too_small.reason
    with pytest.raises(RuntimeError, match="nothing fits"):
        too_small.best
    with pytest.raises(ValueError, match="at least one device"):
        balance.suggest(model(), x, [])


def test_an_error_of_a_layer_names_it():
    with pytest.raises(RuntimeError, match=r"layer '1' failed in its forward: .*from the layer") as raised:
        balance.profile(nn.Sequential(Double(), Fail()), torch.rand(8, 64), seconds=0)
    assert isinstance(raised.value.__cause__, ValueError)


def test_an_exception_in_progress_ends_the_measurement():
    def interrupt(part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        balance.profile(model(), torch.rand(8, 64), seconds=0, progress=interrupt)


def test_layers_that_share_a_parameter_can_be_separated():
    words = nn.Embedding(50, 64)
    head = nn.Linear(64, 50, bias=False)
    head.weight = words.weight
    layers = nn.Sequential(words, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), head)
    x = torch.randint(50, (16,))
    costs = balance.profile(layers, x, workers=2, seconds=0)
    assert [(tie.name, tie.layers, tie.bytes) for tie in costs.ties] == [("0.weight", [0, 4], 50 * 64 * 4)]
    assert [layer.parameters for layer in costs.layers][::4] == [50 * 64 * 4, 0]
    assert costs.cut_bytes() == 4 * [16 * 64 * 4 + 50 * 64 * 4] + [None]
    assert len(costs.balance_by_time(5)) == 5
    best = balance.suggest(layers, x, ["cpu", "cpu"], chunks=[4], seconds=0).best
    gpipe.GPipe(layers, best.balance, chunks=best.chunks, checkpoint=best.checkpoint)(x).sum().backward()
    assert words.weight.grad is not None


LINK = {"bandwidth": 1e9, "latency": 0}


def cluster(**changed):
    of = {"hosts": 1, "devices_per_host": 2, "memory": 0, "inside": LINK, "between": LINK}
    return balance.Cluster.from_json(json.dumps({**of, **changed}))


def test_a_plan_has_a_candidate_for_each_number_of_replicas(measured):
    assert cluster(hosts=3).devices == 6
    plan = balance.plan_cluster(cluster(), [measured], 16, schedule="1f1b")
    assert plan.fits and plan.reason == ""
    assert sorted((each.replicas, len(each.bytes), each.chunks) for each in plan.candidates) == [(1, 2, 4), (2, 1, 2)]
    assert plan.best.seconds == min(each.seconds for each in plan.candidates)
    assert all(each.schedule == "1f1b" and each.checkpoint == "never" for each in plan.candidates)
    assert [each.reduction for each in plan.candidates if each.replicas == 1] == [0]
    assert "All figures are predicted." in str(plan)


def test_wrong_plans_are_refused(measured):
    with pytest.raises(ValueError, match="/inside/bandwidth is 0, but must be a number from 1"):
        cluster(inside={"bandwidth": 0, "latency": 0})
    with pytest.raises(ValueError, match="no number of replicas suits 2 devices and 7 samples"):
        balance.plan_cluster(cluster(), [measured], 7)
    for arguments, message in (
        (("cluster", [measured], 8), "cluster must be a Cluster"),
        ((cluster(), measured, 8), "profiles must be a list"),
        ((cluster(), ["profile"], 8), "profiles must be Profiles"),
        ((cluster(), [measured], 8.5), "samples must be an integer, but is 8.5"),
    ):
        with pytest.raises(TypeError, match=message):
            balance.plan_cluster(*arguments)
