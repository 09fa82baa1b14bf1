"""Generated pipelines equal, bit by bit, a plain loop over the layers, micro-batch by micro-batch. ``tests/long generated``
runs more cases."""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import os
import random

import numpy
import pytest
import torch
from torch import nn

import gpipe
from generated_layers import CONTEXT, TOGETHER, UNITS, UNSEEN, WIDTH, Draw, Marked, Skips

CASES = int(os.environ.get("GPIPE_GENERATED_CASES", 100))
SEED = int(os.environ.get("GPIPE_GENERATED_SEED", 0))
MODES = ["never", "except_last", "always"]
TWO_PER_WORKER = {"interleaved_1f1b", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"}
LOOPED = {"gpipe", "looped_bfs", "greedy"}
FILL_AND_DRAIN = {"gpipe", "looped_bfs"}  # whose backwards begin with the last micro-batch

INPUTS = {
    "leaf": lambda leaf: leaf,
    "expanded": lambda leaf: leaf[:1].expand_as(leaf),
    "strided": lambda leaf: torch.cat([leaf, leaf], 1)[:, 1:-3],
    "transposed": lambda leaf: leaf.t().contiguous().t(),
    "without gradient": lambda leaf: leaf.detach(),
    "marked": lambda leaf: leaf.as_subclass(Marked),
}


@dataclasses.dataclass(frozen=True)
class Spec:
    seed: int
    uses: tuple  # of (unit, variant, skip)
    stages: int
    stages_per_worker: int
    batch: int
    chunks: int
    checkpoint: str
    schedule: str  # of step(); "" for forward() and backward()
    input: str
    between: str  # what happens between a forward and its backward
    changes: bool  # whether each call has other options and another batch
    calls: int = 3

    def of_call(self, number):
        """Returns the options and batch of a call."""
        if not self.changes:
            return self
        mode = MODES[(MODES.index(self.checkpoint) + number) % 3]
        return dataclasses.replace(self, chunks=1 + (self.chunks + number) % 5, batch=self.batch + number, checkpoint=mode)


def generate(rng, steps):
    uses = [(name, rng.randrange(len(UNITS[name])), None) for name in rng.choices(sorted(UNITS), k=rng.randint(1, 6))]
    for skip in range(max(0, rng.randint(-1, 2))):
        first = rng.randint(0, len(uses))
        uses.insert(first, ("stash", rng.randrange(4), skip))
        uses.insert(rng.randint(first + 1, len(uses)), ("pop", rng.randrange(4), skip))
    schedule = rng.choice(gpipe.SCHEDULES) if steps else ""
    per_worker = 2 if schedule in TWO_PER_WORKER else rng.randint(1, 2) if schedule in LOOPED else 1
    return Spec(
        seed=rng.randrange(2**31),
        uses=tuple(uses),
        stages=rng.randint(1, 5) * per_worker,
        stages_per_worker=per_worker,
        batch=rng.randint(1, 9),
        chunks=rng.randint(1, 5),
        checkpoint=rng.choice(MODES),
        schedule=schedule,
        input=rng.choice(sorted(INPUTS)),
        between="" if steps else rng.choice(sorted(BETWEEN)),
        changes=rng.random() < 0.25,
    )


class Fails(nn.Module):
    """Fails on demand."""

    now = False

    def forward(self, x):
        if Fails.now:
            raise ArithmeticError("on purpose")
        return x


def build(spec, plain):
    """Returns a model and the numbers of layers between which it may be cut."""
    torch.manual_seed(spec.seed)
    skips = Skips(plain)
    layers, blocks = [], []
    for name, variant, skip in spec.uses:
        unit = UNITS[name][variant]() if skip is None else [skips.end(name, skip, variant)]
        layers += unit
        blocks += [len(unit)] if name in TOGETHER else [1] * len(unit)
    return nn.Sequential(*layers, Fails()), [*blocks, 1]


def cut(spec, blocks):
    rng = random.Random(spec.seed)
    stages = min(spec.stages, len(blocks) // spec.stages_per_worker * spec.stages_per_worker)
    cuts = sorted(rng.sample(range(1, len(blocks)), stages - 1))
    return [sum(blocks[a:b]) for a, b in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]


def product(output, target):
    return (output * target).sum() * CONTEXT.get()


class Copy(torch.autograd.Function):
    """Copies a tensor with its layout, so that a layer may write to it."""

    @staticmethod
    def forward(context, x):
        memory = x.untyped_storage().clone()
        copied = torch.empty(0).set_(memory, x.storage_offset(), x.size(), x.stride())
        return copied if type(x) is torch.Tensor else copied.as_subclass(type(x))

    @staticmethod
    def backward(context, gradient):
        return gradient


class Runner:
    """Calls a model. ``forward()`` returns an output and a function for its backward."""

    def __init__(self, spec, model):
        self.spec, self.model, self.hooks = spec, model, collections.Counter()

    def eval(self):
        self.model.eval()
        return self


class PlainLoop(Runner):
    def __init__(self, spec, model):
        super().__init__(spec, model)
        self.hooked = {name for name, each in model.named_parameters() if each.requires_grad}
        self.drains = not spec.schedule or spec.schedule in FILL_AND_DRAIN

    def forward(self, x):
        seed = gpipe.RandomScope.draw_seed()
        parts = x.detach().split(-(-len(x) // self.spec.chunks))
        parts = [part.detach().requires_grad_(x.requires_grad) for part in parts]
        outputs = []
        for number, part in enumerate(parts):
            value = Copy.apply(part)
            for index, layer in enumerate(self.model):
                with gpipe.RandomScope(seed, index, number):
                    value = layer(value)
            outputs.append(value)

        def backward(gradient, retain_graph=False):
            self.add_gradients(x, parts, outputs, gradient.split([len(part) for part in parts]), retain_graph)

        return torch.cat(outputs), backward

    def add_gradients(self, x, parts, outputs, gradients, retain_graph):
        parameters = {id(each): (name, each) for name, each in self.model.named_parameters() if each.requires_grad}
        sums = {}
        of_parts = [torch.zeros_like(part) for part in parts]
        for number in sorted(range(len(parts)), reverse=self.drains):
            if not outputs[number].requires_grad:
                continue
            leaves = [*([parts[number]] if x.requires_grad else []), *(each for _, each in parameters.values())]
            found = torch.autograd.grad(
                outputs[number], leaves, gradients[number], retain_graph=retain_graph, allow_unused=True
            )
            for leaf, gradient in zip(leaves, found, strict=True):
                if leaf is parts[number]:
                    of_parts[number] = of_parts[number] if gradient is None else gradient
                elif gradient is not None:
                    sums[id(leaf)] = sums[id(leaf)] + gradient if id(leaf) in sums else gradient
        if x.requires_grad:
            x.backward(torch.cat(of_parts), retain_graph=True)
        for key, total in sums.items():
            name, parameter = parameters[key]
            self.hooks[name] += name in self.hooked
            parameter.grad = total if parameter.grad is None else parameter.grad + total

    def step(self, x, target):
        output, backward = self.forward(x)
        backward(target * CONTEXT.get())
        return output


class Pipeline(Runner):
    def __init__(self, spec, model, balance):
        super().__init__(spec, model)
        options = {"schedule": spec.schedule or "gpipe", "stages_per_worker": spec.stages_per_worker}
        self.pipe = gpipe.GPipe(model, balance, **options)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, name=name: self.hooks.update([name]))

    def forward(self, x):
        self.pipe.chunks, self.pipe.checkpoint = self.spec.chunks, self.spec.checkpoint
        output = self.pipe(x)

        def backward(gradient, retain_graph=False):
            if output.requires_grad:
                output.backward(gradient, retain_graph=retain_graph)

        return output, backward

    def step(self, x, target):
        self.pipe.chunks, self.pipe.checkpoint = self.spec.chunks, self.spec.checkpoint
        return self.pipe.step(x, target, product, reduction="sum", return_output=True)[1]


def seed_all(seed):
    for function in (torch.manual_seed, random.seed, numpy.random.seed):
        function(seed)


def call_under(context, runner, x):
    with context:
        runner.forward(x)


def failed_call(runner, x):
    """A failed call of the pipeline leaves nothing behind. The plain loop makes none."""
    if isinstance(runner, Pipeline):
        drawn = {module: len(module.log) for module in runner.model.modules() if isinstance(module, Draw)}
        Fails.now = True
        with pytest.raises(ArithmeticError, match="on purpose"):
            runner.forward(x)
        Fails.now = False
        for module, count in drawn.items():
            while len(module.log) > count:
                module.log.pop()


BETWEEN = {  # what happens between a forward and its backward
    "": lambda runner, x: None,
    "evaluation": lambda runner, x: call_under(torch.inference_mode(), runner.eval(), x),
    "other modes": lambda runner, x: runner.eval(),
    "no grad": lambda runner, x: call_under(torch.no_grad(), runner, x),
    "seeds": lambda runner, x: seed_all(0),
    "another context": lambda runner, x: CONTEXT.set(-3.0),
    "another call": lambda runner, x: runner.forward(x)[1],  # whose backward comes first
    "abandoned call": lambda runner, x: call_under(contextlib.nullcontext(), runner, x),
    "failed call": failed_call,
    "second backward": lambda runner, x: None,
    "another thread": lambda runner, x: None,
}


def changed_by_the_caller(model, when, number):
    for module in list(model.modules()):
        if hasattr(module, when):
            getattr(module, when)(module, number)


def gradient_of(y):
    return torch.arange(y.numel()).double().sin().view(y.shape)


def train(spec, runner, x, number):
    """Runs a forward and its backward. Returns the output."""
    other_x = x.detach() * 0.5 + 0.1
    output, backward = runner.forward(x)
    gradient = gradient_of(output)
    changed_by_the_caller(runner.model, "between", number)
    other = BETWEEN[spec.between](runner, other_x)
    if spec.between == "another call":
        other(gradient * 2)
    if spec.between == "second backward":
        backward(gradient, retain_graph=True)
    if spec.between == "another thread":
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(backward, gradient).result()
    else:
        backward(gradient)
    runner.model.train()
    return output


def plain(gradient):
    return None if gradient is None else gradient.as_subclass(torch.Tensor)


def copy_of(tensor):
    """Returns the type of a tensor, and a plain copy."""
    if tensor is None:
        return None
    kind, tensor = type(tensor), tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor.as_subclass(torch.Tensor)
    return kind, tensor.clone()


def state_of(model):
    """Returns parameters, buffers and generators by name."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Generator):
                state[f"{name}.{key}"] = value.get_state()
            if isinstance(value, random.Random | numpy.random.Generator):
                state[f"{name}.{key}"] = torch.tensor(copy.deepcopy(value).random())
    return state


def results_of(spec, runner):
    """Returns the output, gradients, state and hook counts after each call, by name."""
    results = []
    for number in range(spec.calls):
        seed_all(spec.seed + number)
        CONTEXT.set(number + 2.0)
        runner.spec = spec.of_call(number)
        leaf = torch.randn(runner.spec.batch, WIDTH).requires_grad_()
        x = INPUTS[spec.input](leaf)
        output = runner.step(x, gradient_of(x)) if spec.schedule else train(spec, runner, x, number)
        result = {"the output": output, "the gradient of the input": plain(leaf.grad)}
        for name, parameter in runner.model.named_parameters():
            result[f"the gradient of {name}"] = plain(parameter.grad)
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.sub_(plain(parameter.grad), alpha=0.01)
            parameter.grad = None
            result[f"the hook of {name}"] = torch.tensor(runner.hooks.pop(name, 0))
        if spec.between != "failed call":  # which does not restore them
            result["the generators"] = torch.tensor([random.random(), numpy.random.rand()])
        result |= state_of(runner.model)
        results.append({name: copy_of(value) for name, value in result.items()})
        changed_by_the_caller(runner.model, "after", number)
    return results


def equal(ours, theirs):
    if ours is None or theirs is None:
        return ours is theirs
    (kind, a), (other_kind, b) = ours, theirs
    return kind is other_kind and a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def difference(got, expected):
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if list(ours) != list(theirs):
            return f"the names {list(ours)} of call {number} instead of {list(theirs)}"
        for name, value in ours.items():
            if not equal(value, theirs[name]):
                return f"{name} of call {number}: {value} instead of {theirs[name]}"
    return None


class NoModel(Exception):
    """PyTorch refuses the model: an in-place operation changes a tensor that a backward needs."""


class Refused(Exception):
    """The pipeline refuses the case, and says why."""


def may_be_refused(spec, error):
    """Whether a layer may have changed a tensor in place that has the memory of another."""
    return "was changed in place" in str(error) and any(name == "alias" for name, _, _ in spec.uses)


def compare(spec):
    """Returns what differs from the plain loop, or None."""
    layers, blocks = build(spec, plain=False)
    names = {name for name, _, _ in spec.uses}
    if len(blocks) < spec.stages_per_worker or spec.between == "failed call" and names & UNSEEN:
        raise NoModel
    error = None
    try:
        got = results_of(spec, Pipeline(spec, layers, cut(spec, blocks)))
    except Exception as caught:
        error = caught
    model, _ = build(spec, plain=True)
    draws = [[each for each in part.modules() if isinstance(each, Draw)] for part in (layers, model)]
    for ours, theirs in zip(*draws, strict=True):
        theirs.repeats, theirs.log = True, ours.log
    try:
        expected = results_of(spec, PlainLoop(spec, model))
    except RuntimeError as refusal:
        raise NoModel from refusal
    if error is None:
        return difference(got, expected)
    if may_be_refused(spec, error):
        raise Refused from error
    return f"{type(error).__name__}: {error}"


def smaller(spec):
    for use in spec.uses:
        rest = tuple(other for other in spec.uses if other != use and (use[2] is None or other[2] != use[2]))
        if rest:
            yield dataclasses.replace(spec, uses=rest)
    simplest = {"batch": 1, "chunks": 1, "stages": spec.stages_per_worker, "calls": 1}
    for field, by in simplest.items():
        if getattr(spec, field) > by:
            yield dataclasses.replace(spec, **{field: getattr(spec, field) - by})
    for field, simple in {"changes": False, "input": "leaf", "between": "", "checkpoint": "never"}.items():
        if getattr(spec, field) not in {simple, ""}:
            yield dataclasses.replace(spec, **{field: simple})


def shrink(spec):
    for candidate in smaller(spec):
        try:
            fails = compare(candidate)
        except (NoModel, Refused):
            continue
        if fails:
            return shrink(candidate)
    return spec


@pytest.fixture
def in_float64(one_thread):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("steps", [False, True])
def test_generated_pipelines_equal_a_plain_loop(steps, in_float64):
    failures, refused, seen = [], 0, set()
    for seed in range(SEED, SEED + CASES):
        rng = random.Random(seed)
        spec = found = None
        while spec is None:
            try:
                spec = generate(rng, steps)
                found = compare(spec)
            except NoModel:
                spec = None
            except Refused:
                refused += 1
        seen |= {name for name, _, _ in spec.uses}
        if found:
            small = shrink(spec)
            failures.append(f"{compare(small)}\n  {small}\n  shrunk from seed {seed}: {spec}")
    assert not failures, "\n".join(failures[:3])
    assert refused * 10 <= CASES
    assert seen >= {*UNITS, "stash", "pop"}, "some units were not tested"
