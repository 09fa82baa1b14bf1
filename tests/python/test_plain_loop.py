"""Generated pipelines equal a plain loop over the layers, micro-batch by micro-batch, with PyTorch's autograd in
float64. For more cases:

    GPIPE_GENERATED_CASES=5000 GPIPE_GENERATED_SEED=1000 pytest test_plain_loop.py
"""

import concurrent.futures
import copy
import dataclasses
import os
import random

import numpy
import pytest
import torch
from torch import nn

import gpipe
from generated_calls import BETWEEN, INPUTS, Fails
from generated_layers import IN_PLACE, POPS, RANDOM, SHARES, STASHES, TOGETHER, UNITS, WIDTH, Skips
from generated_states import CONTEXT, FORWARD_ONLY, STATES, UNSEEN, Draw

CASES = int(os.environ.get("GPIPE_GENERATED_CASES", 0))  # 0: as many as each test says
SEED = int(os.environ.get("GPIPE_GENERATED_SEED", 0))


@dataclasses.dataclass(frozen=True)
class Spec:
    seed: int
    uses: tuple  # of (unit, variant, skip)
    stages: int
    batch: int
    chunks: int
    checkpoint: str
    calls: int = 3
    twice: bool = False
    schedule: str = ""  # of step(); "" for forward() and backward()
    stages_per_worker: int = 1
    changes: bool = False  # whether each call has other options and another batch
    input: str = ""  # of INPUTS
    between: str = ""  # what happens between a forward and its backward: of BETWEEN


    def of_call(self, number):
        """Returns the options and batch of a call."""
        if not self.changes or not number:
            return self
        chunks = 1 + (self.chunks + number) % 5
        mode = MODES[(MODES.index(self.checkpoint) + number) % 3]
        return dataclasses.replace(self, chunks=chunks, batch=self.batch + number, checkpoint=mode)


MODES = ["never", "except_last", "always"]
ONE_PER_WORKER = {"1f1b", "zb_h1", "zb_h2"}
V = {"zb_v", "v_half", "v_min", "dualpipe_v"}


def generate(rng, units, steps, states):
    units, states = sorted(units), sorted(states)
    uses = [(rng.choice(units), rng.randrange(4), None) for _ in range(rng.randint(0 if states else 1, 6))]
    for _ in range(rng.randint(1, 3) if states else 0):
        uses.insert(rng.randint(0, len(uses)), (rng.choice(states), rng.randrange(96), None))
    for skip in range(max(0, rng.randint(-1, 2))):
        first = rng.randint(0, len(uses))
        uses.insert(first, (rng.choice(sorted(STASHES)), rng.randrange(4), skip))
        second = rng.randint(first + 1, len(uses))
        uses.insert(second, (rng.choice(sorted(POPS)), rng.randrange(4), skip))
    schedule = rng.choice(gpipe.SCHEDULES) if steps else ""
    per_worker = 1 if schedule in {"", *ONE_PER_WORKER} else rng.randint(1, 2)
    if schedule in V or schedule.startswith("interleaved"):
        per_worker = 2
    return Spec(
        seed=rng.randrange(2**31),
        uses=tuple(uses),
        stages=rng.randint(1, 5) * per_worker,
        batch=rng.randint(1, 9),
        chunks=rng.randint(1, 5),
        checkpoint=rng.choice(MODES),
        twice=not steps and rng.random() < 0.25,
        schedule=schedule,
        stages_per_worker=per_worker,
        changes=bool(states) and rng.random() < 0.25,
        input=rng.choice(sorted(INPUTS)) if states else "",
        between=rng.choice(sorted(BETWEEN)) if states and not steps else "",
    )


class Hooks:
    """Counts the calls of each parameter's hook. A call without a gradient counts as 1000."""

    def __init__(self, model):
        self.calls = {}
        for name, parameter in model.named_parameters():
            self.calls[name] = 0
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, name=name: self.count(name, gradient))

    def count(self, name, gradient):
        self.calls[name] += 1 if gradient is not None else 1000


def build(spec, *, plain):
    torch.manual_seed(spec.seed)
    skips = Skips(plain)
    layers, blocks = [], []
    for name, variant, skip in spec.uses:
        unit = {**UNITS, **RANDOM, **STATES}[name](variant) if skip is None else [skips.end(name, skip, variant)]
        layers += unit
        blocks += [len(unit)] if name in TOGETHER else [1] * len(unit)
    if spec.between == "failed call":
        layers.append(Fails())
        blocks.append(1)
    return nn.Sequential(*layers), blocks


