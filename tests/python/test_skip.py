"""Skip connections: declaring, verifying, stashing and popping."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gpipe
from gpipe.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from helpers import Add, Double, Stash, YieldAdd, YieldStash


@pytest.mark.parametrize("first, last", [(Stash, YieldAdd), (YieldStash, Add)])
@pytest.mark.parametrize("balance", [None, [3], [1, 1, 1]])
def test_skips_reach_their_layer(first, last, balance):
    model = nn.Sequential(first(), Double(), last())
    if balance is not None:
        model = gpipe.GPipe(model, balance, chunks=2, checkpoint="always")
    x = torch.ones(4, 1, requires_grad=True)
    y = model(x)
    assert torch.equal(y, torch.full((4, 1), 3.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 1), 3.0))


def test_the_decorator_returns_a_subclass_with_the_names():
    @skippable(stash="name", pop=("a", "b"))
    class Layer(nn.Linear):
        """Text."""

    layer = Layer(2, 3)
    assert Layer.stashable_names == frozenset(["name"])
    assert Layer.poppable_names == frozenset(["a", "b"])
    assert Layer.__name__ == "Layer"
    assert Layer.__doc__ == "Text."
    assert isinstance(layer, nn.Linear) and isinstance(layer, Skippable)
    assert layer.module is layer
    assert layer.out_features == 3
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert repr(layer).startswith("@skippable(Layer(")
    with pytest.raises(TypeError, match="skippable already"):
        skippable(pop=["c"])(Layer)
    with pytest.raises(TypeError):
        skippable(stash=[1])


def yields_its_input(self, x):
    yield x
    return x


@pytest.mark.parametrize(
    "forward, error, message",
    [
        (lambda self, x: stash("b", x), RuntimeError, "'b' was stashed by a layer that .*; it declares 'a'"),
        (lambda self, x: pop("a"), RuntimeError, "'a' was popped by a layer that .*; it declares none"),
        (yields_its_input, TypeError, r"yielded tensor.*yield only stash\(...\) and pop\(...\)"),
    ],
)
def test_a_forward_that_breaks_its_declaration_is_an_error(forward, error, message):
    Layer = skippable(stash=["a"])(type("Layer", (nn.Module,), {"forward": forward}))
    with pytest.raises(error, match=message):
        Layer()(torch.zeros(1))
    with pytest.raises(error, match=message):
        gpipe.GPipe(nn.Sequential(Layer(), skippable(pop=["a"])(nn.Identity)()), [1, 1])(torch.zeros(1))


def test_stash_outside_a_forward_and_pop_without_a_stash_are_errors():
    with pytest.raises(RuntimeError, match="'skip'.* stashed"):
        Add()(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"stash\('a'\) was called outside the forward of a @skippable layer"):
        stash("a", torch.zeros(1))
    with pytest.raises(TypeError, match="must be a torch.Tensor or None"):
        stash("a", 1)


def test_skips_that_do_not_match_are_all_listed():
    verify_skippables(nn.Sequential(Stash(), Add()))
    with pytest.raises(TypeError, match="one or more pairs of stash and pop do not match:\n  [*] ") as raised:
        gpipe.GPipe(nn.Sequential(Stash(), Stash(), nn.Sequential(skippable(pop=["y"])(nn.Identity)())), [3])
    message = str(raised.value)
    assert "* layer '1' (1) stashes 'skip', which layer '0' (0) already stashes: isolate one of them" in message
    assert "* layer '2.0' (2) pops 'y', which no earlier layer stashes" in message
    assert "* layer '0' (0) stashes 'skip', which no layer pops" in message


def test_isolated_layers_use_the_same_names():
    a, b = Namespace(), Namespace()
    layers = [Stash().isolate(a), Stash().isolate(b, only=["skip"]), Add().isolate(a), Add().isolate(b)]
    model, x = copy.deepcopy(nn.Sequential(*layers)), torch.ones(2, 1)
    for balance in ([4], [2, 2], [1, 1, 1, 1]):
        pipe = gpipe.GPipe(model, balance, chunks=2)
        assert torch.equal(pipe(x), 3 * x) and torch.equal(pickle.loads(pickle.dumps(pipe))(x), 3 * x)
    with pytest.raises(ValueError, match="'unknown'"):
        Stash().isolate(a, only=["unknown"])


def test_namespaces_are_ordered_and_equal_their_copies():
    a, b = Namespace(), Namespace()
    assert a != b and (a < b) != (b < a)
    assert copy.deepcopy(a) == a == pickle.loads(pickle.dumps(a))
    assert hash(copy.copy(a)) == hash(a)
    assert isinstance(None, Namespace) and isinstance(a, Namespace) and not isinstance(1, Namespace)
