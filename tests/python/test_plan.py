"""How from_module() chooses a plan; settings and evaluation of a pipeline."""

import json
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gpipe
import typed_program
from gpipe.balance import plan
from helpers import Add, Stash


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
    loss = nn.functional.cross_entropy
    assert torch.equal(again.step(x, y, loss), gpipe.GPipe(perceptron(), **plan).step(x, y, loss))


@pytest.mark.parametrize("given, measures", [
    ({"balance": [4, 5]}, True),
    ({"balance": [2, 2, 2, 3], "devices": ["cpu"] * 2, "placement": "v"}, True),
    ({"balance": [4, 5], "schedule": "1f1b", "chunks": 3}, True),
    ({"balance": [2, 2, 2, 3], "devices": ["cpu"] * 2, "schedule": "zb_v"}, True),
    ({"placement": [1, 0], "schedule": "gpipe"}, True),
    ({"balance": [4, 5], "schedule": "1f1b", "chunks": 3, "checkpoint": "never"}, False),
])  # fmt: skip
def test_an_option_fixes_what_it_names_and_the_rest_is_chosen(given, measures, monkeypatch):
    if not measures:
        monkeypatch.setattr("gpipe.pipeline.choose_plan", None)
    plan = gpipe.GPipe.from_module(perceptron(), torch.randn(12, 8), seconds=0.1, **given).plan
    assert plan.items() >= {name: each for name, each in given.items() if name not in ("devices", "placement")}.items()
    place = given.get("placement", plan["placement"])
    assert plan["placement"] == ([0, 1, 1, 0] if place == "v" else place)
    assert not measures or plan["chunks"] in ([3] if "chunks" in given else (2, 4, 8, 12))


def test_each_stage_of_a_worker_has_its_checkpoint_mode(one_thread):
    x, y = torch.randn(12, 8), torch.randint(3, (12,))
    plan = {"balance": [2, 2, 2, 3], "placement": [0, 0, 1, 1], "schedule": "1f1b", "chunks": 4, "checkpoint": "never"}
    plain = gpipe.GPipe.from_module(perceptron(), x, **plan)
    plain.step(x, y, nn.functional.cross_entropy)
    pipe = gpipe.GPipe.from_module(perceptron(), x, **plan | {"checkpoint": [1, "always", "never", "except_last"]})
    assert pipe.plan["checkpoint"] == [1, "always", "never", "except_last"] and "always" in repr(pipe)
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    pipe.step(x, y, nn.functional.cross_entropy)
    recomputed = [event["name"] for event in json.loads(timeline.to_chrome_json())["traceEvents"] if "R" in event["name"]]
    assert sorted(recomputed) == ["0R0", "0R2", "1R0", "1R1", "1R2", "1R3", "3R0", "3R1", "3R2"]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(pipe.parameters(), plain.parameters(), strict=True))
    given = ["never", "always"]
    assert gpipe.GPipe.from_module(perceptron(), x, stages=2, checkpoint=given, seconds=0).plan["checkpoint"] == given


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
        found = plan(*arguments, **options)
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
    assert pipe.schedule == given["schedule"] and pipe.step(x, x[:, :3], nn.functional.mse_loss).isfinite()
    assert gpipe.GPipe.from_module(nn.Linear(8, 8), kwargs=UserDict(input=x), seconds=0).balance == [1]


def test_evaluate_is_the_loss_in_evaluation_mode_and_restores_the_modes():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = torch.randn(12, 8), torch.randint(3, (12,))
    pipe = gpipe.GPipe(model, [2, 2], chunks=3)
    pipe.step(x, y, nn.functional.cross_entropy)
    model[2].eval()
    modes = [module.training for module in pipe.modules()]
    loss = pipe.evaluate(x, y, nn.functional.cross_entropy)
    assert not loss.requires_grad
    assert [module.training for module in pipe.modules()] == modes
    with torch.no_grad():
        torch.testing.assert_close(loss, nn.functional.cross_entropy(model.eval()(x), y))
        output = model(x)
    assert pipe.evaluate(x, y, lambda output, y: (output.argmax(1) == y).sum().item()) == (output.argmax(1) == y).sum()
    torch.testing.assert_close(pipe.evaluate(x, y, lambda output, y: {"all": [output, y]}), {"all": [output, y]})


class Merging(nn.Linear):
    """Adds a term to its weight in evaluation mode, as layers with low-rank adapters do."""

    def __init__(self):
        super().__init__(8, 8)
        self.is_merged, self.merges = False, 0

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            self.is_merged, self.merges = not mode, self.merges + 1
        return self


def without_mode(inner):
    """Returns a module around another one. It does not set its own mode."""
    outer = nn.Sequential(inner)
    outer.train = lambda mode=True: inner.train(mode) and outer
    return outer


def test_evaluate_changes_modes_by_train_and_only_where_they_differ():
    frozen, twice = Merging(), without_mode(Merging())
    model = nn.Sequential(Merging(), nn.Sequential(frozen, nn.BatchNorm1d(8)), without_mode(Merging()), nn.Sequential(twice))
    model[0].other_place = twice[0]
    pipe = gpipe.GPipe(model, [1, 3])
    frozen.eval()
    twice[0].eval()
    modes = [module.training for module in pipe.modules()]
    assert len(set(modes)) == 2
    pipe.evaluate(torch.randn(4, 8), torch.randn(4, 8), nn.functional.mse_loss)
    assert [module.training for module in pipe.modules()] == modes
    merging = [module for module in pipe.modules() if isinstance(module, Merging)]
    assert all(module.is_merged != module.training for module in merging)
    assert (model[0].merges, model[2][0].merges, frozen.merges) == (2, 2, 1)


def test_a_typed_program_runs(tmp_path):
    typed_program.main(tmp_path)
