"""Stages of converted models that run without Python, and model files: what C++ trains is what Python trains, bit by bit."""

import copy
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import gpipe
from gpipe import _C
from gpipe.losses import native_loss
from helpers import named_gradients
from small_models import batch, make_net

CHUNKS = 3
FINETUNE = Path(os.environ["GPIPE_BUILD_DIR"]) / "examples" / "finetune" / "finetune"
BATCH, STEPS = 4, 4


def entered_in(pipe, step):
    """Returns the names of the Python functions that the workers enter in a step."""
    entered = []

    def on_each_worker(function):
        def hook(*_):
            sys.setprofile(function)

        handles = [stage[0].register_forward_pre_hook(hook) for stage in pipe.partitions]
        step()
        for handle in handles:
            handle.remove()

    on_each_worker(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    assert "forward" in entered  # with hooks, layers run as Python modules
    entered.clear()
    step()
    names = list(entered)
    on_each_worker(None)
    return names


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_step_enters_no_python_function(checkpoint):
    x, y = batch(9), torch.randint(3, (9,))
    sequence = gpipe.to_sequential(make_net(), x, native=True)
    pipe = gpipe.GPipe(sequence, [6, 6], chunks=CHUNKS, checkpoint=checkpoint, schedule="1f1b")
    assert entered_in(pipe, lambda: pipe.step(x, y, F.cross_entropy)) == []

    def loss(output, target):
        return F.cross_entropy(output, target)

    assert entered_in(pipe, lambda: pipe.step(x, y, loss)).count("loss") == CHUNKS


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0])
LOSSES = [
    nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, label_smoothing=0.1),
    functools.partial(F.cross_entropy, reduction="sum", weight=WEIGHT),
    functools.partial(F.nll_loss, ignore_index=1),
    nn.MSELoss(reduction="sum"),
    F.l1_loss,
    functools.partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT),
    nn.BCEWithLogitsLoss(weight=WEIGHT),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_torch_are_computed_without_python(loss, monkeypatch):
    assert native_loss(loss) is not None
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    of_classes = "ignore_index" in gpipe.losses._settings_of(loss)
    x, y = torch.randn(8, 4), torch.randint(4, (8,)) if of_classes else torch.rand(8, 4)
    results = []
    for _ in range(2):
        pipe = gpipe.GPipe(copy.deepcopy(model), [1, 1], chunks=CHUNKS)
        results.append((pipe.step(x, y, loss), named_gradients(pipe)))
        monkeypatch.setattr("gpipe.pipeline.native_loss", lambda loss: None)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_what_only_the_python_loss_does():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(4, 4)), [1], chunks=2)
    x, y = torch.randn(8, 4), torch.rand(8, 4)
    with pytest.warns(UserWarning, match="target size"):
        pipe.step(x, y[:, :1], F.mse_loss)
    hooked, seen = nn.MSELoss(), []
    hooked.register_forward_hook(lambda *_: seen.append(None))
    pipe.step(x, y, gpipe.Loss(hooked, check=False))
    assert len(seen) == 2
    for loss in (nn.Linear(4, 1), nn.GaussianNLLLoss(), lambda output, target: output.sum(), F.kl_div):
        assert native_loss(loss) is None


class Net(nn.Module):
    """Has a tied weight, a constant, a frozen parameter, skips, and layers whose mode counts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(8.0), persistent=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.drop(self.norm(x)) * self.scale + x + self.shift + torch.tensor([0.5]))


def run(*flags):
    done = subprocess.run([FINETUNE, *map(str, flags)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def train(sequence, inputs, target, balance):
    """Trains as the program does. Returns the losses."""
    pipe = gpipe.GPipe(sequence, balance, chunks=2, schedule="1f1b")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    torch.manual_seed(0)
    losses = []
    for x, y in zip(inputs.split(BATCH), target.split(BATCH), strict=True):
        optimizer.zero_grad()
        losses.append(float(f"{pipe.step(x, y, F.cross_entropy).item():.9g}"))
        optimizer.step()
    return losses


def test_cpp_trains_what_python_trains(tmp_path):
    torch.manual_seed(1)
    model, inputs, target = Net(), *torch.randint(12, (2, BATCH * STEPS))
    sequence = gpipe.to_sequential(model.train(), inputs[:BATCH], native=True)
    gpipe.export_model(sequence, tmp_path / "model.gpipe")
    save_file({"input": inputs, "target": target}, tmp_path / "data.safetensors")
    balance = [len(sequence) // 2, len(sequence) - len(sequence) // 2]
    files = {"model": "model.gpipe", "data": "data.safetensors", "output": "trained.gpipe"}
    flags = [part for flag, name in files.items() for part in (f"--{flag}", tmp_path / name)]
    flags += ["--batch-size", BATCH, "--balance", ",".join(map(str, balance))]
    code, _, watched = run(*flags, "--watch")
    assert code == 0 and len(re.findall(r"^step \d+: .* samples/s, idle .*$", watched, re.MULTILINE)) == STEPS, watched
    code, output, error = run(*flags)
    assert (code, error) == (0, ""), error
    losses = [float(number) for number in re.findall("step .* loss (.*)", output)]
    assert losses == train(sequence, inputs, target, balance)
    trained = load_file(tmp_path / "trained.gpipe")
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.load_state_dict(trained, strict=False).missing_keys


def test_what_a_program_cannot_run_is_refused(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > -1e6 else x

    model = nn.Sequential(nn.Linear(4, 4), Odd())
    sequence = gpipe.to_sequential(nn.Sequential(model), torch.randn(2, 4), opaque=[Odd], native=True)
    with pytest.raises(ValueError, match=r"layer '0\.1' calls the module '0\.1', which is kept whole, which C\+\+"):
        gpipe.export_model(sequence, tmp_path / "model.gpipe")
    with pytest.raises(TypeError, match="must be a model of gpipe.to_sequential"):
        gpipe.export_model(model, tmp_path / "model.gpipe")
    gpipe.export_model(gpipe.to_sequential(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), native=True), tmp_path / "good")
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = nn.Parameter(tied[0].weight.t())
    with pytest.raises(ValueError, match=r"parameters '0\.weight' and '1\.weight' share memory"):
        gpipe.export_model(gpipe.to_sequential(tied, torch.randn(2, 4), native=True), tmp_path / "tied")
    save_file({"input": torch.randn(2, 4), "target": torch.tensor([0, 1])}, tmp_path / "data")
    layer = {"name": "0", "tensors": [], "graph": {"values": 1, "calls": [{"operator": "aten::unknown"}]}}
    _C.write_weights(os.fsencode(tmp_path / "operator"), {}, json.dumps({"version": 1, "layers": [layer]}))
    for name, message in (
        ("missing", "No such file"),
        ("data", "it is not a model; python -m gpipe export writes one"),
        ("operator", "aten::unknown, which this version of torch does not have"),
    ):
        code, _, error = run("--model", tmp_path / name, "--data", tmp_path / "data")
        assert code == 1 and re.search(f"cannot load the model .*({message})", error), error
