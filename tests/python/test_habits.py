"""Models with habits of real code equal their pipelines, or are refused by name.

A habit is planted in each repeated block of a model, or in the model's own forward between the blocks. The model trains
and is evaluated as a pipeline, and its twin in a plain loop over micro-batches, in float64. Outputs, gradients, state
and attributes must be equal after each call.
"""

import contextlib
import random
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from conftest import long
from habits import HABITS, numbers

pytestmark = pytest.mark.filterwarnings("ignore")
INTERNAL = vars(nn.Module()).keys() - {"training"}


class Planted(nn.Module):
    """A module with a habit. One without has the name ``''``."""

    def __init__(self, habit, *others):
        super().__init__()
        self.dense, self.habit = nn.Linear(4, 4), habit
        self.do.init(self)

    do = property(lambda self: HABITS[self.habit])


class Block(Planted):
    def forward(self, *args, **kwargs):
        return self.do.forward(self, *args, **kwargs)


class Root(Planted):
    def __init__(self, habit, inside):
        super().__init__(habit)
        self.blocks = nn.ModuleList(planted(Block, inside) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.extra = planted(Block, habit) if self.do.has_interface else None

    def forward(self, input):
        x = self.dense(HABITS[self.habit or self.blocks[0].habit].enter(input))
        for index, block in enumerate(self.blocks):
            x = block.do.call(block, x, input)
            if index == 1:
                x = self.do.call(self.extra, x, input) if self.extra else self.do.use(self, x, input)
        return self.head(x)


def planted(kind, habit, *others):
    methods = {} if kind is Root and HABITS[habit].has_interface else HABITS[habit].methods
    return (type(kind.__name__, (kind,), methods) if methods else kind)(habit, *others)


def piped(model, example, native):
    sequence = gpipe.to_sequential(model, example, native=native)
    first = len(sequence) // 2
    balance = [first, len(sequence) - first] if first else [1]
    return gpipe.GPipe(sequence, balance, devices=["cpu"] * len(balance), chunks=2, checkpoint="never")


def step(called, x, y):
    if isinstance(called, gpipe.GPipe):
        return called.step(x, y, F.mse_loss)
    total = 0.0
    for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
        loss = F.mse_loss(called(a), b) * (len(a) / len(x))
        with torch.autocast("cpu", enabled=False):
            loss.backward()
        total += loss.detach()
    return total


def output(called, x, y=None):
    return called(x) if isinstance(called, gpipe.GPipe) else torch.cat([called(part) for part in x.tensor_split(2)])


def evaluate(called, x, y):
    if isinstance(called, gpipe.GPipe):
        return called.evaluate(x, y, lambda output, target: output)
    modes = [(module, module.training) for module in called.modules()]
    result = output(called.eval(), x)
    called.train()
    for module, module.training in modes:
        pass
    return result


# Each call, whether it is in training mode, and whether it builds no graph.
CALLS = [(step, True, False), (evaluate, True, True)]
CALLS += [(output, False, True), (output, False, False), (output, True, False)]


def frozen(value):
    """Returns a copy of a value that can be compared."""
    if isinstance(value, nn.Parameter):
        return {"value": frozen(value.data), "grad": frozen(value.grad), "requires_grad": value.requires_grad}
    if type(value) is Tensor:
        return value.detach().clone()
    if isinstance(value, list | tuple | SimpleNamespace):
        value = vars(value) if isinstance(value, SimpleNamespace) else dict(enumerate(value))
    if isinstance(value, dict):
        return {str(key): frozen(each) for key, each in value.items()}
    if isinstance(value, random.Random):
        return str(value.getstate())
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value if value is None or isinstance(value, int | str | float) else type(value).__name__


def attributes(module):
    return {name: v for name, v in vars(module).items() if name not in INTERNAL and not name.startswith("_torchdynamo")}


def seen(model, called, **more):
    """Returns what a user sees of a model and of what is called: a pipeline, or the model."""
    own = {name: attributes(module) for name, module in model.named_modules()}
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return frozen(more | {"attributes": own, "model": tensors, "state": called.state_dict(keep_vars=True)})


def differences(actual, expected, path=""):
    if isinstance(expected, dict) and isinstance(actual, dict):
        found = [f"{path}: {sorted(actual.keys() ^ expected.keys())}"] if actual.keys() != expected.keys() else []
        for key in actual.keys() & expected.keys():
            found += differences(actual[key], expected[key], f"{path}.{key}")
        return sorted(found)
    if type(actual) is type(expected) is Tensor and (actual.dtype, actual.shape) == (expected.dtype, expected.shape):
        off = (actual.double() - expected.double()).abs()
        return [] if bool((off <= 1e-9 * (1 + expected.double().abs())).all()) else [f"{path}: off by {off.max():.3g}"]
    same = type(actual) is type(expected) is not Tensor and actual == (
        pytest.approx(expected, 1e-9, 1e-9) if type(expected) is float else expected
    )
    return [] if same else [f"{path}: {str(actual)[:60]} instead of {str(expected)[:60]}"]


def made(name, place):
    """Returns a model with a habit, and the planted modules."""
    torch.manual_seed(0)
    model = planted(Root, name, "") if place == "root" else Root("", name)
    model.to(HABITS[name].example().dtype)
    modules = [model] if place == "root" else list(model.blocks)
    for module in modules:
        HABITS[name].before(module, model)
    return model, modules


def random_states():
    _, key, position, *_ = numpy.random.get_state()
    return [str(random.getstate()), str(key.tolist()), position, torch.get_rng_state()]


@contextlib.contextmanager
def leaves_no_trace(model):
    """Fails if what runs in the context changes a model or the state of a generator."""
    before = seen(model, model, random=random_states())
    try:
        yield
    finally:
        left = differences(seen(model, model, random=random_states()), before)
        assert not left, f"the conversion leaves {left[:2]}"


def trial(name, place, as_pipeline, native=False):
    """Yields the model, and what is seen of it: before the conversion, after it, and after each call."""
    habit = HABITS[name]
    model, modules = made(name, place)
    called, x = model, habit.batch()
    yield model, seen(model, model)
    if as_pipeline:
        with leaves_no_trace(model), habit.converting():
            called = piped(model, habit.example(), native)
    yield model, seen(model, called)
    torch.manual_seed(2)
    for module in modules:
        habit.after(module, model)
    called = habit.whole(called, [x] if as_pipeline else x.tensor_split(2)) or called
    y = numbers(len(x), x.shape[1], 3, seed=3)
    optimizer = torch.optim.SGD(called.parameters(), 0.1)
    for run, training, quiet in CALLS:
        if called.training != training:
            called.train(training)
        with habit.around(), habit.quiet() if quiet else contextlib.nullcontext():
            result = run(called, x, y)
        if run is output and not quiet:
            F.mse_loss(result, y).backward()
        yield model, seen(model, called, **{run.__name__: result})
        if run is step:
            optimizer.step()
        optimizer.zero_grad()
    if habit.bad() is not None:
        with contextlib.suppress(AssertionError, RuntimeError, ValueError):
            yield model, {"accepts": bool(output(called, habit.bad()).numel())}


def is_named(message, model, guard):
    """Returns whether a message names a module, class, attribute or tensor of the model, or a guard."""
    members = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    names = {part for path, _ in members for part in path.split(".") if len(part) > 2}
    for module in model.modules():
        names |= {type(module).__name__, *attributes(module)} - {"habit", "training"}
    return bool(names & set(re.findall(r"\w+", message)) or "model" in message and re.search(guard, message))


def verdict(name, place, native=False):
    """Returns ``equal``, ``REFUSED`` or ``WRONG``, and why."""
    expected = [each for _, each in trial(name, place, False)]
    trying, model = trial(name, place, True, native), None
    for number, wanted in enumerate([*expected, None]):
        try:
            model, actual = next(trying, (model, None))
        except Exception as error:
            refuses = isinstance(error, NotImplementedError | RuntimeError | TypeError | ValueError)
            text = f"call {number}: {type(error).__name__}: {' '.join(str(error).split())}"
            return "REFUSED" if refuses and is_named(str(error), model, HABITS[name].guard) else "WRONG", text
        if found := differences(actual, wanted):
            return "WRONG", f"call {number}: {len(found)} differences: {found[:3]}"
    return "equal", ""


# Habits for which a block may be refused, and why.
MAY_REFUSE = {
    "one sample": "what a sample becomes depends on how many there are",
    "parameter in a list": "it is not registered",
    **dict.fromkeys(["caches by size", "called before"], "a block that fake tensors cannot run takes the sizes of the example"),
    "returns None": "a module that returns nothing is not a block",
    **dict.fromkeys(["number of a block", "number that is set for a call", "frozen for a call"], "the code around it does that"),
    **dict.fromkeys(["dict of several blocks", "generator of several blocks"], "they run at the same time"),
    **dict.fromkeys(["number of another block", "list of several blocks"], "they run at the same time"),
    **dict.fromkeys(["global that blocks pass on", "tensor in a dict of several blocks"], "they run at the same time"),
    "another structure by a hook": "the code around it expects the structure of the conversion",
    "global hook": "the code between blocks would not call it",
    **dict.fromkeys(["attribute of the class", "method of the class", "property"], "each block is of another class, so none repeats"),
    "causal mask": "fake tensors cannot run the kernel of evaluation mode",
    **dict.fromkeys(["uint8 input", "float32 input"], "the code between blocks casts the input"),
    **dict.fromkeys(["default dtype", "converted with a default dtype"], "the code between blocks may read it"),
}
NATIVE = """
    adapter, after | another layer | weight_norm, after | forward hook of a child, after | global hook | number | global
    number in a list of a configuration | attribute of the class | float32 input | float() | dropout.p | norm.eval()
    mode of another module | partial | hook of a tensor that logs | parameter that comes | parameter that goes | autocast
    number of a mixin | table of hooks | another parameter | tied parameters, after | assert | _check_tensor_all() | autocast inside
"""
# Habits that resemble others.
SIBLINGS = """
    own parametrization, before | prune, before | tied parameters, before | requires_grad, before | own forward, before
    forward of a child, before | adapter, before | hook of a parameter, before | pre-hook, after | device | vmap()
    backward hook of a child, after | stride() | frozen norm | functional_call() | _check_tensor_all() | returns a view
    takes a dict | ModuleDict | part of a block | autocast inside
"""
# One of four, and kinds that nothing else has.
KINDS = {"LSTM", "causal mask", "batch second", "caches by size", "default dtype", "mode of another module", "input.requires_grad", "**"}
SHORT = KINDS | {*[*HABITS][::4]}
LONG = {name.strip() for name in re.split(r"[|\n]", SIBLINGS)} | HABITS.keys() - SHORT


@pytest.mark.parametrize("place", ["block", "root"])
@pytest.mark.parametrize("name", [long(name) if name and name in LONG else name for name in HABITS])
def test_a_habit_is_kept_or_refused_by_name(name, place):
    result, why = verdict(name, place)
    assert result == "equal" or result == "REFUSED" and (place == "root" or name in MAY_REFUSE), f"{result}: {why}"


@pytest.mark.parametrize("name", [name.strip() for name in re.split(r"[|\n]", NATIVE) if name.strip()])
def test_a_habit_is_kept_or_refused_by_name_without_blocks(name):
    result, why = verdict(name, "block", native=True)
    assert result in ("equal", "REFUSED"), f"{result}: {why}"


@pytest.mark.parametrize("native", [False, True])
def test_a_pipeline_works_again_when_a_change_is_undone(native):
    model, _ = made("number", "root")
    pipe, x = piped(model, numbers(), native), numbers(seed=2)
    expected = pipe(x)
    for _ in range(2):
        model.scale = 2.0
        for call in (pipe, pipe._sequence, lambda x: gpipe.GPipe(pipe._sequence, pipe.balance, chunks=2)(x)):
            with pytest.raises(RuntimeError, match="its attribute 'scale'"):
                call(x)
        model.scale = 1.0
        assert torch.equal(pipe(x), expected)


def test_a_sequence_works_again_when_what_was_missing_in_its_first_call_is_back():
    model, _ = made("number", "root")
    sequence, x = gpipe.to_sequential(model, numbers()), numbers(seed=2)
    del model.scale
    with pytest.raises(RuntimeError, match="its attribute 'scale'"):
        sequence(x)
    model.scale = 1.0
    assert torch.equal(sequence(x), model(x))


@pytest.mark.parametrize("calls", [0, 1])
def test_a_module_that_is_replaced_is_named_or_used_and_stays_in_the_model(calls):
    for native in (True, False):
        model, _ = made("", "root")
        sequence, x = gpipe.to_sequential(model, numbers(), native=native), numbers(seed=2)
        for _ in range(calls):
            sequence(x)
        model.blocks[1].dense = replaced = nn.Linear(4, 4).double()
        if native:
            with pytest.raises(RuntimeError, match=r"'blocks\.1\.dense' of the model was replaced since the conversion"):
                sequence(x) if calls else gpipe.GPipe(sequence, [1, len(sequence) - 1], chunks=2)
        else:
            torch.testing.assert_close(gpipe.GPipe(sequence, [1, len(sequence) - 1], chunks=1)(x), model(x))
            assert model.blocks[1].dense is replaced


@pytest.mark.parametrize("name", ["logs", "random.Random", "max_norm"])
def test_measuring_leaves_no_trace(name):
    model, _ = made(name, "block")
    with leaves_no_trace(model), contextlib.suppress(NotImplementedError, RuntimeError, TypeError, ValueError):
        gpipe.GPipe.from_module(model, numbers(), stages=2, devices=["cpu", "cpu"], seconds=0.01)
