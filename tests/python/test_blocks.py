"""Blocks of converted models, which layers call whole, and the guards of the code between them."""

import copy
import functools
import logging
import pickle
import random
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import gpipe
from gpipe import to_sequential
from gpipe.exported.guards import Guards
from gpipe.exported.read import Read
from small_models import Calls, batch, make_net, names_of


def test_blocks_are_modules_of_a_class_that_repeats_and_modules_without_others():
    net = make_net()
    sequence = to_sequential(net, batch())
    assert names_of(sequence) == ["first", "second", "drop", "head"]
    assert [layer.child(layer.name) for layer in sequence] == [net.first, net.second, net.drop, net.head]


class Inner(nn.Linear):
    """Fake tensors cannot run it."""

    def forward(self, x):
        return super().forward(x) if x.sum() > -1e6 else x


class Level(nn.Module):
    """A level of a U-Net, with the levels below."""

    def __init__(self, inner):
        super().__init__()
        self.down, self.inner, self.up = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x):
        return x + self.up(self.inner(self.down(x)))


@pytest.mark.parametrize("make, names", [
    (lambda: nn.Sequential(nn.Sequential(Level(Inner(4, 4)), Level(Inner(4, 4))), nn.ReLU()), ["0.0", "0.1", "1"]),
    (lambda: Level(Level(Level(nn.ReLU()))), ["down", "inner.down", "inner.inner", "inner.up", "up"]),
])  # fmt: skip
def test_blocks_may_have_submodules_but_none_of_their_own_class(make, names):
    model = make().double()
    sequence = to_sequential(model, batch())
    assert names_of(sequence) == names
    assert torch.equal(sequence(batch(9)), model(batch(9)))


class Branches(nn.Linear):
    """Cannot be exported: its control flow depends on data."""

    def forward(self, x, factor):
        y = super().forward(x)
        return {"y": y * factor if y.sum() > -1e6 else -y}


def test_opaque_modules_are_kept_whole():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "odd": Branches(4, 4), "b": nn.Linear(4, 4)}).double()
    model.forward = lambda x: model["b"](model["odd"](model["a"](x), factor=3)["y"]) + x
    native = to_sequential(model, batch(), native=True)
    assert "2 of 3 layers run without Python\n'odd' (Branches) cannot be exported: its control flow" in native.report()
    torch.testing.assert_close(native(batch()), model(batch()))
    model.a.compile(backend="eager")  # keeps the module compiled
    model.odd.inner = nn.Identity()
    sequence = to_sequential(model, batch(), opaque=[Branches, nn.Identity])
    assert "'a' calls the module 'a', which is kept whole" in sequence.report()
    assert names_of(sequence) == ["a", "odd", "b"]
    assert sequence.state_dict().keys() == model.state_dict().keys()
    assert "forward" not in vars(model.odd)
    pipe = gpipe.GPipe(copy.deepcopy(sequence), [1, 1, 1], chunks=3)
    torch.testing.assert_close(sequence(batch()), model(batch()))
    torch.testing.assert_close(pipe(batch(9)), torch.cat([model(part) for part in batch(9).chunk(3)]))
    pipe(batch()).sum().backward()
    assert pipe.get_parameter("odd.weight").grad is not None
    model.forward = lambda x: model["odd"](x, factor=1j)["y"]
    with pytest.raises(ValueError, match="must get tensors, numbers, texts and None, but Branches does not"):
        to_sequential(model, batch(), opaque=[Branches])


def test_parameters_of_exported_code_stay_tied():
    model = Calls(lambda m, x: m.a(x * m.scale) * m.again)
    model.scale = model.again = nn.Parameter(torch.ones(4).double())
    sequence = to_sequential(model, batch())
    torch.testing.assert_close(sequence(batch()), model(batch()))
    model.again = nn.Parameter(torch.ones(4).double())
    with pytest.raises(RuntimeError, match=r"'scale' and 'again' of the model \(Calls\) are no longer the same"):
        sequence(batch())


def test_an_input_that_requires_grad_is_noticed_without_grad_mode_too():
    sequence = to_sequential(Calls(lambda m, x: m.a(x) * (2 if x.requires_grad else 1)), batch())
    with torch.no_grad(), pytest.raises(RuntimeError, match="for inputs that require grad"):
        sequence(batch().requires_grad_())


SETTINGS = SimpleNamespace(scale=1.0)


class Reads(nn.Linear):
    """Has attributes, and a forward that reads globals."""

    def __init__(self):
        super().__init__(2, 2)
        self.sizes, self.shape, self.random, self.kinds = [1, 2], (2, (3, [4])), random.Random(0), {8, 0}

    def forward(self, x):
        return x * SETTINGS.scale

    renamed = functools.wraps(nn.Module.forward)(lambda self: 1)  # pickle does not find it