def cut(spec, blocks):
    rng = random.Random(spec.seed)
    stages = min(spec.stages, len(blocks) // spec.stages_per_worker * spec.stages_per_worker)
    cuts = sorted(rng.sample(range(1, len(blocks)), stages - 1))
    return [sum(blocks[a:b]) for a, b in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]


def forward_plain(model, x):
    size = -(-len(x) // model.chunks)
    outputs = []
    for start in range(0, len(x), size):
        value = x[start : start + size].clone()
        for layer in model:
            value = layer(value)
        outputs.append(value)
    return torch.cat(outputs)


def gradient_of(y):
    return torch.arange(y.numel()).double().sin().view_as(y)


def set_options(model, spec):
    model.chunks, model.checkpoint = spec.chunks, spec.checkpoint


def backward_of(outputs, factor, twice):
    outputs = [y for y in outputs if y.requires_grad]
    if outputs:
        gradients = [gradient_of(y) * factor for y in outputs]
        torch.autograd.backward(outputs, gradients, retain_graph=twice)
        if twice:
            torch.autograd.backward(outputs, gradients)


def backward(spec, model, forward):
    """Returns a function that runs a forward and its backward, and returns the output."""
    def run(x, number):
        set_options(model, spec.of_call(number))
        factor = CONTEXT.get() if spec.schedule else 1
        other = (x.detach() * 0.5 + 0.1).requires_grad_()
        outputs = [forward(x)]
        if not spec.schedule:
            changed_by_the_caller(model, "between", number)
            outputs += [module.auxiliary for module in model.modules() if hasattr(module, "auxiliary")]
        with BETWEEN[spec.between](model, forward, other) as others:
            order = [others, outputs] if spec.between == "another call, later backward" else [outputs, others]
            for group in order:
                if spec.between == "another thread":
                    with concurrent.futures.ThreadPoolExecutor(1) as thread:
                        thread.submit(backward_of, group, factor, spec.twice).result()
                else:
                    backward_of(group, factor, spec.twice)
        return outputs[0]

    return run


def step(spec, pipe):
    """Returns a function that runs a step with the gradients of backward(), and returns the output."""

    def run(x, number):
        set_options(pipe, spec.of_call(number))

        def product(output, target):
            return (output * target).sum() * CONTEXT.get()

        return pipe.step(x, gradient_of(x), product, reduction="sum", return_output=True)[1]

    return run


def changed_by_the_caller(model, when, number):
    for module in list(model.modules()):
        if hasattr(module, when):
            getattr(module, when)(module, number)


def state_of(model):
    """Returns buffers, parameters and generators by name."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Generator):
                state[f"{name}.{key}"] = value.get_state()
            if isinstance(value, random.Random | numpy.random.Generator):
                state[f"{name}.{key}"] = torch.tensor(copy.deepcopy(value).random())
    return state


def copy_of(tensor):
    """Returns a copy of another kind of tensor that torch.allclose() can compare."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor.as_subclass(torch.Tensor)
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()).clone()


def calls(model, spec, run):
    """Returns the output, gradients, state and hook counts after each call of ``run(x)``, by name."""
    hooks = Hooks(model)
    # A reentrant checkpoint runs its own backward with all hooks for each micro-batch.
    reentrant = any(name == "checkpoint" and variant % 2 for name, variant, _ in spec.uses)
    count_hooks = not reentrant
    results = []
    for number in range(spec.calls):
        torch.manual_seed(spec.seed + number)
        random.seed(spec.seed + number)
        numpy.random.seed((spec.seed + number) % 2**32)
        CONTEXT.set(number + 2.0)
        leaf = torch.randn(spec.of_call(number).batch, WIDTH).requires_grad_()
        x = INPUTS[spec.input](leaf)
        elsewhere = x.square().sum()
        y = run(x, number)
        if spec.input == "used elsewhere":
            elsewhere.backward()
        result = {"the output": copy_of(y), "the type of the output": type(y)}
        result["the gradient of the input"] = leaf.grad
        for name, parameter in model.named_parameters():
            result[f"the gradient of {name}"] = parameter.grad
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter -= 0.01 * parameter.grad
            parameter.grad = None
        for name, value in state_of(model).items():
            result[name] = copy_of(value)
            result[f"the type of {name}"] = type(value)
        if spec.between != "failed call":  # which does not restore them
            result["Python's generator"] = torch.tensor(random.random())
            result["NumPy's generator"] = torch.tensor(numpy.random.rand())
        for name, count in hooks.calls.items() if count_hooks else ():
            result[f"the hook of {name}"] = torch.tensor(count)
        results.append(result)
        changed_by_the_caller(model, "after", number)
    return results


def equal(a, b):
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b
    return type(a) is type(b) and a.shape == b.shape and torch.allclose(a, b, 1e-9, 1e-10, equal_nan=True)


def difference(got, expected):
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if list(ours) != list(theirs):
            return f"the names {list(ours)} of call {number} instead of {list(theirs)}"
        for name, value in ours.items():
            if not equal(value, theirs[name]):
                return f"{name} of call {number}"
    return None


class NoModel(Exception):
    """PyTorch refuses the model: an in-place operation changes a tensor that a backward needs."""


# What a backward through a tensor that a layer keeps raises: in a checkpointed forward, in another, and in PyTorch.
KEPT = ("that a layer keeps as an attribute", "that a layer kept from its forward", "a second time")


class Refused(Exception):
    """The pipeline refuses the case, and says why."""


def may_be_refused(spec, error):
    units, text = {name for name, _, _ in spec.uses}, str(error)
    # A tensor across a cut, or a graph of the caller, has the memory that a layer changes.
    shares = units & SHARES or spec.input == "used elsewhere"
    refusals = [
        units & IN_PLACE and shares and ("in place" in text or "inplace" in text),
        units & STASHES.keys() and spec.input == "marked" and "to be stashed" in text,
        # What a layer does for the first time in a later micro-batch.
        units & IN_PLACE and "for the first time, so the stage" in text,
        any(name.startswith(("python", "numpy")) for name in units) and "drew other numbers" in text,
        "changed by the caller" in units and "so the forward cannot be recomputed" in text,
        "auxiliary" in units and any(words in text for words in KEPT),
        spec.input == "expanded" and "clone() the tensor" in text,  # PyTorch, of a write to one
    ]
    return any(refusals)


def compare(spec, expect):
    """Returns what differs from ``expect(model, x)`` on the plain model, or None. ``expect`` cuts ``x`` into
    ``model.chunks`` micro-batches."""
    layers, blocks = build(spec, plain=False)
    if len(blocks) < spec.stages_per_worker:
        raise NoModel
    if spec.between == "failed call" and any(name in UNSEEN for name, _, _ in spec.uses):
        raise NoModel  # a failed call does not undo what PyTorch does not see
    pipe = gpipe.GPipe(
        layers,
        cut(spec, blocks),
        chunks=spec.chunks,
        checkpoint=spec.checkpoint,
        schedule=spec.schedule or "gpipe",
        stages_per_worker=spec.stages_per_worker,
    )
    error = None
    try:
        got = calls(layers, spec, step(spec, pipe) if spec.schedule else backward(spec, pipe, pipe))
    except Exception as caught:
        error = caught
    model, _ = build(spec, plain=True)
    repeat_draws(layers, model)
    try:
        expected = calls(model, spec, backward(spec, model, lambda x: expect(model, x)))
    except RuntimeError as refusal:
        raise NoModel from refusal
    if error is None:
        return difference(got, expected)
    if may_be_refused(spec, error):
        raise Refused from error
    return f"{type(error).__name__}: {error}"


def repeat_draws(layers, model):
    """Lets a plain model repeat what a pipeline's layers drew."""
    draws = [[module for module in each.modules() if isinstance(module, Draw)] for each in (layers, model)]
    for ours, theirs in zip(*draws, strict=True):
        theirs.repeats = True
        theirs.log = ours.log


def smaller(spec):
    for use in spec.uses:
        rest = tuple(other for other in spec.uses if other != use and (use[2] is None or other[2] != use[2]))
        if rest:
            yield dataclasses.replace(spec, uses=rest)
    for field, by in {"batch": 1, "chunks": 1, "stages": spec.stages_per_worker, "calls": 1}.items():
        if getattr(spec, field) > by:
            yield dataclasses.replace(spec, **{field: getattr(spec, field) - by})
    simplest = {"twice": False, "changes": False, "input": "", "between": "", "checkpoint": "never"}
    for field, simple in simplest.items():
        if getattr(spec, field) != simple:
            yield dataclasses.replace(spec, **{field: simple})
    if spec.schedule not in {"", "gpipe"}:
        yield dataclasses.replace(spec, schedule="gpipe")


def shrink(spec, expect):
    for candidate in smaller(spec):
        try:
            fails = compare(candidate, expect)
        except (NoModel, Refused):
            continue
        if fails:
            return shrink(candidate, expect)
    return spec


@pytest.fixture(autouse=True)
def in_float64(one_thread):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run_cases(cases, units, expect, *, steps=False, states=()):
    cases = CASES or cases
    failures, refused, seen = [], 0, set()
    for seed in range(SEED, SEED + cases):
        rng = random.Random(seed)
        while True:
            spec = generate(rng, units, steps, states)
            try:
                found = compare(spec, expect)
            except NoModel:
                continue
            except Refused:
                if refused * 10 >= cases:  # enough of these cases
                    continue
                refused += 1
                found = None
            break
        seen |= {name for name, _, _ in spec.uses}
        if found:
            small = shrink(spec, expect)
            failures.append(f"{compare(small, expect)}\n  {small}\n  shrunk from seed {seed}: {spec}")
            if len(failures) == 3:
                break
    assert not failures, "\n".join(failures)
    if not CASES:
        assert seen >= {*(states or units), *STASHES, *POPS}, "some units were not tested"


def test_pipelines_equal_a_plain_loop():
    run_cases(120, UNITS, forward_plain)


def test_steps_equal_a_plain_loop():
    run_cases(120, UNITS, forward_plain, steps=True)


def test_pipelines_whose_layers_have_state_equal_a_plain_loop():
    run_cases(100, UNITS, forward_plain, states=STATES)


def test_steps_of_layers_that_have_state_equal_a_plain_loop():
    run_cases(100, UNITS, forward_plain, steps=True, states=STATES.keys() - FORWARD_ONLY)


def test_pipelines_with_dropout_equal_the_reference():
    def reference(model, x):
        return gpipe.reference(model, x, chunks=model.chunks)

    run_cases(80, {**UNITS, **RANDOM}.keys() - {"checkpoint"}, reference)
