"""A user's program. Mypy checks its types in strict mode; pyright accepts them too."""

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import gpipe
from gpipe import balance, snapshot
from gpipe.planning import Plan
from gpipe.skip import Namespace, Skippable, peek, pop, skippable, stash


@skippable(stash=["features"])
class Encode(Skippable):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.linear(x))
        stash("features", x)
        return x


@skippable(peek="features")
class Gate(Skippable):
    def forward(self, x: Tensor) -> Tensor:
        return x * assert_type(peek("features"), Tensor).sigmoid()


@skippable(pop=["features"])
class Decode(Skippable):
    def forward(self, x: Tensor) -> Tensor:
        return x + assert_type(pop("features"), Tensor)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def right(output: Tensor, target: Tensor) -> int:
    return int((output.argmax(1) == target).sum())


def train(pipe: gpipe.GPipe, x: Tensor, y: Tensor, file: Path) -> float:
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        assert_type(pipe.step(x, y, criterion), Tensor)
        weighted = gpipe.Loss(criterion, count=lambda target: target.ne(-100).sum(), reduction="mean")
        loss, output = pipe.step(x, y, weighted, return_output=True)
        assert_type(loss, Tensor)
        assert isinstance(output, Tensor)
        torch.autograd.backward(assert_type(pipe.compute_loss(x, y, nn.CrossEntropyLoss()), Tensor))
        assert_type(pipe.clip_grad_norm_(1.0), Tensor)
        optimizer.step()
        assert_type(pipe.team.largest(0), int)
    snapshot.save(file, pipe, optimizer=optimizer, step=1, extra={"schedule": pipe.schedule})
    saved = snapshot.load(file, pipe, optimizer=optimizer)
    assert_type(saved.step, int)
    assert_type(saved.plan, Plan)
    gpipe.verify(pipe, x, y, criterion)
    assert_type(pipe.evaluate(x, y, right), int)
    return assert_type(pipe.evaluate(x, y, criterion), Tensor).item()


def main(folder: Path) -> None:
    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    own = Namespace()
    encode = assert_type(Encode(width=8).isolate(own), Encode)
    model = nn.Sequential(encode, Gate().isolate(own, only="features"), Decode().isolate(own), nn.Linear(8, 3))
    cut = balance.balance_by_time(2, model, x[:4], timeout=0.1)
    assert_type(cut, list[int])
    pipe = gpipe.GPipe(model, cut, devices=["cpu", "cpu"], chunks=4, checkpoint="never", schedule="1f1b")
    pipe.chunks = 2
    train(pipe, x, y, folder / "latest")
    chosen = gpipe.GPipe.from_module(Whole(), x, stages=2, devices=["cpu"] * 2, seconds=0.1)
    plan: Plan = chosen.plan
    best = gpipe.plan(model, x, ["cpu", "cpu"], chunks=[2], seconds=0.1).best
    gpipe.GPipe(model, devices=["cpu", "cpu"], **best.arguments)
    train(gpipe.GPipe.from_module(Whole(), (x,), devices=["cpu"] * 2, **plan), x, y, folder / "chosen")
    assert_type(plan["balance"], list[int])
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    pipe(x)
    assert_type(timeline.to_chrome_json(), str)
