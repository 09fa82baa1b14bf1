"""Model files: what C++ trains is what Python trains, bit by bit."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import gpipe
from gpipe import _C

FINETUNE = Path(os.environ["GPIPE_BUILD_DIR"]) / "examples" / "finetune" / "finetune"
BATCH, STEPS = 4, 4
pytestmark = pytest.mark.usefixtures("one_thread")


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


def train(sequence, inputs, target, balance, optimizer):
    """Trains as the program does. Returns the losses."""
    pipe = gpipe.GPipe(sequence, balance, chunks=2, schedule="1f1b")
    optimize = (torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW)(pipe.parameters(), lr=0.01)
    torch.manual_seed(0)
    losses = []
    for step in range(STEPS):
        part = slice(BATCH * step, BATCH * (step + 1))
        optimize.zero_grad()
        x = tuple(tensor[part] for tensor in inputs)
        loss = pipe.step(x if len(x) > 1 else x[0], target[part], F.cross_entropy)
        optimize.step()
        losses.append(float(f"{loss.item():.9g}"))
    return losses


def compare(model, inputs, target, optimizer, folder):
    sequence = gpipe.to_sequential(model.train(), *(tensor[:BATCH] for tensor in inputs), native=True)
    gpipe.export_model(sequence, folder / "model.gpipe")
    names = ["input"] if len(inputs) == 1 else [f"input.{number}" for number in range(len(inputs))]
    save_file({**dict(zip(names, inputs)), "target": target}, folder / "data.safetensors")
    balance = [len(sequence) // 2, len(sequence) - len(sequence) // 2]
    flags = {"model": "model.gpipe", "data": "data.safetensors", "output": "trained.gpipe"}
    files = [part for flag, name in flags.items() for part in (f"--{flag}", folder / name)]
    cut = ",".join(map(str, balance))
    code, output, error = run(*files, "--optimizer", optimizer, "--batch-size", BATCH, "--balance", cut)
    assert (code, error) == (0, ""), error
    # LibTorch's AdamW rounds in another order than PyTorch's.
    close = {"rtol": 0, "atol": 0} if optimizer == "sgd" else {"rtol": 1e-5, "atol": 1e-6}
    losses = [float(number) for number in re.findall("step .* loss (.*)", output)]
    torch.testing.assert_close(losses, train(sequence, inputs, target, balance, optimizer), **close)
    trained = load_file(folder / "trained.gpipe")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, **close)
    assert not model.load_state_dict(trained, strict=False).missing_keys


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_cpp_trains_what_python_trains(optimizer, tmp_path):
    torch.manual_seed(1)
    compare(Net(), [torch.randint(12, (BATCH * STEPS,))], torch.randint(12, (BATCH * STEPS,)), optimizer, tmp_path)


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
    content = (tmp_path / "good").read_bytes()
    layer = {"name": "0", "tensors": [], "evaluation": [], "graph": {"values": 1, "calls": [{"operator": "aten::unknown"}]}}
    _C.write_weights(os.fsencode(tmp_path / "operator"), {}, json.dumps({"version": 1, "layers": [layer]}))
    _C.write_weights(os.fsencode(tmp_path / "deep"), {}, "[" * 10**6)
    for name, changed, message in (
        ("missing", None, "No such file"),
        ("short", content[:-1], "damaged|truncated|does not fit"),
        ("data", (tmp_path / "data").read_bytes(), "it is not a model; python -m gpipe export writes one"),
        ("operator", None, "aten::unknown, which this version of torch does not have"),
        ("deep", None, "more than 100 levels"),
    ):
        if changed is not None:
            (tmp_path / name).write_bytes(changed)
        code, _, error = run("--model", tmp_path / name, "--data", tmp_path / "data")
        assert code == 1 and re.search(f"cannot load the model .*({message})", error), error