@pytest.mark.parametrize(("change", "message"), [
    (lambda module, patch: setattr(module, "in_features", 2.0), "attribute 'in_features'"),
    (lambda module, patch: delattr(module, "in_features"), "attribute 'in_features'"),
    (lambda module, patch: module.sizes.append(3), "attribute 'sizes'"),
    (lambda module, patch: module.shape[1][1].append(3), "attribute 'shape'"),
    (lambda module, patch: module.random.random(), "attribute 'random'"),
    (lambda module, patch: module.kinds.add(9), "attribute 'kinds'"),
    (lambda module, patch: setattr(module, "forward", lambda x: x), "attribute 'forward'"),
    (lambda module, patch: setattr(module, "__class__", nn.Linear), "its class"),
    (lambda module, patch: setattr(module, "bias", None) or module._parameters.pop("bias"), "its parameters"),
    (lambda module, patch: module.register_forward_hook(print), "its forward hooks"),
    (lambda module, patch: patch.setattr(SETTINGS, "scale", 2.0), r"'test_blocks\.SETTINGS\.scale' has changed"),
    (lambda module, patch: patch.setattr(Reads, "renamed", lambda self: 2), r"'Reads\.renamed' has changed"),
])  # fmt: skip
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("copies", [tuple, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_guards_see_each_change(change, message, calls, copies, monkeypatch):
    module, read = Reads(), Read({(__name__, "SETTINGS")}, {"SETTINGS", "scale", "renamed", "device"})
    guards = Guards(module, {"": module}, [torch.float32], {}, read, (), [], [])
    for _ in range(calls):
        guards.check([torch.ones(1)])
        module.train(not module.training)
        module.weight = nn.Parameter(torch.zeros(2, 2))
    guards, module = copies((guards, module))
    module.kinds = {0, 8}  # an equal set, in another order
    module.device = "cpu"  # which trainers set
    guards.check([torch.ones(1)])
    change(module, monkeypatch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            guards.check([torch.ones(1)])


class Raises:
    """Raises another error than AttributeError, and computes an attribute when it is read first."""

    half = functools.cached_property(lambda self: 0.5)

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize("odd", [Raises, torch.eye(2).to_sparse, lambda: numpy.array(["text" * 9, None], dtype=object)])
def test_copies_of_guards_accept_odd_objects(odd):
    module = Reads()
    module.odd = odd()
    guards = Guards(module, {"": module}, [torch.float32], {}, Read(set(), {"odd"}), (), [], [])
    pickle.loads(pickle.dumps(guards)).check([torch.ones(1)])


def test_guards_do_not_need_what_another_process_has_not_computed_yet(monkeypatch):
    monkeypatch.setattr(SETTINGS, "scale", Raises())
    assert SETTINGS.scale.half
    read = Read({(__name__, "SETTINGS")}, {"scale", "half"})
    guards = copy.deepcopy(Guards(Reads(), {}, [torch.float32], {}, read, (), [], []))
    del SETTINGS.scale.half
    guards.check([torch.ones(1)])


def test_guards_ignore_loggers_and_modules_that_are_not_read(monkeypatch):
    monkeypatch.setattr(SETTINGS, "scale", logging.getLogger(__name__))
    monkeypatch.setattr(SETTINGS, "modules", sys.modules, raising=False)
    read = Read({(__name__, "SETTINGS")}, {"scale", "modules", "level", "float_repr_style"})
    guards = Guards(Reads(), {}, [torch.float32], {}, read, (), [], [])
    monkeypatch.setattr(sys, "float_repr_style", "legacy")
    monkeypatch.setattr(SETTINGS.scale, "level", logging.DEBUG)
    guards.check([torch.ones(1)])


class TwiceSigmoid(torch.autograd.Function):
    """Has a backward of its own. Changes in place what the backward of a sigmoid needs."""

    forward = staticmethod(lambda context, x: x.sigmoid().mul_(2))
    backward = staticmethod(lambda context, gradient: gradient * 2)


class OwnBackward(nn.Linear):
    def forward(self, x):
        return TwiceSigmoid.apply(super().forward(x))


class Grows(nn.Linear):
    """Makes its buffer in the first call."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1]).to(x)
        return super().forward(x) + self.table


@pytest.mark.parametrize(("odd", "reason"), [
    (OwnBackward(4, 4), "calls a torch.autograd.Function with its own backward"),
    (Grows(), "changes the shape of a buffer"),
])  # fmt: skip
def test_what_cannot_be_native_is_kept_whole(odd, reason):
    model = nn.Sequential(nn.Linear(4, 4), odd, nn.Tanh())
    sequence = to_sequential(nn.Sequential(model), batch().float(), native=True)
    assert sequence.report().startswith("2 of 3 layers") and reason in sequence.report()
    outputs = [sequence(batch().float()), model(batch().float())]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), odd.weight)[0] for each in outputs))


class Key:
    value = 2.0


def counting():
    count = 0

    def double(x):
        nonlocal count
        count += 1
        return x * 2.0

    return double


@pytest.mark.parametrize("odd", [{Key(): Key()}, {Key() for _ in range(9)}, counting()])
def test_guards_see_nothing_else_than_changes(odd):
    class Model(nn.Sequential):
        def forward(self, x):
            held = next(iter(self.held)) if isinstance(self.held, (dict, set)) and self.held else self.held
            return super().forward(held(x) if callable(held) and not isinstance(held, type) else x * held.value)

    model, x = Model(nn.Linear(4, 4), nn.Linear(4, 4)), batch().float()
    model.held = odd
    sequence = to_sequential(model, x)
    expected = model(x)
    inner = model[1].forward
    model[1].forward = lambda x: inner(x)  # a block is called as it is
    for each in (sequence, copy.deepcopy(sequence)):
        torch.testing.assert_close(each(x), expected)
