"""Snapshots in one process: what they hold, what they refuse, and trainings that go on from them."""

import copy
import fcntl
import json
import os
import random
import zlib
from collections import Counter

import numpy
import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, lr_scheduler

import gpipe
from gpipe import snapshot


class Scale(nn.Module):
    """Has a parameter without dimensions, and extra state."""

    def __init__(self):
        super().__init__()
        self.factor, self.calls = nn.Parameter(torch.tensor(1.5)), 0

    def forward(self, x):
        self.calls += 1
        return x * self.factor

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Keeper(SGD):
    """Keeps texts, tuples and large numbers in the state of its parameters, and a number of its own."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            count = state.get("counts", (0, 0.0))[0] + 1
            state.update(counts=(count, count / 3), mode="warm", names=["a", ("b", {"c": None})], big=2**70, step=count)
            parameter.data -= 0.01 * count * parameter.grad


OPTIMIZERS = [  # test_ranks_training.py has others
    (Adam, {"betas": (0.5, 0.75), "amsgrad": True}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.LBFGS, {"max_iter": 2}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (Keeper, {}),
]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Scale(), nn.Linear(4, 2, bias=False))


def make(balance, kind=AdamW, **options):
    """Returns a pipeline and an optimizer with two groups, if it can have these."""
    pipe = gpipe.GPipe(make_model(), balance, chunks=2)
    first, *others = pipe.named_parameters()
    if kind in (optim.LBFGS, Keeper):
        return pipe, kind(pipe.parameters(), **options)
    return pipe, kind([{"params": [first]}, {"params": others[::-1], "lr": 0.01, "own": 1}], **options)


def train(pipe, optimizer, steps):
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = pipe(x).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        x = torch.rand(6, 3)
        losses.append(closure().item())
        optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)
    return losses


def same(a, b):
    """Whether two values have the same types and bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind, options", OPTIMIZERS)
