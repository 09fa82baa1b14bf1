"""Generated pipelines equal a plain loop over the layers, micro-batch by micro-batch, with PyTorch's autograd in
float64."""

import dataclasses
import random

import pytest
import torch
from torch import nn

import gpipe
from generated_layers import IN_PLACE, POPS, RANDOM, SHARES, STASHES, TOGETHER, UNITS, WIDTH, Skips

CASES = 120


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


ONE_PER_WORKER = {"1f1b", "zb_h1", "zb_h2"}
V = {"zb_v", "v_half", "v_min", "dualpipe_v"}


def generate(rng, units, steps):
    units = sorted(units)
    uses = [(rng.choice(units), rng.randrange(4), None) for _ in range(rng.randint(1, 6))]
    for skip in range(max(0, rng.randint(-1, 2))):
        first = rng.randint(0, len(uses))
        uses.insert(first, (rng.choice(sorted(STASHES)), rng.randrange(4), skip))
        second = rng.randint(first + 1, len(uses))
        uses.insert(second, (rng.choice(sorted(POPS)), rng.randrange(4), skip))
    schedule = rng.choice(gpipe.SCHEDULES) if steps else ""
    per_worker = 1 if schedule in {"", *ONE_PER_WORKER} else 2 if schedule in V else rng.randint(1, 2)
    return Spec(
        seed=rng.randrange(2**31),
        uses=tuple(uses),
        stages=rng.randint(1, 5) * per_worker,
        batch=rng.randint(1, 9),
        chunks=rng.randint(1, 5),
        checkpoint=rng.choice(["never", "except_last", "always"]),
        twice=not steps and rng.random() < 0.25,
        schedule=schedule,
        stages_per_worker=per_worker,
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
        unit = {**UNITS, **RANDOM}[name](variant) if skip is None else [skips.end(name, skip, variant)]
        layers += unit
        blocks += [len(unit)] if name in TOGETHER else [1] * len(unit)
    return nn.Sequential(*layers), blocks


def cut(spec, blocks):
    rng = random.Random(spec.seed)
    stages = min(spec.stages, len(blocks) // spec.stages_per_worker * spec.stages_per_worker)
    cuts = sorted(rng.sample(range(1, len(blocks)), stages - 1))
    return [sum(blocks[a:b]) for a, b in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]


def forward_plain(model, spec, x):
    size = -(-spec.batch // spec.chunks)
    outputs = []
    for start in range(0, spec.batch, size):
        value = x[start : start + size].clone()
        for layer in model:
            value = layer(value)
        outputs.append(value)
    return torch.cat(outputs)


def gradient_of(y):
    return torch.arange(y.numel()).double().sin().view_as(y)


def backward(spec, forward):
    """Returns a function that runs a forward and its backward, and returns the output."""

    def run(x):
        y = forward(x)
        if y.requires_grad:
            y.backward(gradient_of(y), retain_graph=spec.twice)
            if spec.twice:
                y.backward(gradient_of(y))
        return y

    return run


def step(pipe):
    """Returns a function that runs a step with the gradients of backward(), and returns the output."""

    def run(x):
        def product(output, target):
            return (output * target).sum()

        return pipe.step(x, gradient_of(x), product, reduction="sum", return_output=True)[1]

    return run


def calls(model, spec, run):
    """Returns the output, gradients, state and hook counts after each call of ``run(x)``, by name."""
    hooks = Hooks(model)
    # A reentrant checkpoint runs its own backward with all hooks for each micro-batch.
    reentrant = any(name == "checkpoint" and variant % 2 for name, variant, _ in spec.uses)
    count_hooks = not reentrant
    results = []
    for number in range(spec.calls):
        torch.manual_seed(spec.seed + number)
        x = torch.randn(spec.batch, WIDTH).requires_grad_()
        result = {"the output": run(x).detach().clone()}
        result["the gradient of the input"] = x.grad
        for name, parameter in model.named_parameters():
            result[f"the gradient of {name}"] = parameter.grad
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter -= 0.01 * parameter.grad
            parameter.grad = None
        for name, value in model.state_dict().items():
            result[name] = value.clone()
        for name, count in hooks.calls.items() if count_hooks else ():
            result[f"the hook of {name}"] = torch.tensor(count)
        results.append(result)
    return results


def difference(got, expected):
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert list(ours) == list(theirs)
        for name, a in ours.items():
            b = theirs[name]
            if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, 1e-9, 1e-10, equal_nan=True)):
                return f"{name} of call {number}"
    return None


class NoModel(Exception):
    """PyTorch refuses the model: an in-place operation changes a tensor that a backward needs."""


class Refused(Exception):
    """The pipeline refuses the model: an in-place operation changes memory that another tensor across a cut shares."""


def may_be_refused(spec):
    units = {name for name, _, _ in spec.uses}
    return units & IN_PLACE and units & SHARES


def compare(spec, expect):
    """Returns what differs from ``expect(model, spec, x)`` on the plain model, or None."""
    model, _ = build(spec, plain=True)
    try:
        expected = calls(model, spec, backward(spec, lambda x: expect(model, spec, x)))
    except RuntimeError as error:
        raise NoModel from error
    layers, blocks = build(spec, plain=False)
    if len(blocks) < spec.stages_per_worker:
        raise NoModel
    pipe = gpipe.GPipe(
        layers,
        cut(spec, blocks),
        chunks=spec.chunks,
        checkpoint=spec.checkpoint,
        schedule=spec.schedule or "gpipe",
        stages_per_worker=spec.stages_per_worker,
    )
    run = step(pipe) if spec.schedule else backward(spec, pipe)
    try:
        return difference(calls(layers, spec, run), expected)
    except (RuntimeError, ValueError) as error:
        if may_be_refused(spec) and "in place" in str(error):
            raise Refused from error
        return f"{type(error).__name__}: {error}"


def smaller(spec):
    for use in spec.uses:
        rest = tuple(other for other in spec.uses if other != use and (use[2] is None or other[2] != use[2]))
        if rest:
            yield dataclasses.replace(spec, uses=rest)
    for field in ("batch", "chunks", "stages", "calls"):
        if getattr(spec, field) > (spec.stages_per_worker if field == "stages" else 1):
            yield dataclasses.replace(spec, **{field: getattr(spec, field) - (spec.stages_per_worker if field == "stages" else 1)})
    if spec.twice:
        yield dataclasses.replace(spec, twice=False)


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
def in_float64():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def run_cases(cases, units, expect, *, steps=False):
    failures, refused, seen = [], 0, set()
    for seed in range(cases):
        rng = random.Random(seed)
        while True:
            spec = generate(rng, units, steps)
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
            failures.append(f"{compare(small, expect)}\n  {small}\n  shrunk from {spec}")
            if len(failures) == 3:
                break
    assert not failures, "\n".join(failures)
    assert seen == set(units) | set(STASHES) | set(POPS), "some units were not tested"


def test_pipelines_equal_a_plain_loop():
    run_cases(CASES, UNITS, forward_plain)


def test_steps_equal_a_plain_loop():
    run_cases(CASES, UNITS, forward_plain, steps=True)


def test_pipelines_with_dropout_equal_the_reference():
    def reference(model, spec, x):
        return gpipe.reference(model, x, chunks=spec.chunks)

    run_cases(CASES // 2, {**UNITS, **RANDOM}.keys() - {"checkpoint"}, reference)
