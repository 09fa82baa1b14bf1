"""Conversion of modules to sequences: structure, names, inputs and outputs, modes, and what is refused."""

import copy
import gc
import logging
import math
import pickle
import random
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import gpipe
from gpipe import to_sequential
from gpipe.skip import verify_skippables
from gpipe.wrapper import layers_in
from habits import Triple
from helpers import named_gradients
from small_models import Calls, Returns, batch, make_net, names_of


def test_layers_are_named_after_modules():
    sequence = to_sequential(make_net(), batch(), native=True)
    block = ["linear", "norm", "act"]
    assert names_of(sequence) == [
        *(f"first.{name}" for name in block),
        "first",  # its own parameter
        "first.act_1",
        *(f"second.{name}" for name in block),
        "second",
        "second.act_1",
        "drop",
        "head",
    ]
    assert list(layers_in(sequence))[:2] == ["first_linear", "first_norm"]
    assert names_of(to_sequential(make_net().requires_grad_(False), batch(), native=True)) == names_of(sequence)
    # The input of a block is a skip to its sum.
    stashed = {name for layer in sequence for name in layer.stashable_names}
    assert stashed == {"first.linear -> first", "first.act_1 -> second"}


def test_tensors_are_the_modules_own():
    net = make_net()
    sequence = to_sequential(net, batch())
    for module in (sequence, gpipe.GPipe(sequence, [2, len(sequence) - 2])):
        for name, parameter in module.named_parameters():
            assert parameter is net.get_parameter(name) is module.get_parameter(name)
        assert module.get_buffer("table") is net.table


class Pair(NamedTuple):
    sum: torch.Tensor
    rest: list


class Several(Calls):
    def forward(self, x, factor, *more, mask=None, power=1, **others):
        y = self.b(self.a(x) * (1 if mask is None else mask)) ** power + sum(more) - others.get("shift", 0)
        return Pair(y + x, [None, {"y": y, "factor": factor}])


X = batch()


@pytest.mark.parametrize("args, kwargs", [
    ((X, X + 1), {"mask": X, "power": 2}),
    ((), {"factor": X, "x": X, "shift": X * 2}),  # one tensor is two inputs
    ((X,), {"factor": X, "shift": X}),
    ((X, X + 1, X + 2), {"shift": X}),
    ((X, X + 1, X + 2), {}),
])  # fmt: skip
def test_inputs_and_outputs_are_trees(args, kwargs):
    model = Several(None)
    sequence = to_sequential(model, *args, **kwargs)
    tensors = {name: each for name, each in kwargs.items() if isinstance(each, torch.Tensor)}
    input = (args, tensors) if args and tensors else args or tensors
    expected = model(*args, **kwargs)
    pipe = gpipe.GPipe(sequence, [1, 1], chunks=3)
    for output in (sequence(input), pipe(input), pipe(*args, **tensors), pipe(*args, **tensors, other=None)):
        assert type(output) is Pair and output.rest[0] is None
        torch.testing.assert_close(output.sum, expected.sum)
        torch.testing.assert_close(output.rest[1], expected.rest[1])
    with pytest.raises(TypeError, match=r"another structure of the input: expected .*, but got .*; give what"):
        sequence(X)
    with pytest.raises(TypeError):
        pipe(*args, **tensors, scale=2.0)  # which the conversion did not see
    assert "forward" not in vars(model)


def test_copies_and_pickles():
    net = make_net()
    sequence = to_sequential(net, batch(), native=True).eval()
    for other in (copy.deepcopy(sequence), pickle.loads(pickle.dumps(sequence)), sequence[:], nn.Sequential(sequence[:5], sequence[5:])):
        assert torch.equal(other(batch()), sequence(batch()))
        assert set(other.parameters()) == set(net.parameters()) or set(other.parameters()).isdisjoint(net.parameters())
    with pytest.raises(TypeError, match="layer 'first.linear' .* stashes 'first.linear -> first', which no layer pops"):
        verify_skippables(sequence[:3])


@pytest.mark.parametrize("native", [False, True])
def test_a_conversion_keeps_no_module(native):
    net = make_net()
    kept = weakref.ref(net)
    to_sequential(net, batch(), native=native)
    del net
    gc.collect()
    assert kept() is None


def counts_through_a_view(self, x):
    h = self.b(self.a(x) * self.count.clone())
    self.count[0].add_(1)
    return h + 1


