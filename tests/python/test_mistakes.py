"""Mistakes that a new user may make, and errors of layers: each answer says what was wrong, where, and what to do."""

import sys
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from gpipe import balance
from helpers import Fail, make_linears, notes
from small_models import Returns

X, Y = torch.rand(8, 3), torch.rand(8, 3)
HUGE = 10**30
FOUR = [1] * 4
LAYER = nn.Linear(3, 3)
needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
MOVE = "denied to move parameters and buffers"


def loss(output, target):
    return F.mse_loss(output, target)


def pipe(balance=(2, 2), **options):
    return gpipe.GPipe(make_linears(), balance, **{"chunks": 2, **options})


def step(*arguments, **options):
    return pipe().step(*(arguments or (X, Y, loss)), **options)


def counted(count, **options):
    return step(X, Y, gpipe.Loss(loss, count=count, **options))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x))


def counting():
    """Returns a model whose only child does more than compute."""
    inner = Whole()
    inner.forward = lambda x: setattr(inner, "count", len(x)) or Whole.forward(inner, x)
    model = Returns(lambda x: inner(x))
    model.inner = inner
    return model


class DoublesItsResult(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def changed(change, *arguments):
    """Makes a pipeline of a model that has been changed."""
    layers = make_linears()
    change(layers, *arguments)
    return gpipe.GPipe(layers, [2, 2])


def from_module(**options):
    return gpipe.GPipe.from_module(Whole(), X, **options)


def batched_gradients():
    output = (pipeline := pipe())(X)
    torch.autograd.grad(output, [*pipeline.parameters()], torch.ones(2, *output.shape), is_grads_batched=True)


def gradient_penalty():
    x = X.clone().requires_grad_()
    torch.autograd.grad(pipe()(x).sum(), x, create_graph=True)


def instance_norm():
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    gpipe.GPipe(nn.Sequential(norm), [1], deferred_batch_norm=True)(torch.rand(2, 3, 4))


def added_layer():
    pipeline = pipe()
    pipeline.more = LAYER
    pipeline(X)


MISTAKES = [
    # The constructor.
    (lambda: gpipe.GPipe(make_linears()), gpipe.pipeline.BalanceError, r"balance is empty; give .*\[4\](.|\n)*gpipe\.balance"),
    (lambda: pipe(2), TypeError, r"balance must be a list .*, but is 2(.|\n)*gpipe\.balance"),
    (lambda: pipe([2.0, 2]), TypeError, "each number of a balance must be an integer, but is 2.0"),
    (lambda: pipe(chunks=True), TypeError, "chunks must be an integer, but is True"),
    (lambda: setattr(pipe(), "checkpoint", "sometimes"), ValueError, "checkpoint must be .*, but is 'sometimes'"),
    (lambda: pipe(checkpoint=True), TypeError, "checkpoint must be 'always', 'except_last', 'never', a number .* but is True"),
    (lambda: pipe(checkpoint=-1), ValueError, "checkpoint is -1, but the number of micro-batches must not be negative"),
    (lambda: pipe(deferred_batch_norm="no"), TypeError, "deferred_batch_norm must be True or False, but is 'no'"),
    (lambda: pipe(placement="w"), ValueError, "placement must be 'looped', 'v' or a list of workers, but is 'w'"),
    (lambda: pipe(FOUR, devices=["cpu"] * 2), IndexError, "too few devices: 4 workers, but 2 devices; a device may be"),
    (lambda: pipe(devices="cpu"), TypeError, "devices must be a list with one device per worker, but is 'cpu'"),
    (lambda: pipe(devices=[True, True]), TypeError, "a device must be .*, but is True"),
    (lambda: pipe(devices=[]), IndexError, "devices is empty; give one device per worker"),
    (lambda: pipe(devices=["cuda:99"] * 2), IndexError, "device cuda:99 does not exist: this process sees [0-9]+ CUDA device"),
    (lambda: gpipe.GPipe(Whole(), [1, 1]), TypeError, r"use gpipe.GPipe.from_module\(module, input, stages=2\)"),
    (lambda: gpipe.GPipe([nn.Linear(3, 3)], [1]), TypeError, r"but is <class 'list'>; .* nn.Sequential\(\*layers\)"),
    (lambda: gpipe.GPipe(nn.Sequential(LAYER, LAYER), [1, 1]), ValueError, "layers '0' and '1' are the same module; use a copy"),
    # The model.
    (lambda: changed(nn.Module.compile), TypeError, r"\(Sequential\) has a forward of its own"),
    (lambda: gpipe.GPipe(DoublesItsResult(LAYER), [1]), TypeError, r"\(DoublesItsResult\) has a forward of its own"),
    (lambda: changed(nn.Module.register_forward_pre_hook, loss), ValueError, "model itself, .*, has a forward pre hook"),
    (lambda: changed(nn.Module.register_parameter, "scale", nn.Parameter(X)), ValueError, r"a parameter \('scale'\)"),
    (lambda: changed(nn.Module.register_buffer, "offset", X), ValueError, r"has a buffer \('offset'\), which .* lose"),
    (lambda: gpipe.GPipe(nn.Sequential(nn.LazyBatchNorm1d(affine=False)), [1]), ValueError, "'0.running_mean' of a lazy"),
    (instance_norm, RuntimeError, "(?s)instance norm.*track_running_stats=False.*layer '0'"),
    # Inputs, targets and losses.
    (lambda: pipe()(X, Y), TypeError, r"the first layer takes one input, but got 2 arguments; call pipe\(\(a, b\)\), or"),
    (lambda: pipe()(ids=X), TypeError, r"takes one input, but got 1 arguments; call .* pipe\({'name': a}\)"),
    (lambda: from_module(balance=[1, 1])(X, use_cache=False), TypeError, "<class 'bool'> for 'use_cache'; .* call pipe.module"),
    (lambda: pipe()({"x": X, "use_cache": False}), TypeError, r"but got <class 'bool'> for 'use_cache'; .* leave it out"),
    (lambda: pipe()(X.numpy()), TypeError, "expected Tensor, but got <class 'numpy.ndarray'>"),
    (lambda: pipe()(UserDict(x=X)), TypeError, r"expected Tensor, but got <class 'collections.UserDict'>; .* pass dict\(...\)"),
    (lambda: pipe()((X, Y[:3])), ValueError, r"the tensors of the input have unequal batch sizes \(\[8, 3\]\)"),
    (lambda: step(loss, X, Y), TypeError, r"loss must be a function of output and target, but is a tensor of shape \(8, 3\)"),
    (lambda: step(X, Y, nn.MSELoss), TypeError, r"loss is the class MSELoss; pass an object of it, such as MSELoss\(\)"),
    (lambda: step(X, Y, lambda *both: loss(*both).item()), TypeError, r"the loss function returned \d.*; return a tensor"),
    (lambda: step(X, [Y], nn.CrossEntropyLoss()), TypeError, "argument 'target' .* must be Tensor, not list"),
    (lambda: counted(len, reduction="sum"), ValueError, "count weights a mean"),
    (lambda: gpipe.Loss(loss, count=8), TypeError, "count must be a function of a target, but is 8"),
    (lambda: counted(lambda y: y > 0), TypeError, r"count returned a tensor of shape \(4, 3\); return .*\.sum\(\)"),
    (lambda: gpipe.Loss(loss, reduction="avg"), ValueError, "reduction must be 'mean' or 'sum', but is 'avg'"),
    (lambda: pipe().requires_grad_(False).step(X, Y, F.mse_loss), RuntimeError, r"no input requires grad: unfreeze .* evaluate\(\)"),
    (added_layer, RuntimeError, "'more' was added to the model of this pipeline or taken from it; make another pipeline"),
    (batched_gradients, NotImplementedError, "cannot run under vmap, so not with is_grads_batched; call it once per gradient"),
    (gradient_penalty, NotImplementedError, "differentiated twice; .*, and compute a gradient penalty with the plain model"),
    # Other methods.
    (lambda: pipe().trace("x.json"), TypeError, r"timeline must be a gpipe.Timeline or None, but is 'x.json'; write timeline"),
    (lambda: pipe().load_state_dict({"2.weight": X}, strict=False), RuntimeError, r"size mismatch for 2\.weight: .*\[8, 3\]"),
    (lambda: setattr(pipe(), "chunk", 8), AttributeError, "a pipeline has no 'chunk'; did you mean 'chunks'?"),
    (lambda: setattr(pipe(), "schedule", "1f1b"), AttributeError, r"'schedule' .* gpipe.GPipe\(model, ..., schedule=...\)"),
    # Other functions.
    (lambda: gpipe.GPipe.from_module(Whole(), X, 2), TypeError, "kwargs must be a dict of .* arguments, but is 2; give stages by name"),
    (lambda: gpipe.GPipe.from_module(Whole(), {"x": X}), ValueError, "not dict; give arguments by name as kwargs="),
    (lambda: gpipe.GPipe.from_module(Whole(), [X.tolist()]), ValueError, "give an example input, with tensors"),
    (lambda: from_module(chunk=4), TypeError, "unexpected keyword argument 'chunk'"),
    (lambda: from_module(stages=2, balance=[1, 1]), ValueError, "balance and stages exclude each other: .*; leave stages out"),
    (lambda: from_module(stages=2, devices=["cpu"], seconds=0), ValueError, "no schedule and number of replicas suits 1 devices"),
    (lambda: gpipe.GPipe.from_module(Whole(), X, stages=7), ValueError, "the number of stages must be between 1 and .* but is 7"),
    (lambda: gpipe.GPipe.from_module(counting(), X, stages=2), ValueError, r"1 layers, too few .*\n.*'count' .*; move that"),
    # Balances and plans.
    (lambda: balance.balance_by_size(1, [LAYER], X), TypeError, "module must be nn.Sequential"),
    (lambda: balance.profile(make_linears(), [1, 2]), TypeError, "expected Tensor, but got <class 'int'>"),
    (lambda: gpipe.plan(make_linears(), X, []), ValueError, "at least one device"),
    (lambda: gpipe.plan(make_linears(), X, ["cpu"], memory="6 apples"), ValueError, "memory must be a size, .* but is '6 apples'"),
    (lambda: gpipe.plan(make_linears(), X, ["cpu"], memory=1.5), TypeError, "memory must be a size, .* but is 1.5"),
    (lambda: gpipe.plan([PROFILE, 1], 8, 2), TypeError, "model must be a model, or Profiles, .* but is 1"),
    (lambda: balance.predict(None, [4], 2), TypeError, "profile must be a Profile.*but is None"),
    # Moving a pipeline to another device.
    (lambda: pipe().cuda(), TypeError, MOVE),
    (lambda: pipe().to("meta", torch.float64), TypeError, MOVE),
    (lambda: pipe().to_empty(device="cpu"), TypeError, MOVE),
    (lambda: nn.Sequential(pipe()).to("meta"), TypeError, MOVE),
]


@pytest.mark.parametrize("call, error, words", MISTAKES, ids=[words[:40] for _, _, words in MISTAKES])
def test_a_mistake_is_answered_in_words(call, error, words):
    with pytest.raises(error, match=words):
        call()


SCHEDULING = {"schedule": "gpipe", "placement": "looped"}
MEASURING = {"module": make_linears(), "sample": X, "intraop_threads": 1, "seconds": 0, "param_scale": 2.0, "progress": None}
PLANNING = {"model": make_linears(), "example": X, "devices": ["cpu"], "replicas": 1, "hosts": 1, "bandwidth": 0.0}
RANKS = {"timeout": 1.0, "join_timeout": 1.0, "interface": "", "replicas": 1}
CUT = {"partitions": 2, "chunks": 2, "checkpoint": "never", "bandwidth": 0.0, "copies": False}
LOSS = {"loss": loss, "target": Y}
PROFILE = balance.profile(make_linears(), X, seconds=0)


def method(name):
    return lambda **arguments: getattr(pipe(), name)(**arguments)


def team(name):
    return lambda **arguments: getattr(pipe().team, name)(**arguments)


CALLS = [
    (gpipe.GPipe, SCHEDULING | {"module": make_linears(), "balance": [4], "devices": ["cpu"], "chunks": 2, "group": None}),
    (gpipe.GPipe.from_module, {"module": make_linears(), "args": X, "stages": 2, "seconds": 0}),
    (method("step"), LOSS | {"input": X, "scale": 1.0, "return_output": False}),
    (method("compute_loss"), LOSS | {"input": X, "scale": 1.0}),
    (team("gather"), {"data": b"", "what": "bytes"}),
    (team("sum_over_replicas"), {"numbers": [1.0]}),
    (method("clip_grad_norm_"), {"max_norm": 1.0, "norm_type": 2.0}),
    (gpipe.Loss, {"function": loss, "count": len, "reduction": "mean", "check": True}),
    (gpipe.losses.check_loss, LOSS | {"output": X, "chunks": 2}),
    (gpipe.Ranks.from_environment, RANKS),
    (balance.profile, MEASURING | {"device": "cpu", "workers": 1, "repeats": 1}),
    (balance.balance_by_time, {"partitions": 2, "module": make_linears(), "sample": X, "timeout": 0.0, "device": "cpu"}),
    (balance.balance_by_size, CUT | {"module": make_linears(), "input": X, "param_scale": 2.0}),
    (balance.predict, SCHEDULING | {"profile": PROFILE, "balance": [4], "chunks": 1, "checkpoint": "never", "bandwidth": 0}),
    (gpipe.plan, PLANNING | {"seconds": 0, "checkpoint": "never", "schedule": "gpipe", "pilots": 0, "param_scale": 2.0}),
    (PROFILE.balance_by_time, CUT),
    (PROFILE.table, {"balance": [4]}),
    (balance.Profile.from_json, {"text": PROFILE.to_json()}),
]


@pytest.mark.parametrize("function, arguments", CALLS)
def test_no_argument_is_refused_in_the_words_of_the_extension_module(function, arguments):
    for name in arguments:
        for value in (None, True, "text", 2.5, HUGE, [object()], X, nn.MSELoss):
            try:
                function(**{**arguments, name: value})
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                assert "incompatible" not in str(error), (name, value)


def fails_in_its_backward(x):
    y = x.clone()
    if y.requires_grad:
        y.register_hook(lambda _: 1 / 0)  # unlike a raise, this makes no exception object
    return y


def fails_the_second_time(x):
    if gpipe.is_recomputing():
        raise LookupError("not twice")
    return x.clone()


@pytest.mark.parametrize("layer, error, text, place", [
    (Fail(), ValueError, "from the layer", "forward of micro-batch 0 on stage 1, layer '1'"),
    (Returns(fails_in_its_backward), ZeroDivisionError, "by zero", "backward of micro-batch 1 on stage 1"),
    (Returns(fails_the_second_time), LookupError, "not twice", "recompute of micro-batch 1 on stage 1, layer '1'"),
])  # fmt: skip
@needs_notes
def test_an_error_gets_a_note_of_its_place(layer, error, text, place):
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), layer), [1, 1], chunks=2, checkpoint="always")
    for _ in range(2):
        with pytest.raises(error, match=text) as raised:
            pipe(torch.zeros(4, 1)).sum().backward()
        (note,) = notes(raised.value)
        assert note.startswith(f"[gpipe] in the {place}")
        assert "forward" in [entry.name for entry in raised.traceback] or not isinstance(layer, Fail)
        assert pipe[0].weight.grad is None


@needs_notes
@pytest.mark.parametrize("layer, batch, words", [
    (nn.BatchNorm1d(3), X[:1], ("use fewer chunks", "drop_last=True")),
    (Returns(lambda x: (x, x)), X, ("here a tuple; take a tensor of it, such as lambda output, target: criterion(output[0], target)",)),
])  # fmt: skip
def test_a_note_tells_what_to_do(layer, batch, words):
    with pytest.raises((AttributeError, TypeError, ValueError)) as raised:
        gpipe.GPipe(nn.Sequential(nn.Linear(3, 3), layer), [1, 1], chunks=2).step(batch, batch, F.mse_loss)
    assert all(each in notes(raised.value)[0] for each in words)


def test_layers_learn_whether_they_are_recomputed():
    seen = []
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1], chunks=2, checkpoint="except_last")
    pipe[0].register_forward_hook(lambda *_: seen.append((gpipe.is_checkpointing(), gpipe.is_recomputing())))
    pipe(torch.zeros(2, 1)).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]
    assert not gpipe.is_checkpointing() and not gpipe.is_recomputing()
