"""Tuples, lists, dicts and None keep their types across a cut."""

import collections
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.balance import balance_by_size
from helpers import Double


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None = None


class PairOfClass(collections.namedtuple("PairOfClass", ["a", "b"])):
    def sum(self):
        return self.a + self.b


class Map(nn.Module):
    """Applies a function, and records the types of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.seen = set()

    def forward(self, x):
        self.seen.add(type(x))
        return self.function(x, self.weight)


# For each kind: a function that makes an object from a tensor, and one that makes a tensor from the object.
KINDS = {
    "named tuple": (lambda x, w: Pair(x * w, x + w), lambda p, w: p.first * p.second),
    "subclass of a named tuple": (lambda x, w: PairOfClass(x * w, x + w), lambda p, w: p.sum()),
    "return type": (lambda x, w: (x * w).max(1, keepdim=True), lambda m, w: m.values * m.indices),
    "nested tuple": (lambda x, w: (x, (x * w, (x + w,))), lambda t, w: t[0] + t[1][0] * t[1][1][0]),
    "list": (lambda x, w: [x * w, x + w], lambda parts, w: parts.pop() * parts.pop()),
    "dict": (lambda x, w: {"b": x * w, "a": x + w}, lambda d, w: d.pop("b") - d["a"] if [*d] == ["b", "a"] else None),
    "ordered dict": (lambda x, w: collections.OrderedDict(x=x * w), lambda d, w: d.popitem(last=True)[1]),
    "mixture": (
        lambda x, w: {"pairs": [Pair(x * w, None), Pair(x, x + w)], "none": None, 3: (x,)},
        lambda d, w: d["pairs"][0].first + d["pairs"][1].second * d[3][0],
    ),
}


def step(run, model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_between_stages_keeps_its_type(kind):
    make, use = KINDS[kind]
    model = nn.Sequential(Double(), Map(make), nn.Identity(), Map(use))
    x = torch.rand(4, 3)
    expected = step(model, model, x)
    wanted = model[3].seen.copy()
    pipe = gpipe.GPipe(model, [2, 1, 1], chunks=2, checkpoint="always")
    torch.testing.assert_close(step(pipe, model, x), expected)
    assert model[3].seen == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_results_keep_their_type(kind):
    make, use = KINDS[kind]
    first, last = nn.Sequential(Map(use)), nn.Sequential(Map(make))
    x, weight = torch.rand(4, 3), torch.tensor(2.0)
    torch.testing.assert_close(gpipe.GPipe(first, [1], chunks=2)(make(x, weight)), use(make(x, weight), weight))
    assert len(first[0].seen) == 1
    expected, actual = make(x, weight), gpipe.GPipe(last, [1], chunks=2)(x)
    assert type(actual) is type(expected)
    torch.testing.assert_close(use(actual, weight), use(expected, weight))
    assert balance_by_size(1, first, make(x, weight), chunks=2) == [1]


def test_inputs_without_tensors_are_refused():
    for nothing in ((), [], {}, (None,), [None, {}]):
        with pytest.raises(ValueError, match="no tensors|no input tensor"):
            gpipe.GPipe(nn.Sequential(nn.Identity()), [1])(nothing)


def test_results_of_different_structure_are_an_error():
    parts = iter([lambda x: Pair(x, x), lambda x: {"a": [x, None]}])
    pipe = gpipe.GPipe(nn.Sequential(Map(lambda x, w: next(parts)(x))), [1], chunks=2, checkpoint="never")
    with pytest.raises(RuntimeError, match=r"Pair\(first=Tensor, second=Tensor\) for .* {'a': \[Tensor, None\]}"):
        pipe(torch.zeros(4))


class Odd(tuple):
    pass


@pytest.mark.parametrize("make", [lambda x: Odd([x]), lambda x: {x}, lambda x: (x, 1), lambda x: None])
def test_objects_of_other_types_are_refused_between_stages(make):
    model = nn.Sequential(Map(lambda x, w: make(x)), Map(lambda made, w: torch.zeros(1)))
    with pytest.raises(TypeError, match="expected Tensor, but got <class"):
        gpipe.GPipe(model, [1, 1])(torch.zeros(1))
    gpipe.GPipe(model, [2])(torch.zeros(1))  # within a stage any object may be passed on