def test_constants_among_the_inputs_stay():
    sequence = to_sequential(Returns(lambda x, factor: x * factor), batch(), 2)
    assert torch.equal(sequence((batch(), None)), batch() * 2)
    for given, message in (
        ((batch(), 3), "input 1 is 3, but was a constant at the conversion; give None"),
        ((None, None), "input 0 is None, but must be a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            sequence(given)


def test_what_is_equal_in_both_modes_is_no_choice():
    sequence = to_sequential(Returns(lambda x: x.masked_fill(x > 0, math.nan) + torch.tensor([math.nan])), batch())
    assert len(list(sequence[0].buffers())) == 1
    assert not any("training" in layer.description for layer in sequence)


class Outputs(NamedTuple):
    out: torch.Tensor
    aux: torch.Tensor


def other_arguments(m, x):
    y = m.a(x)
    return m.d(torch.cat([y, m.b(y), x] if m.training else [y, x], 1).view(x.shape[0], -1, 4).mean(1))


def auxiliary_or_nothing(m, x):
    y = m.a(x)
    z = m.b(y)
    return Outputs(m.d(y), m.c(z)) if m.training else m.d(y) + z


def more_in_evaluation(m, x):
    y = m.a(x)
    return m.b(y) if m.training else [m.b(y), (m.c(y), m.d(x).relu())]


def total(output):
    return sum(leaf.sin().sum() for leaf in tree_leaves(output) if leaf is not None)


HARD = {
    "counts through a view": counts_through_a_view,
    "names that are no identifiers": lambda m, x: m.b(m.a(x) * m.shifts[0] + m.scales["class"]) * m.scales["w-1"] + m.shifts[1],
    "calls layers under vmap": lambda m, x: m.b(torch.vmap(lambda row: m.b(m.a(row)) + m.count)(x)),
    "another layer": lambda m, x: m.d(m.b(x) if m.training else m.c(x)),
    "another order": lambda m, x: m.d(m.b(m.c(x)) if m.training else m.c(m.b(x))),
    "other arguments": other_arguments,
    "auxiliary or nothing": auxiliary_or_nothing,
    "more in evaluation": more_in_evaluation,
    "output of a block": lambda m, x: sum(each for each in m.maybe(m.a(x)) if each is not None),
}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_divide(name, native):
    model = Calls(HARD[name])
    plain = copy.deepcopy(model)
    sequence = to_sequential(model, batch(), native=native)
    chunks = 1 if "count" in name else 2
    pipe = gpipe.GPipe(copy.deepcopy(sequence), [1] * len(sequence), chunks=chunks, checkpoint="always")
    for mode in (True, False, True):
        outputs = []
        for module in (plain, sequence, pipe):
            module.train(mode).zero_grad()
            outputs.append(module(batch()))
            total(outputs[-1]).backward()
            assert type(outputs[-1]) is type(outputs[0])
            torch.testing.assert_close(outputs[-1], outputs[0])
            torch.testing.assert_close(named_gradients(module), named_gradients(plain))
    for module in (plain, pipe):
        module.zero_grad()
    pipe.step(batch(), batch(), gpipe.Loss(lambda output, target: total(output), reduction="sum"))
    total(plain(batch())).backward()
    torch.testing.assert_close(named_gradients(pipe), named_gradients(plain))


FREE = nn.Parameter(torch.ones(4).double())


def convert_net(change):
    net = make_net()
    change(net)
    return to_sequential(net, batch())


def convert(function):
    return to_sequential(Returns(function), batch().requires_grad_())


class MaskedEncoder(nn.TransformerEncoder):
    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8, 0, batch_first=True), 1)

    def forward(self, x):
        return super().forward(x, mask=nn.Transformer.generate_square_subsequent_mask(5))


def centred(model, x):
    return model.a(x - x.mean(0)) if model.training else model.a(x)


def of_several(x):
    assert len(x) > 1
    return x - x.mean(0)


