"""Generated pipelines equal, bit by bit, a plain loop over layers and micro-batches."""

import contextvars
import itertools
import os
import random
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe import _C
from gpipe.randomness import random_scope

CASES = int(os.environ.get("GPIPE_GENERATED_CASES", 91))
SEED = int(os.environ.get("GPIPE_GENERATED_SEED", 0))
TWO_PER_WORKER = {"interleaved_1f1b", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"}
LOOPED = {"gpipe", "looped_bfs"}
FILL_AND_DRAIN = {"", "gpipe", "looped_bfs"}  # whose backwards begin with the last micro-batch
WIDTH = 4
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)

# A unit is a layer that maps a tensor (samples, WIDTH) to another, and may have state of any kind. C++ generates cases of its
# own, with batch norm, skips and in-place operations: these are of what only Python has.


class Call(nn.Module):
    """Calls a function with the module and the input. Registers tensors as buffers."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, value in members.items():
            if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor | None):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


def call(function, **makers):
    """Returns a function that makes a unit. ``makers`` make its members."""
    return lambda: Call(function, **{name: make() for name, make in makers.items()})


def weight():
    return lambda: nn.Parameter(torch.randn(WIDTH) / 2)


def zeros(*shape):
    return lambda: torch.zeros(shape)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def assigns_data(self, x):
    self.b.data = self.b.data + 1


def writes_and_replaces(self, x):
    self.b.add_(1)
    self.b = self.b * 0.5


WAYS = [  # to change a buffer, as only Python does
    assigns_data,
    writes_and_replaces,
    lambda self, x: setattr(self, "b", torch.cat([x.detach().mean(0), self.b[WIDTH:]])),
]


def changes(change, first, size):
    """Returns a layer that changes its state ``b`` before it reads it, or afterwards."""

    def function(self, x):
        y = None if first else x + self.b[:WIDTH].tanh()
        with torch.no_grad():
            change(self, x)
        return x * (1 + self.b[:WIDTH].tanh()) if first else y

    return call(function, b=lambda: torch.randn(size))


def comes_and_goes(self, x):
    y = x if self.b is None else x + self.b
    self.b = x.detach().mean(0) if self.b is None else None
    return y


def noted_gradient(self, x):
    """Its backward changes a buffer."""

    def note(gradient):
        self.b.add_(gradient.sum())

    y = x * self.w
    if y.requires_grad:
        y.register_hook(note)
    return y


def checkpointed(self, x):
    def block(x):
        return F.dropout(self.inner(F.dropout(x, 0.3)), 0.3)

    return F.dropout(checkpoint(block, x.sin(), use_reentrant=self.reentrant), 0.3)


def functional(self, x):
    self.b = self.b + 1
    return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.b.sin()}, (x,))


def note_input(layer, inputs):
    layer.b.add_(inputs[0].detach().mean(0))


def hooked(register, hook):
    def make():
        layer = Call(lambda self, x: self.inner(x), inner=linear(), b=torch.zeros(WIDTH))
        register(layer, hook)
        return layer

    return make


UNITS = {
    "draws": [
        call(lambda self, x: F.dropout(x, 0.3) + torch.rand(WIDTH, generator=torch.default_generator)),
        call(lambda self, x: x * (1.5 + (torch.manual_seed(5) and torch.rand(WIDTH)))),
        call(checkpointed, inner=linear, reentrant=lambda: False),
        call(checkpointed, inner=linear, reentrant=lambda: True),
    ],
    "once": [call(lambda self, x: x * (0.5 + self.own.random()), own=lambda: random.Random(1))],  # cannot be recomputed
    # A buffer of 64 KiB and more is copied from its first change on, which must not be an assignment to Tensor.data.
    "writes": [
        changes(change, first, size)
        for change in WAYS
        for size in ((8,) if change is assigns_data else (8, 20000))
        for first in (False, True)
    ],
    "comes and goes": [call(comes_and_goes, b=lambda: None)],
    "gradient statistics": [call(noted_gradient, w=weight(), b=zeros())],
    "linear": [linear, lambda: nn.Sequential(linear(), nn.Tanh(), linear())],
    "weight twice": [call(lambda self, x: x @ self.w @ self.w, w=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) / 2))],
    "norms of weights": [
        lambda: parametrizations.spectral_norm(linear()),
        lambda: parametrizations.weight_norm(linear()),
        lambda: prune.l1_unstructured(linear(), "weight", 0.3),
    ],
    "hooks": [
        hooked(nn.Module.register_forward_pre_hook, note_input),
        hooked(nn.Module.register_forward_hook, lambda layer, x, output: output * 1.5),
        hooked(nn.Module.register_full_backward_hook, lambda _, x, y: None if x[0] is None else (x[0] * 2,)),
    ],
    "context": [call(lambda self, x: x * CONTEXT.get())],
    "mode": [call(lambda self, x: F.hardtanh(x) if self.training else x * self.w, w=weight())],
    "transforms": [
        call(lambda self, x: torch.func.vmap(lambda row: row * self.w)(x), w=weight()),
        call(functional, inner=linear, b=zeros()),
    ],
}


def generate(rng, schedule):
    uses = [(name, rng.randrange(len(UNITS[name]))) for name in rng.choices(sorted(UNITS), k=rng.randint(2, 6))]
    checkpoint = rng.choice(["never", "except_last", "always"])
    per_worker = 2 if schedule in TWO_PER_WORKER else rng.randint(1, 2) if schedule in LOOPED else 1
    return types.SimpleNamespace(
        seed=rng.randrange(2**31),
        uses=uses,
        stages=rng.randint(1, 5) * per_worker,
        stages_per_worker=per_worker,
        batch=rng.randint(1, 9),
        chunks=rng.randint(1, 5),
        checkpoint="never" if any(name == "once" for name, _ in uses) else checkpoint,
        schedule=schedule,  # of step(); "" for forward() and backward()
        input_requires_grad=rng.choice([True, False]),
    )


def build(spec):
    torch.manual_seed(spec.seed)
    return nn.Sequential(*(UNITS[name][number]() for name, number in spec.uses))


def takes_a_step(spec, model, x):
    return spec.schedule and any(tensor.requires_grad for tensor in (x, *model.parameters()))


def pipeline(spec, model):
    """Returns a function that runs a forward and a backward. It returns the output, or None after compute_loss()."""
    stages = min(spec.stages, len(model) // spec.stages_per_worker * spec.stages_per_worker)
    cuts = sorted(random.Random(spec.seed).sample(range(1, len(model)), stages - 1))
    balance = [last - first for first, last in itertools.pairwise([0, *cuts, len(model)])]
    loops = spec.stages_per_worker == 2 and spec.schedule in (*LOOPED, "interleaved_1f1b", "interleaved_zb")
    options = {name: getattr(spec, name) for name in ("chunks", "checkpoint")}
    options["placement"] = [*range(len(balance) // 2)] * 2 if loops else "looped"
    pipe = gpipe.GPipe(model, balance, schedule=spec.schedule or "gpipe", **options)
    product = gpipe.Loss(lambda out, of: (out * of).sum() * CONTEXT.get(), reduction="sum")

    def call(x, gradient, number):
        if takes_a_step(spec, model, x):
            if number == 1:
                return pipe.compute_loss(x, gradient, product).backward()
            return pipe.step(x, gradient, product, return_output=True)[1]
        output = pipe(x)
        state = torch.get_rng_state()
        torch.manual_seed(0)  # does not change what a recompute draws
        CONTEXT.set(0.0)  # nor what it reads
        if output.requires_grad:
            output.backward(gradient)
        torch.set_rng_state(state)
        return output

    return call


def plain_loop(spec, model):
    def call(x, gradient, number):
        seed = _C.draw_seed()
        count = min(spec.chunks, len(x))
        parts = [part.detach().requires_grad_(x.requires_grad) for part in x.detach().tensor_split(count)]
        outputs = []
        for micro_batch, part in enumerate(parts):
            value = part
            for index, layer in enumerate(model):
                with random_scope(seed, index, micro_batch):
                    value = layer(value)
            outputs.append(value)
        gradient = gradient * CONTEXT.get() if takes_a_step(spec, model, x) else gradient
        gradients = gradient.split([len(part) for part in parts])
        for micro_batch in sorted(range(len(parts)), reverse=spec.schedule in FILL_AND_DRAIN):
            if outputs[micro_batch].requires_grad:
                outputs[micro_batch].backward(gradients[micro_batch])
        if x.requires_grad:
            x.backward(torch.cat([torch.zeros_like(part) if part.grad is None else part.grad for part in parts]))
        return torch.cat(outputs)

    return call


def results_of(spec, model, make):
    """Returns the output, gradients and state after each of three calls: a step, a loss with its graph, and a step."""
    call, results = make(spec, model), {}
    for number in range(3):
        torch.manual_seed(spec.seed + number)
        CONTEXT.set(number + 2.0)
        x = torch.randn(spec.batch, WIDTH).requires_grad_(spec.input_requires_grad)
        output = call(x, torch.arange(x.numel()).sin().view(x.shape), number)
        is_loss = spec.schedule and number == 1
        found = {"output": None if is_loss else output, "gradient of the input": x.grad, "draw": torch.rand(())}
        found |= {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
        for name, value in (found | model.state_dict()).items():
            results[f"{name} of call {number}"] = None if value is None else value.detach().clone()
        model.zero_grad()
    return results


def differences(spec):
    """Returns the names of what differs from the plain loop."""
    got, expected = (results_of(spec, build(spec), make) for make in (pipeline, plain_loop))
    assert got.keys() == expected.keys()
    return [name for name, value in got.items() if not (value is expected[name] or torch.equal(value, expected[name]))]


@pytest.mark.parametrize("schedule", ["", *gpipe.SCHEDULES])
def test_generated_pipelines_equal_a_plain_loop(schedule):
    for number in range(SEED, SEED + CASES // 13):
        spec = generate(random.Random(f"{schedule} {number}"), schedule)
        print(f"number {number}: {spec}")  # pytest shows it after a failure
        assert not differences(spec)
