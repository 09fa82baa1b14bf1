"""Snapshots: writing, reading, capturing and restoring a training state."""

import fcntl
import os

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, NAdam, lr_scheduler

import gpipe
from gpipe import snapshot
from gpipe.snapshot import Snapshot

# Optimizers with options, and the names of their state per parameter.
OPTIMIZERS = [
    (Adam, {"betas": (0.5, 0.75), "amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    (NAdam, {}, {"step", "mu_product", "exp_avg", "exp_avg_sq"}),
    (SGD, {}, set()),
    (SGD, {"momentum": 0.9, "nesterov": True}, {"momentum_buffer"}),
]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def groups_of(model):
    named = dict(model.state_dict(keep_vars=True))
    weights = [named["3.weight"], named["0.weight"]]
    rest = [named["0.bias"], named["1.weight"], named["1.bias"]]
    return [{"params": weights}, {"params": rest, "lr": 1}]  # an integer learning rate must work too


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1 + step, 18).view(6, 3)
        model(inputs).square().sum().backward()
        optimizer.step()


def trained(kind=AdamW, **options):
    pipe = gpipe.GPipe(make_model(), [1, 3], chunks=2)
    optimizer = kind(groups_of(pipe), **options)
    train(pipe, optimizer, 3)
    return pipe, optimizer


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_written_snapshot_reads_back_equal(tmp_path):
    pipe, optimizer = trained(amsgrad=True)
    saved = Snapshot(
        model=snapshot.capture_model(pipe),
        optimizer=snapshot.capture_optimizer(optimizer, pipe),
        epoch=7,
        position={"batch": 3, "seed": -70000},
        random=torch.get_rng_state(),
        options={"data": "a folder/ä", "empty": ""},
        history={"loss": [0.1, 1e-300, 2.0], "nothing": []},
    )
    snapshot.write(tmp_path / "latest", saved)
    assert same(vars(snapshot.read(tmp_path / "latest")), vars(saved))
    snapshot.write(tmp_path / "empty", Snapshot())
    assert snapshot.read(tmp_path / "empty") == Snapshot()


@pytest.mark.parametrize("kind", [AdamW, NAdam])
def test_numbers_of_a_file_become_the_tensors_that_an_optimizer_has(kind):
    """C++ writes steps as numbers, as did earlier versions."""
    pipe, optimizer = trained(kind)
    state = snapshot.capture_optimizer(optimizer, pipe)
    for fields in state["state"].values():
        fields |= {name: value.item() for name, value in fields.items() if value.dim() == 0}
    copy, other = trained(kind)
    snapshot.restore_optimizer(other, copy, state)
    train(pipe, optimizer, 2)
    train(copy, other, 2)
    assert same(dict(copy.state_dict()), dict(pipe.state_dict()))


@pytest.mark.parametrize("kind, options, state_names", OPTIMIZERS)
def test_a_restored_optimizer_continues_equally(kind, options, state_names, tmp_path):
    pipe, optimizer = trained(kind, **options)
    state = snapshot.capture_optimizer(optimizer, pipe)
    assert state["type"] == kind.__name__
    assert state["param_groups"][0]["params"] == ["3.weight", "0.weight"]
    assert set().union(*state["state"].values()) == state_names
    assert len(state["state"]) == (5 if state_names else 0)
    for fields in state["state"].values():
        fields["other"] = 3  # numbers stay numbers
    snapshot.write(tmp_path / "file", Snapshot(model=pipe.state_dict(), optimizer=state))
    saved = snapshot.read(tmp_path / "file")

    copy = gpipe.GPipe(make_model(), [2, 1, 1], chunks=2)
    other = kind([{**group, "params": group["params"][::-1]} for group in groups_of(copy)], lr=0.5)
    train(copy, other, 1)
    snapshot.restore_model(copy, saved.model)
    snapshot.restore_optimizer(other, copy, saved.optimizer)
    again = snapshot.capture_optimizer(other, copy)
    assert same(again["state"], state["state"])
    for group, expected in zip(again["param_groups"], state["param_groups"], strict=True):
        assert same(group | {"params": sorted(group["params"])}, expected | {"params": sorted(expected["params"])})
    train(pipe, optimizer, 2)
    train(copy, other, 2)
    assert same(dict(copy.state_dict()), dict(pipe.state_dict()))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.update(type="SGD"), "it is of class SGD, but this one is of class AdamW"),
        (lambda state: state["param_groups"].pop(), "it has 1 groups of parameters, but this one has 2"),
        (lambda state: state["param_groups"][0]["params"].pop(0), "group 0 lacks '3.weight'"),
        (lambda state: state["param_groups"][0]["params"].append("9.weight"), "group 0 also has '9.weight'"),
        (lambda state: state["state"]["0.bias"].update(exp_avg=torch.ones(3)), r"is torch.float32 of shape \(3,\)"),
        (lambda state: state["state"].update({"1.running_mean": {}}), "it has the state of '1.running_mean'"),
    ],
)
def test_a_refused_restore_leaves_the_optimizer_unchanged(change, message):
    (pipe, optimizer), (other, otherwise) = trained(lr=0.5, amsgrad=True), trained(amsgrad=True)
    before = snapshot.capture_optimizer(optimizer, pipe)
    changed = snapshot.capture_optimizer(otherwise, other)
    change(changed)
    with pytest.raises(ValueError, match=message):
        snapshot.restore_optimizer(optimizer, pipe, changed)
    assert same(snapshot.capture_optimizer(optimizer, pipe), before)