def along_1(function):
    return to_sequential(Returns(function), torch.randn(5, 6, 4), batch_dim=1)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 4, batch_first=True).double()

    def forward(self, x):
        lengths = (x > 0).sum(1).clamp_min(1)
        return self.rnn(nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, True, enforce_sorted=False))[1][0]


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: convert(lambda x: x.view(6, 2, 2)), ValueError, "fixes dimension 0 of an input, the batch, to 6"),
    (lambda: convert(lambda x: (x * 2, x.mean())), ValueError, r"output 1 of 2 has the shape \(\), without"),
    (lambda: convert(lambda x: x.softmax(0)), ValueError, "output 0 for one sample depends on the other samples"),
    (lambda: convert(lambda x: x[:, : len(x)] * 2), ValueError, "output 0 for one sample depends on the other samples"),
    (lambda: convert(lambda x: x), ValueError, "it computes nothing"),
    (lambda: convert(lambda x: (x * 2, x.argmax(0)[:1].expand(len(x)))), ValueError, "output 1 for one sample depends on the"),
    (lambda: convert(lambda x: (x * 2, random.Random(0))), ValueError, "returns a random.Random; return tensors, alone"),
    (lambda: to_sequential(Calls(centred), batch()), ValueError, "for one sample depends on .* mini-batch in training mode"),
    (lambda: convert(of_several), ValueError, "output 0 for one sample depends on the other samples"),
    (lambda: convert(lambda x: x @ x), ValueError, r"\(Returns\), because it fails on this .*mat1 and mat2"),
    (lambda: convert(lambda x: x * float(x.mean())), ValueError, "cannot convert the model"),
    (lambda: convert(lambda x: x if torch.all(x > 0) else -x), ValueError, r"depends on data \(.*test_to_seq.*; move that to"),
    (lambda: to_sequential(Calls(lambda m, x: m.a(x) + m.count.data), batch()), ValueError, r"\.data .*; use detach\(\)"),
    (lambda: convert(lambda x: Triple.apply(x)), ValueError, "the gradient of input 0 differs"),
    (lambda: convert(lambda x: x * FREE), ValueError, "no module has registered differs.*nn.ModuleList"),
    (lambda: convert(lambda x: x * random.random()), ValueError, "output 0 of a second call differs"),
    (lambda: to_sequential([nn.Tanh()], batch()), TypeError, r"must be nn.Module, but is \[Tanh\(\)\]; nn.Sequential"),
    (lambda: to_sequential(make_net(), batch(), opaque=int), TypeError, "opaque must be a list .* <class 'int'>"),
    (lambda: to_sequential(make_net(), batch(), opaque=[nn.LSTM]), ValueError, "opaque has LSTM, but no submodule"),
    (lambda: to_sequential(make_net()), ValueError, "give an example input"),
    (lambda: to_sequential(make_net(), torch.tensor(1.0)), ValueError, r"an input is tensor\(1.\), but"),
    (lambda: to_sequential(make_net(), batch(0)), ValueError, r"an input is a tensor of shape \(0, 4\), but"),
    (lambda: convert(lambda x: x * torch.from_numpy(x.detach().numpy())), ValueError, r"calls numpy\(\) .*use functions"),
    (lambda: convert(lambda x: (yield x)), ValueError, "returns a generator; return tensors, alone"),
    (lambda: convert(lambda x: (x + 1, "a")), ValueError, "output 1 of 2 is 'a', but must be a tensor"),
    (lambda: convert(lambda x, y: x + y), ValueError, r"float64 \(.*missing.*'y'; give arguments by name"),
    (
        lambda: to_sequential(nn.GRU(4, 4, 2), torch.randn(5, 3, 4), torch.zeros(2, 3, 4)),
        ValueError,
        "have 2 and 5 samples; let the model itself make .* mask, and pass batch_dim=1 if its sequences come first",
    ),
    (lambda: to_sequential(make_net(), batch(), batch_dim=2), ValueError, "batch_dim must be 0 or 1, but is 2"),
    (lambda: along_1(lambda x: x.view(-1, 4) * 2), ValueError, r"\(5\*samples, 4\), .* dimension 1; .*, not flattened"),
    (lambda: along_1(lambda x: x.softmax(1)), ValueError, "cuts along dimension 1; leave out batch_dim, and compute losses"),
    (
        lambda: to_sequential(nn.Bilinear(4, 4, 4), torch.randn(5, 6, 4), torch.randn(5, 7, 4), batch_dim=1),
        ValueError,
        "dimension 1 of each input must be the batch, but the example's have 6 and 7 samples; let .* such as a causal mask$",
    ),
    (lambda: to_sequential(torch.jit.script(make_net()), batch()), ValueError, "it is compiled by TorchScript; use"),
    (lambda: to_sequential(torch.compile(make_net()), batch()), ValueError, r"use the .* and call compile\(\) of its blocks"),
    (lambda: to_sequential(Packed(), batch()), ValueError, r"'rnn' \(RNN\) .* takes or returns something else than tensors"),
    (lambda: convert_net(lambda net: setattr(net, "drop", torch.jit.script(nn.Linear(4, 4).double()))), ValueError, "'drop' is compiled by TorchScript"),
    (lambda: convert_net(lambda net: net.register_forward_hook(lambda *_: None)), ValueError, r"it \(Net\) has a hook"),
    (lambda: to_sequential(nn.DataParallel(make_net()), batch()), ValueError, "it is a DataParallel; convert its .module, a"),
    (lambda: to_sequential(MaskedEncoder(), torch.randn(2, 5, 4), native=True), ValueError, "its mask; pass is_causal=True or"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_what_cannot_be_converted(call, error, message, capfd):
    handler, register_hook = logging.getLogger("torch").handlers[0], torch.Tensor.register_hook
    filters = list(handler.filters)
    with pytest.raises(error, match=message):
        call()
    # What an export prints is not shown, and what was replaced for it is back.
    assert capfd.readouterr() == ("", "")
    assert handler.filters == filters and "print" not in vars(torch.export._trace)
    assert torch.Tensor.register_hook is register_hook
    Triple.apply(batch())


class Routed(nn.Module):
    """Each of two experts gets the rows that a gate chooses."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        rows = x.reshape(-1, 4)
        chosen = self.gate(rows).argmax(-1)
        order = chosen.sort().indices
        parts = rows[order].split(nn.functional.one_hot(chosen, 2).sum(0).tolist())
        mixed = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return torch.zeros_like(rows).index_add(0, order, mixed).view_as(x)


@pytest.mark.parametrize("native", [False, True])
def test_sizes_that_depend_on_data(native):
    model = Routed()
    sequence = to_sequential(model, torch.randn(6, 3, 4), native=native)
    for shape in ((6, 3, 4), (5, 7, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(sequence(x), model(x), rtol=0, atol=0)