def test_a_training_goes_on_at_another_cut_with_the_same_losses(kind, options, tmp_path):
    pipe, optimizer = make([1, 3], kind, **options)
    train(pipe, optimizer, 3)
    snapshot.save(tmp_path, pipe, optimizer=optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    losses = train(pipe, optimizer, 3)

    resumed, other = make([2, 1, 1], kind, **options)
    train(resumed, other, 1)
    snapshot.load(tmp_path, resumed, optimizer=other)
    assert same(other.state_dict()["state"], {key: dict(each) for key, each in saved["state"].items()})
    assert same(other.state_dict()["param_groups"], saved["param_groups"])
    assert train(resumed, other, 3) == losses
    assert same(dict(resumed.state_dict()), dict(pipe.state_dict()))


def test_an_optimizer_that_cpp_saved(tmp_path):
    """Its steps are integers, and it lacks options and keys that only Python has."""
    pipe, optimizer = make([1, 3])
    train(pipe, optimizer, 2)
    snapshot.save(tmp_path, pipe, optimizer=optimizer)
    losses = train(pipe, optimizer, 2)
    manifest = json.loads((tmp_path / "snapshot.json").read_text())
    of_cpp = ["params", "lr", "betas", "eps", "weight_decay", "amsgrad"]
    saved = manifest["optimizer"]
    saved["param_groups"] = [{name: group[name] for name in of_cpp} for group in saved["param_groups"]]
    for fields in saved["state"].values():
        fields["step"] = 2
    del saved["rest"], manifest["plan"]
    manifest["random"] = [{"torch": manifest["random"][0]["torch"]}]
    texts = [json.dumps(manifest | {"crc32": crc}, separators=(",", ":"), sort_keys=True) for crc in ("", "%08x")]
    (tmp_path / "snapshot.json").write_text(texts[1] % zlib.crc32(texts[0].encode()))
    assert snapshot.load(tmp_path, pipe, optimizer=optimizer) == snapshot.Snapshot(0, {}, None)
    assert train(pipe, optimizer, 2) == losses


EXTRA = {
    "epoch": numpy.int64(3),
    "numbers": (1, 2.5, True, None, -0.0, float("inf"), float("-inf"), 2**80, numpy.float32(0.5)),
    "texts": ["", "ä", {"$": "tuple", "of": 1}],
    "keys": {1: "a", (2, "b"): {frozenset({1}), "c"}},
    "tensors": {"t": torch.tensor(3, dtype=torch.int16), "bits": torch.tensor([True, False])},
    "counter": Counter({5: 2}),
}


def test_what_a_snapshot_says(tmp_path):
    pipe, _ = make([1, 3])
    for folder in (tmp_path / "new" / "folder", tmp_path):  # a folder with other files
        snapshot.save(folder, pipe, step=numpy.int32(7), extra=EXTRA)
        saved = snapshot.load(folder)
        assert (saved.step, saved.plan) == (7, pipe.plan)
        expected = EXTRA | {"epoch": 3, "numbers": (*EXTRA["numbers"][:-1], 0.5)}
        assert same(saved.extra, expected)
    assert gpipe.GPipe(make_model(), **saved.plan).plan == pipe.plan


def test_generators_continue(tmp_path):
    module = nn.Linear(2, 2)
    snapshot.save(tmp_path, module)
    drawn = [(torch.rand(3).tolist(), random.random(), numpy.random.rand()) for _ in range(2)]
    snapshot.load(tmp_path, module)
    assert [(torch.rand(3).tolist(), random.random(), numpy.random.rand()) for _ in range(2)] == drawn


@pytest.mark.parametrize("make_scheduler", [
    lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [1, 2])], [4]
    ),
])  # fmt: skip
def test_schedulers_and_scalers_continue(make_scheduler, tmp_path):
    def rates(optimizer, scheduler, scaler, steps):
        for step in range(steps):
            optimizer.step()
            scheduler.step(*[step] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
            scaler.update(2.0 ** (step + 3))
            yield optimizer.param_groups[0]["lr"], scaler.get_scale()

    def start():
        pipe, optimizer = make([1, 3], SGD, momentum=0.9)
        train(pipe, optimizer, 1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        return pipe, optimizer, make_scheduler(optimizer), scaler

    pipe, *parts = start()
    first = list(rates(*parts, 3))
    snapshot.save(tmp_path, pipe, optimizer=parts[0], scheduler=parts[1], scaler=parts[2])
    expected = list(rates(*parts, 5))
    pipe, *parts = start()
    snapshot.load(tmp_path, pipe, optimizer=parts[0], scheduler=parts[1], scaler=parts[2])
    assert parts[2].get_scale() == first[-1][1]
    assert list(rates(*parts, 5)) == expected


def states(pipe, optimizer):
    return copy.deepcopy([dict(pipe.state_dict()), optimizer.state_dict()])


@pytest.mark.parametrize("model, optimizer, message", [
    (nn.Sequential(*make_model()[:3]), None, r"'3.weight' is missing in the snapshot and torch.float32 of shape \(2, 4\)"),
    (nn.Sequential(*make_model(), nn.PReLU()), None, r"'4.weight' is torch.float32 of shape \(1,\) in the snapshot and mis"),
    (None, lambda pipe: SGD(pipe.parameters()), "it is of class SGD, but this one is of class AdamW"),
    (None, lambda pipe: AdamW(pipe.parameters()), "it has 1 groups of parameters, but this one has 2"),
    (None, lambda pipe: AdamW([{"params": pipe[0].parameters()}, {"params": pipe[1].parameters()}]), "also has '0.bias'"),
    (None, lambda pipe: AdamW([{"params": [pipe[0].weight]}, {"params": [pipe[0].bias]}]), "group 1 lacks '1.bias'"),
    (None, None, "the snapshot has no optimizer, because save"),
])  # fmt: skip
def test_a_refused_load_changes_nothing(model, optimizer, message, tmp_path):
    whole = gpipe.GPipe(make_model() if model is None else model, [1, len(model or "1234") - 1], chunks=2)
    snapshot.save(tmp_path, whole, optimizer=make_adam(whole) if model is not None else optimizer and optimizer(whole))
    pipe, other = make([2, 2])
    train(pipe, other, 1)
    before = states(pipe, other)
    with pytest.raises(ValueError, match=message):
        snapshot.load(tmp_path, pipe, optimizer=other)
    assert same(states(pipe, other), before)


def make_adam(pipe):
    return AdamW(pipe.parameters())


@pytest.mark.parametrize("arguments, error, message", [
    ({"extra": {"a": [object()]}}, TypeError, r"cannot save 'extra/a/0', which is <class 'object'>: a snapshot holds"),
    ({"extra": json.loads("[" * 300 + "]" * 300)}, ValueError, "it has more than 100 levels"),
    ({"step": 1.5}, TypeError, "step must be an integer, but is 1.5"),
    ({"optimizer": 1}, TypeError, "optimizer must be an optimizer, but is 1"),
    ({"optimizer": SGD(make_model().parameters())}, ValueError, "parameter 0 in group 0 of the optimizer does not belong"),
    ({"pipe": {}}, TypeError, "pipe must be a pipeline or another module"),
])  # fmt: skip
def test_what_cannot_be_saved_leaves_the_snapshot_before(arguments, error, message, tmp_path):
    pipe, _ = make([1, 3])
    snapshot.save(tmp_path, pipe, step=1)
    with pytest.raises(error, match=message):
        snapshot.save(tmp_path, arguments.pop("pipe", pipe), **{"step": 2} | arguments)
    assert snapshot.load(tmp_path, pipe).step == 1


def test_errors_of_files_are_those_of_python(tmp_path):
    pipe, optimizer = make([1, 3])
    train(pipe, optimizer, 1)
    folder = tmp_path / "s"
    snapshot.save(folder, pipe, optimizer=optimizer, step=1)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another writer does
    with pytest.raises(BlockingIOError, match=str(tmp_path)):
        snapshot.save(folder, pipe)
    os.close(descriptor)
    assert snapshot.load(folder).step == 1
    for call, error, message in (
        (lambda: snapshot.load(tmp_path / "nothing"), FileNotFoundError, "nothing"),
        (lambda: snapshot.load(tmp_path), FileNotFoundError, str(tmp_path)),
        (lambda: snapshot.save(folder / "snapshot.json", pipe), NotADirectoryError, None),
        (lambda: snapshot.load(folder / "snapshot.json"), NotADirectoryError, None),
        (lambda: snapshot.load(folder, optimizer=optimizer), TypeError, "load.folder, pipe, optimizer=optimizer"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_hugging_face_opens_the_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    snapshot.save(tmp_path, model, optimizer=AdamW(model.parameters()))
    config.save_pretrained(tmp_path)
    opened, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert same(dict(opened.state_dict()), dict(model.state_dict()))
    assert not report["missing_keys"] and not report["unexpected_keys"]