def test_other_optimizers_cannot_be_captured():
    pipe = gpipe.GPipe(make_model(), [2, 2])
    optimizer = Adafactor(pipe.parameters())
    train(pipe, optimizer, 1)
    with pytest.raises(TypeError, match=r"cannot capture 'row_var' of '0.weight', which is torch.float32 of shape \(4, 1\)"):
        snapshot.capture_optimizer(optimizer, pipe)
    with pytest.raises(ValueError, match="parameter 0 in group 0 of the optimizer does not belong to the model"):
        snapshot.capture_optimizer(SGD(make_model().parameters()), pipe)


def test_a_refused_restore_leaves_the_model_unchanged():
    saved, model = snapshot.capture_model(make_model()), make_model()
    nn.init.zeros_(model[0].weight)
    before = snapshot.capture_model(model)
    without = {name: tensor for name, tensor in saved.items() if name != "3.weight"}
    for wrong, message in [
        (without, "'3.weight' is missing in the snapshot"),
        (saved | {"4.weight": torch.ones(1)}, "'4.weight' is .* in the snapshot and missing in this model"),
        (saved | {"3.weight": torch.ones(2, 5)}, r"of shape \(2, 5\) in the snapshot"),
        (saved | {"3.weight": 1}, "<class 'int'> in the snapshot"),
    ]:
        with pytest.raises(ValueError, match=message):
            snapshot.restore_model(model, wrong)
        assert same(snapshot.capture_model(model), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [1, 2])], [4]
        ),
    ],
)
def test_a_restored_scheduler_continues(make):
    def rates(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    def start():
        pipe, optimizer = trained(SGD, momentum=0.9)
        return pipe, optimizer, make(optimizer)

    _, *both = start()
    expected = list(rates(*both, 8))
    pipe, *both = start()
    first = list(rates(*both, 3))
    state, text = snapshot.capture_optimizer(both[0], pipe), snapshot.capture_scheduler(both[1])
    pipe, *both = start()
    snapshot.restore_optimizer(both[0], pipe, state)
    snapshot.restore_scheduler(both[1], text)
    assert first + list(rates(*both, 5)) == expected
    assert snapshot.capture_scheduler(both[1]) != text
    deep = "[" * 5000 + "]" * 5000
    with pytest.raises(ValueError, match="too many levels"):
        snapshot.restore_scheduler(both[1], deep)


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def optimizer_of(option, state=None):
    return {"type": "", "param_groups": [{"params": [], "option": option}], "state": state or {}}


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"epoch": "1"}, ValueError, "'epoch' is \"1\", not an int of 64 bits"),
        ({"position": {"seed": 2**63}}, ValueError, "'seed' is 9223372036854775808, not an int of 64 bits"),
        ({"options": {"a": 1}}, ValueError, "'a' is 1, not a string"),
        ({"history": {"a": 1.0}}, TypeError, "history 'a' of a snapshot must be a list of numbers, but is 1.0"),
        ({"history": {"a": ["x"]}}, TypeError, "each of history 'a' of a snapshot must be a number, but is 'x'"),
        ({"random": 1}, TypeError, "'.random' of the snapshot is <class 'int'>, not a Tensor"),
        ({"model": make_model()}, TypeError, "cannot convert dictionary update sequence"),
        ({"optimizer": {"state": {}, "param_groups": []}}, ValueError, "it has no 'type'"),
        ({"model": {"a": [1.0]}}, TypeError, "'a' of the snapshot is <class 'list'>, not a Tensor"),
        ({"optimizer": {"type": "", "param_groups": [], "state": {"a": {"b": {}}}}}, ValueError, "'b' of the optimizer is {}"),
        ({"options": {"path": os.fsdecode(b"\xff")}}, ValueError, "'training' is not a JSON object"),
        ({"optimizer": optimizer_of(nested(200))}, ValueError, "'training' is not a JSON object of at most 100 levels"),
        ({"optimizer": optimizer_of(1, {"a": {"b.c": torch.ones(2)}})}, ValueError, "the name 'b.c' in the optimizer's state"),
        ({"model": {".random": torch.ones(2)}}, ValueError, "the name '.random' in the model of a snapshot begins with a dot"),
        ({"model": {"__metadata__": torch.ones(2)}}, ValueError, "a tensor has the name '__metadata__'"),
    ],
)
def test_a_snapshot_that_could_not_be_read_is_not_written(fields, error, message, tmp_path):
    with pytest.raises(error, match=message):
        snapshot.write(tmp_path / "file", Snapshot(**fields))
    assert list(tmp_path.iterdir()) == []


def test_errors_of_files_are_those_of_python(tmp_path):
    path = tmp_path / "latest"
    snapshot.write(path, Snapshot(epoch=1))
    with open(f"{path}.tmp", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="latest"):
            snapshot.write(path, Snapshot(epoch=2))
    assert snapshot.read(path).epoch == 1
    with pytest.raises(FileNotFoundError, match="no-folder/latest"):
        snapshot.write(tmp_path / "no-folder" / "latest", Snapshot())
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=f"'{path}': .*only weights"):
        snapshot.read(path)
    for is_zip in (True, False):
        torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(ValueError, match=r"is not a snapshot, but a file of torch.save\(\); read it with torch.load\("):
            snapshot.read(path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        snapshot.read(tmp_path)
