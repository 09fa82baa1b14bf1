"""What layers pass on: structures and subclasses of tensors from one to the next, skips, and tensors that they keep."""

import collections
import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import gpipe
from gpipe.balance import balance_by_size
from gpipe.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from helpers import Add, Double, Pair, Stash, YieldAdd, YieldStash, gradients


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
    "subclass of a named tuple": (lambda x, w: PairOfClass(x * w, x + w), lambda p, w: p.sum()),
    "return type": (lambda x, w: (x * w).max(1, keepdim=True), lambda m, w: m.values * m.indices),
    "nested tuple": (lambda x, w: (x, (x * w, (x + w,))), lambda t, w: t[0] + t[1][0] * t[1][1][0]),
    "list": (lambda x, w: [x * w, x + w], lambda parts, w: parts.pop() * parts.pop()),
    "dict": (lambda x, w: {"b": x * w, "a": x + w}, lambda d, w: d.pop("b") - d["a"] if [*d] == ["b", "a"] else None),
    "mixture": (
        lambda x, w: {"pairs": [Pair(x * w, None), Pair(x, x + w)], "none": None, 3: collections.OrderedDict(x=x)},
        lambda d, w: d["pairs"][0].first + d["pairs"][1].second * d[3].popitem(last=True)[1],
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
    x, weight = torch.rand(4, 3), torch.tensor(2.0)
    expected = step(model, model, x)
    wanted = model[3].seen.copy()
    pipe = gpipe.GPipe(model, [2, 1, 1], chunks=2, checkpoint="always")
    torch.testing.assert_close(step(pipe, model, x), expected)
    made = gpipe.GPipe(model[:2], [2], chunks=2)(x / 2)  # as a result, and as an input
    assert type(made) is type(make(x, weight))
    assert balance_by_size(1, model[3:], make(x, weight), chunks=2) == [1]
    torch.testing.assert_close(gpipe.GPipe(model[3:], [1], chunks=2)(made), use(make(x, weight), weight))
    assert model[3].seen == wanted


def test_structures_without_tensors_and_different_ones_are_refused():
    for nothing in ((), [], {}, (None,), [None, {}]):
        with pytest.raises(ValueError, match="no tensors|no input tensor"):
            gpipe.GPipe(nn.Sequential(nn.Identity()), [1])(nothing)
    parts = iter([lambda x: Pair(x, x), lambda x: {"<a>": [x, None]}])
    pipe = gpipe.GPipe(nn.Sequential(Map(lambda x, w: next(parts)(x))), [1], chunks=2, checkpoint="never")
    with pytest.raises(RuntimeError, match=r"Pair\(first=Tensor, second=Tensor\) for .* {'<a>': \[Tensor, None\]}"):
        pipe(torch.zeros(4))


@skippable(stash=["integers", "unused"])
class StashIntegers(nn.Module):
    def forward(self, x):
        stash("integers", (x[:, :1] * 10).long())
        stash("unused", x)
        return x


@skippable(pop=["integers", "unused"])
class PopIntegers(nn.Module):
    def forward(self, x):
        pop("unused")
        return x + pop("integers")


@pytest.mark.parametrize("first, last", [(Stash, YieldAdd), (YieldStash, Add), (StashIntegers, PopIntegers)])
def test_skips_reach_their_layer(first, last):
    model = nn.Sequential(nn.Linear(3, 3), first(), Double(), nn.Linear(3, 3), last())
    x = torch.ones(4, 3)
    for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with around:
            expected = step(model, model, x)
            for balance in ([5], [2, 1, 2]):
                pipe = gpipe.GPipe(model, balance, chunks=2, checkpoint="always")
                torch.testing.assert_close(step(pipe, model, x), expected, rtol=0.02, atol=0.01)


def test_the_decorator_returns_a_subclass_with_the_names():
    @skippable(stash="name", pop=("a", "b"))
    class Layer(nn.Linear):
        """Text."""

    layer = Layer(2, 3)
    assert Layer.stashable_names == {"name"} and Layer.poppable_names == {"a", "b"}
    assert (Layer.__name__, Layer.__doc__) == ("Layer", "Text.")
    assert isinstance(layer, nn.Linear) and isinstance(layer, Skippable)
    assert layer.module is layer and layer.out_features == 3 and list(layer.state_dict()) == ["weight", "bias"]
    assert repr(layer).startswith("@skippable(Layer(")


def yields_its_input(self, x):
    yield x
    return x


def in_a_layer(forward):
    """Calls a layer that declares a stash, alone and in a pipeline."""

    def call(in_pipeline):
        layer = skippable(stash=["a"])(type("Layer", (nn.Module,), {"forward": forward}))()
        model = gpipe.GPipe(nn.Sequential(layer, skippable(pop=["a"])(nn.Identity)()), [1, 1]) if in_pipeline else layer
        model(torch.zeros(1))

    return call


@pytest.mark.parametrize("in_pipeline", [False, True])
@pytest.mark.parametrize("call, error, message", [
    (in_a_layer(lambda self, x: stash("b", x)), RuntimeError, "'b' was stashed by a layer that .*; it declares 'a'"),
    (in_a_layer(lambda self, x: pop("a")), RuntimeError, "'a' was popped by a layer that .*; it declares none"),
    (in_a_layer(yields_its_input), TypeError, r"yielded tensor.*yield only stash\(...\), pop\(...\) and peek\(...\)"),
    (lambda _: Add()(torch.zeros(1)), RuntimeError, "'skip'.* stashed"),
    (lambda _: stash("a", torch.zeros(1)), RuntimeError, r"stash\('a'\) was called outside the forward of a @skippable layer"),
    (lambda _: stash("a", 1), TypeError, "must be a torch.Tensor or None"),
    (lambda _: skippable(pop=["c"])(Add), TypeError, "skippable already"),
    (lambda _: skippable(stash=[1]), TypeError, None),
    (lambda _: Stash().isolate(Namespace(), only=["unknown"]), ValueError, "'unknown'"),
    (lambda _: gpipe.GPipe(nn.Sequential(Stash()), [1]), TypeError, r"do not match:\n  \* layer '0' \(0\) stashes 'skip', which no"),
])  # fmt: skip
def test_wrong_uses_of_skips_are_refused(call, error, message, in_pipeline):
    with pytest.raises(error, match=message):
        call(in_pipeline)


def test_isolated_layers_use_the_same_names():
    a, b = Namespace(), Namespace()
    layers = [Stash().isolate(a), Stash().isolate(b, only=["skip"]), Add().isolate(a), Add().isolate(b)]
    model, x = copy.deepcopy(nn.Sequential(*layers)), torch.ones(2, 1)
    verify_skippables(model)
    for balance in ([4], [1, 1, 1, 1]):
        pipe = gpipe.GPipe(model, balance, chunks=2)
        assert torch.equal(pipe(x), 3 * x) and torch.equal(pickle.loads(pickle.dumps(pipe))(x), 3 * x)
    assert a != b and (a < b) != (b < a)
    assert copy.deepcopy(a) == a == pickle.loads(pickle.dumps(a)) and hash(copy.copy(a)) == hash(a)
    assert isinstance(None, Namespace) and isinstance(a, Namespace) and not isinstance(1, Namespace)


class Named(torch.Tensor):
    pass


def test_subclasses_of_tensor_keep_their_class_or_are_refused():
    classes, x = set(), torch.rand(4, 3)
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], chunks=2, checkpoint="always")
    pipe[1].register_forward_pre_hook(lambda layer, inputs: classes.add(type(inputs[0])))
    plain, out = pipe(x), pipe(x.as_subclass(Named))
    assert type(out) is Named and torch.equal(out.as_subclass(torch.Tensor), plain)
    assert classes == {torch.Tensor, Named}
    loss = pipe.step(x.as_subclass(Named), x, nn.functional.mse_loss)
    expected = gradients(pipe)
    pipe.zero_grad()
    assert type(loss) is torch.Tensor and torch.equal(loss, pipe.step(x, x, nn.functional.mse_loss))
    assert all(map(torch.equal, expected, gradients(pipe)))
    annotated = x.as_subclass(Named)
    annotated.note = "left"
    for refused, name in ((annotated, "Named"), (FakeTensorMode().from_tensor(x), "FakeTensor")):
        with pytest.raises(TypeError, match=f"a {name} cannot enter or leave a stage"):
            pipe(refused)


class Auxiliary(nn.Linear):
    """Keeps a loss of its own as an attribute."""

    def forward(self, x):
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        return y


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_tensor_that_a_layer_keeps_is_for_losses_of_the_last_stage_only(mode):
    layer, (x, target) = Auxiliary(3, 3), torch.rand(2, 4, 3)
    pipe = gpipe.GPipe(nn.Sequential(layer, nn.Linear(3, 3)), [1, 1], chunks=2, checkpoint=mode)
    out = pipe(x)
    with pytest.raises(RuntimeError, match="a backward reached|second time"):
        (out.sum() + layer.auxiliary).backward()

    def criterion(output, target):
        return nn.functional.mse_loss(output, target) + layer.auxiliary

    model = nn.Sequential(nn.Linear(3, 3), layer)
    model.zero_grad()
    criterion(model(x), target).backward()
    expected = gradients(model)
    pipe = gpipe.GPipe(model, [1, 1], chunks=2, checkpoint=mode, schedule="1f1b")
    pipe.zero_grad()
    pipe.step(x, target, criterion)
    torch.testing.assert_close(gradients(model), expected)
