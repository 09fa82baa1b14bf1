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
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_skips_reach_their_layer(first, last, balance, checkpoint):
    model = nn.Sequential(first(), Double(), last())
    if balance is not None:
        model = gpipe.GPipe(model, balance, chunks=2, checkpoint=checkpoint)
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


@pytest.mark.parametrize(
    "forward, message",
    [
        (lambda self, x: stash("b", x), "'b' was stashed by a layer that does not declare it; it declares 'a'"),
        (lambda self, x: pop("a"), "'a' was popped by a layer that does not declare it; it declares none"),
    ],
)
def test_a_forward_that_breaks_its_declaration_is_an_error(forward, message):
    Layer = skippable(stash=["a"])(type("Layer", (nn.Module,), {"forward": forward}))
    with pytest.raises(RuntimeError, match=message):
        Layer()(torch.zeros(1))
    with pytest.raises(RuntimeError, match=message):
        gpipe.GPipe(nn.Sequential(Layer(), skippable(pop=["a"])(nn.Identity)()), [1, 1])(torch.zeros(1))


def test_a_generator_that_yields_anything_else_is_an_error():
    @skippable()
    class Layer(nn.Module):
        def forward(self, x):
            yield x
            return x

    with pytest.raises(TypeError, match="yielded tensor.*yield only stash\\(...\\) and pop\\(...\\)"):
        Layer()(torch.zeros(1))


def test_stash_outside_a_forward_and_pop_without_a_stash_are_errors():
    with pytest.raises(RuntimeError, match="'skip'.* stashed"):
        Add()(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"stash\('a'\) was called outside the forward of a @skippable layer"):
        stash("a", torch.zeros(1))
    with pytest.raises(TypeError, match="must be a torch.Tensor or None"):
        stash("a", 1)


def test_skips_that_do_not_match_are_all_listed():
    verify_skippables(nn.Sequential(Stash(), Add()))
    with pytest.raises(TypeError) as raised:
        both = skippable(stash=["x"], pop=["x"])(nn.Identity)
        verify_skippables(nn.Sequential(Stash(), Stash(), both(), nn.Sequential(skippable(pop=["y"])(nn.Identity)())))
    message = str(raised.value)
    assert message.startswith("one or more pairs of stash and pop do not match:\n  * ")
    assert "* layer '1' (1) stashes 'skip', which layer '0' (0) already stashes: isolate one of them" in message
    assert "* layer '2' (2) pops 'x', which no earlier layer stashes: layer '2' (2) does" in message
    assert "* layer '3.0' (3) pops 'y', which no earlier layer stashes" in message
    assert "* layer '0' (0) stashes 'skip', which no layer pops" in message
    with pytest.raises(
        TypeError, match=r"layer '0' \(0\) pops 'skip', which no earlier layer stashes: layer '1' \(1\) does"
    ):
        verify_skippables(nn.Sequential(Add(), Stash()))
    with pytest.raises(TypeError, match="do not match"):
        gpipe.GPipe(nn.Sequential(Stash()), [1])


def test_isolated_layers_use_the_same_names():
    a, b = Namespace(), Namespace()
    layers = [Stash().isolate(a), Stash().isolate(b, only=["skip"]), Add().isolate(a), Add().isolate(b)]
    model = nn.Sequential(*layers)
    verify_skippables(model)
    x = torch.ones(2, 1)
    for balance in ([4], [2, 2], [1, 1, 1, 1]):
        assert torch.equal(gpipe.GPipe(model, balance, chunks=2)(x), 3 * x)
    with pytest.raises(ValueError, match="'unknown'"):
        Stash().isolate(a, only=["unknown"])


def test_namespaces_are_ordered_and_equal_their_copies():
    a, b = Namespace(), Namespace()
    assert a != b and (a < b) != (b < a)
    assert copy.deepcopy(a) == a == pickle.loads(pickle.dumps(a))
    assert hash(copy.copy(a)) == hash(a)
    assert isinstance(None, Namespace) and isinstance(a, Namespace) and not isinstance(1, Namespace)


def test_copies_share_their_namespaces():
    space = Namespace()
    model = copy.deepcopy(nn.Sequential(Stash().isolate(space), nn.Linear(1, 1), Add().isolate(space)))
    pipe = gpipe.GPipe(model, [2, 1])
    copied = pickle.loads(pickle.dumps(pipe))
    x = torch.ones(2, 1)
    assert torch.equal(copied(x), pipe(x))


def test_states_saved_by_torchgpipe_can_be_loaded():
    inner = nn.Sequential(nn.Linear(2, 2))

    @skippable(stash=["a"])
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = inner

        def forward(self, x):
            stash("a", x)
            return self.block(x)

    @skippable(pop=["a"])
    class Last(nn.Module):
        def forward(self, x):
            return x + pop("a")

    pipe = gpipe.GPipe(nn.Sequential(Layer(), Last()), [1, 1])
    assert list(pipe.state_dict()) == ["0.block.0.weight", "0.block.0.bias"]
    weight = torch.rand(2, 2)
    block = "partitions.0.0.module.block.0"
    pipe.load_state_dict({f"{block}.weight": weight, f"{block}.bias": torch.zeros(2)})
    assert torch.equal(inner[0].weight, weight)
