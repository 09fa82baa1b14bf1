"""The units of test_plain_loop.py whose layers have state besides weights: generators, frozen parameters and buffers
that the forward changes, buffers and modules that the first forward makes, contexts, subclasses of tensors, auxiliary
losses.

``STATES[name](variant)`` makes the layers of a unit.
"""

import collections
import concurrent.futures
import contextvars
import random
import warnings

import numpy
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import gpipe
from generated_layers import WIDTH, Call, ids_of, linear, parameter, passes

CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LARGE = 9000  # numbers; buffers of 64 KiB and more are not copied in every forward


def size(variant):
    return LARGE if variant % 2 else 2 * WIDTH


class Draw(nn.Module):
    """Calls a function that draws random numbers. The layers of a pipeline write what their forwards drew to ``log``.
    The plain model repeats it in the order of the micro-batches. It draws too, to leave the generators in the same
    state."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.log = collections.deque()
        self.repeats = False

    def forward(self):
        value = self.draw()
        if self.repeats:
            return self.log.popleft() if self.log else value
        is_backward = torch._C._current_graph_task_id() >= 0  # a recompute of torch.utils.checkpoint
        if not (gpipe.is_recomputing() or is_backward):
            self.log.append(value)
        return value


def draws(draw):
    """Returns a function that makes units whose layers draw: always, in later forwards only, for some inputs, twice."""

    def reads(x, number):
        return x * (1.5 + number)

    def always(self, x):
        return reads(x, self.drawn())

    def later(self, x):
        self.n = self.n + 1
        return reads(x, self.drawn()) if self.n % 3 else x

    def sometimes(self, x):
        return reads(x, self.drawn()) if x.detach()[0, 0] > 0.1 else x

    def twice(self, x):
        return reads(reads(x, self.drawn()).tanh(), self.drawn())

    def make(variant):
        n = torch.full((), 2)
        return [Call([always, later, sometimes, twice][variant % 4], n=n, drawn=Draw(draw))]

    return make


def checkpointed_draws(variant):
    def inner(self, x):
        return self.linear(x * self.drawn()).tanh()

    def function(self, x):
        if self.drawn.repeats:
            return inner(self, x)
        return checkpoint(lambda x: inner(self, x), x, use_reentrant=False)

    return [Call(function, linear=linear(), drawn=Draw(lambda: torch.rand(WIDTH)))]


def seeded_draw():
    torch.manual_seed(5)
    return torch.rand(WIDTH)


def own_generator(variant):
    """A torch.Generator of the layer."""

    def rand(self, x):
        return x * torch.rand(WIDTH, generator=self.generator)

    def normal_in_place(self, x):
        return x + torch.empty(WIDTH).normal_(generator=self.generator)

    def later(self, x):
        self.n = self.n + 1
        return x * torch.rand(WIDTH, generator=self.generator) if self.n > 3 else x

    def made_late(self, x):
        if not hasattr(self, "late"):
            self.late = torch.Generator().manual_seed(3)
        return x * (torch.rand((), generator=self.late) < 0.5)

    layer = Call([rand, normal_in_place, later, made_late][variant % 4], n=torch.zeros(()))
    if variant % 4 < 3:
        layer.generator = torch.Generator().manual_seed(variant)
    return [layer]


def own_python_generator(variant):
    layer = Call(lambda self, x: x * (1 + self.generator.random()))
    layer.generator = random.Random(variant) if variant % 2 else numpy.random.default_rng(variant)
    return [layer]


def ema(variant):
    """A frozen parameter that the forward moves to the mean of its inputs."""

    def lerp(self, x):
        with torch.no_grad():
            self.w[:WIDTH].lerp_(x.mean(0), 0.1)
        return x * (1 + self.w[:WIDTH].clone())

    def data(self, x):
        y = x + self.w[:WIDTH]
        self.w.data[:WIDTH] = 0.9 * self.w.data[:WIDTH] + x.detach().mean(0)
        return y

    def replaced(self, x):
        y = x + self.w[:WIDTH].sin()
        self.w.data = self.w.data * 0.9 + 0.1
        return y

    def copied(self, x):
        self.w.copy_(self.w + x.detach().mean())
        return x - self.w[-WIDTH:].tanh()

    function = [lerp, data, replaced, copied][variant % 4]
    return [Call(function, w=nn.Parameter(torch.randn(size(variant // 4)), requires_grad=False))]


def writes(variant):
    """A buffer that the forward writes to in one of the many ways there are."""

    def out(self, x):
        torch.add(self.b, 1, out=self.b)

    def foreach(self, x):
        torch._foreach_add_([self.b], [x.detach().mean()])

    def index(self, x):
        self.b[ids_of(x)] += 1

    def data(self, x):
        self.b.data.add_(1)

    def new_data(self, x):
        self.b.data = self.b.data + 1

    def set_(self, x):
        self.b.set_(self.b + 1)

    def view(self, x):
        self.b.view(-1)[1:].mul_(0.5).add_(x.detach().mean())

    def fill(self, x):
        self.b[:WIDTH].fill_(x.detach().sum())

    def init(self, x):
        nn.init.constant_(self.b, x.detach().mean().item())

    def assigned(self, x):
        self.b = torch.cat([x.detach().mean(0), self.b[WIDTH:]])

    def alias(self, x):
        self.alias[0] += 1

    ways = [out, foreach, index, data, new_data, set_, view, fill, init, assigned, alias]
    change = ways[variant // 4 % len(ways)]

    def before(self, x):
        y = x + self.b[:WIDTH].tanh()
        change(self, x)
        return y

    def after(self, x):
        change(self, x)
        return x * (1 + self.b[:WIDTH].tanh())

    layer = Call([before, after][variant % 2], b=torch.randn(size(variant // 2)))
    layer.alias = layer.b[1:]
    return [layer]


def unseen_writes(variant):
    """A small buffer that NumPy writes to."""

    def function(self, x):
        y = x + self.b
        self.b.numpy()[0] += 1
        return y

    return [Call(function, b=torch.randn(WIDTH))]


def shared_buffers(variant):
    """Two buffers of the same memory, or a buffer and a parameter."""

    def function(self, x):
        y = x + self.a[1]
        if variant % 2:
            self.b.add_(1)
        return y * (1 + self.a[:1].sin())

    a = torch.randn(WIDTH)
    if variant // 2 % 2:
        return [Call(lambda self, x: x * self.w + self.a.sin(), w=nn.Parameter(a), a=a)]
    return [Call(function, a=a, b=a[:2])]


def lazy_buffer(variant):
    """A buffer that the first forward makes, or that has another size after each forward."""

    def registered(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().mean(0))
        self.late = self.late + 1
        return x + self.late.sin()

    def not_persistent(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().mean(0), persistent=False)
        self.late.mul_(0.5)
        return x + self.late.sin()

    def none(self, x):
        if self.empty is None:
            self.empty = torch.arange(float(WIDTH))
        self.empty.add_(1)
        return x + self.empty.sin()

    def grows(self, x):
        self.b = torch.cat([self.b, x.detach().mean(0)[None]])
        return x + self.b.sum(0).sin()

    def comes_and_goes(self, x):
        if self.empty is None:
            self.empty = x.detach().mean(0)
            return x + self.empty.sin()
        y = x - self.empty
        self.empty = None
        return y

    ways = [registered, not_persistent, none, grows, comes_and_goes]
    layer = Call(ways[variant % len(ways)], b=torch.zeros(1, WIDTH))
    layer.register_buffer("empty", None)
    return [layer]


def lazy_module(make):
    """Returns a function that makes units whose first forward makes a module."""

    def function(self, x):
        if not hasattr(self, "late"):
            self.late = make()
        return self.late(x[:, None])[:, 0]

    return lambda variant: [Call(function)]


def odd_buffer(variant):
    """Buffers of other kinds: expanded, sparse, of other dtypes, empty."""
    expanded = torch.randn(1).expand(size(variant // 4))
    if variant % 4 == 0:
        return [Call(lambda self, x: x + self.b[:WIDTH], b=expanded)]
    if variant % 4 == 1:
        weight = torch.zeros(WIDTH, size(variant // 4)).index_fill_(1, torch.arange(WIDTH), 0.5).to_sparse()
        return [Call(lambda self, x: x + torch.sparse.sum(self.b, 1).to_dense(), b=weight)]
    if variant % 4 == 2:
        return [Call(lambda self, x: torch.where(self.b, x, x.sin()), b=torch.rand(WIDTH) < 0.5)]

    def function(self, x):
        self.c = self.c * (1 + 1j)
        return x + self.c.imag.sin() + self.e.sum()

    return [Call(function, c=torch.ones(WIDTH, dtype=torch.complex128), e=torch.zeros(0, 3))]


def view_of_buffer(variant):
    """A layer that returns a view of a buffer, which its next forward overwrites."""

    def cache(self, x):
        self.b[: len(x)] = x.detach()
        return x, self.b[: len(x)]

    def table(self, x):
        self.b.add_(x.detach().mean())
        return x, self.b[0].expand_as(x)

    def whole(self, x):
        self.b.resize_(len(x), WIDTH).copy_(x.detach())
        return x, self.b

    layer = Call([cache, table, whole][variant // 2 % 3], b=torch.zeros(16, WIDTH))
    return [layer, *passes(variant), Call(add_the_sine)]


def add_the_sine(self, xs):
    return xs[0] + xs[1].sin()


def view_of_parameter(variant):
    """A layer that returns a view of a frozen parameter, which its next forward overwrites."""

    def function(self, x):
        self.w.data.add_(x.detach().mean())
        return x, self.w.expand_as(x)

    layer = Call(function, w=nn.Parameter(torch.zeros(WIDTH), requires_grad=False))
    return [layer, *passes(variant), Call(add_the_sine)]


def activation_from_buffer(variant):
    """A layer whose output is a view of a buffer and needs no gradient."""

    def function(self, x):
        self.b[: len(x)] = x.detach()
        return self.b[: len(x)]

    last = Call(lambda self, x: x + self.w, w=parameter(WIDTH))
    return [Call(function, b=torch.zeros(16, WIDTH)), *passes(variant), last]


def written_weight(variant):
    """A parameter that the forward changes."""

    def clamped(self, x):
        self.w.data.clamp_(-0.5, 0.5)
        return x * self.w

    def decayed(self, x):
        with torch.no_grad():
            self.w.mul_(0.9)
        return x * self.w.clone()

    return [Call([clamped, decayed][variant % 2], w=parameter(WIDTH))]


def mode(variant):
    def function(self, x):
        if variant % 2:
            return nn.functional.hardtanh(x) if self.training else x * self.w
        self.n = self.n + self.training
        return x * (self.w if self.training else 1) + self.n

    return [Call(function, w=parameter(WIDTH), n=torch.zeros(()))]


def context(variant):
    def read(self, x):
        return x * CONTEXT.get()

    def changed(self, x):
        token = CONTEXT.set(CONTEXT.get() + 1)
        try:
            return read(self, x)
        finally:
            CONTEXT.reset(token)

    return [Call([read, changed][variant % 2])]


class Marked(torch.Tensor):
    """A tensor whose sine is a cosine."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.sin:
            function = torch.Tensor.cos
        return super().__torch_function__(function, types, args, kwargs or {})


def subclass(variant):
    if variant // 2 % 2:
        mark = Call(lambda self, x: {"x": x, "marked": x.as_subclass(Marked) * 1.5})
        last = Call(lambda self, d: d["x"].sin() + d["marked"].sin().as_subclass(torch.Tensor))
    else:
        mark = Call(lambda self, x: x.as_subclass(Marked) * 1.5)
        last = Call(lambda self, x: x.sin().as_subclass(torch.Tensor))
    return [mark, *passes(variant), last]


def subclass_of_state(variant):
    """Parameters and buffers of a subclass."""

    def function(self, x):
        self.b = self.b * 0.5 + x.detach().mean(0)
        return (x * self.w.sin() + self.b.sin()).as_subclass(torch.Tensor)

    def in_place(self, x):
        self.b.mul_(0.5)
        return (x * self.w.sin() + self.b.sin()).as_subclass(torch.Tensor)

    w, b = parameter(WIDTH).detach().as_subclass(Marked), torch.randn(WIDTH).as_subclass(Marked)
    return [Call([function, in_place][variant % 2], w=nn.Parameter(w), b=b)]


def gradient_statistics(variant):
    """A buffer that the backward changes."""

    def function(self, x):
        y = x * self.w
        if y.requires_grad:
            y.register_hook(lambda gradient: self.note(gradient))
        return y

    def add(gradient):
        layer.b.add_(gradient.sum())

    def assign(gradient):
        layer.b = layer.b + gradient.sum()

    layer = Call(function, w=parameter(WIDTH), b=torch.zeros(()))
    layer.note = [add, assign][variant % 2]
    return [layer]


def cached_table(variant):
    """A plain attribute that depends on the number of samples only."""

    def function(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(float(len(x)))[:, None]
        return x + self.table[: len(x)]

    layer = Call(function)
    layer.table = None
    return [layer]


def pre_hook(variant):
    """A hook of a layer that changes a buffer."""
    layer = Call(lambda self, x: x + self.b.sin(), b=torch.zeros(WIDTH))

    def add(module, inputs):
        module.b.add_(inputs[0].detach().mean(0))

    def assign(module, inputs):
        module.b = module.b + inputs[0].detach().mean(0)

    layer.register_forward_pre_hook([add, assign][variant % 2])
    return [layer]


def auxiliary(variant):
    """A layer that keeps an auxiliary loss as an attribute; the caller adds it to the loss of the call."""

    def function(self, x):
        y = self.linear(x).tanh()
        self.auxiliary = (y * self.w).sum()
        return y

    return [Call(function, linear=linear(), w=parameter(WIDTH))]


def thread_pool(variant):
    """A layer that computes in a thread of its own."""

    def scaled(self, x):
        return x * self.w

    def counted(self, x):
        self.n.add_(1)
        return x * self.w * self.n.clone()

    inner = [scaled, counted][variant % 2]

    def function(self, x):
        needs_gradients = torch.is_grad_enabled()

        def work():
            with torch.set_grad_enabled(needs_gradients):
                return inner(self, x)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    return [Call(function, w=parameter(WIDTH), n=torch.zeros(()))]


def shared_module(variant):
    """Layers of one stage that share a module with state."""
    norm = nn.BatchNorm1d(1, affine=variant % 2 == 1)
    return [Call(lambda self, x: self.norm(x[:, None])[:, 0], norm=norm) for _ in range(2)]


def shared_across_layers(variant):
    """A trainable weight, a frozen weight or a buffer of two layers."""
    first, last = linear(), linear()
    if variant // 2 % 3 == 0:
        last.weight = first.weight
    elif variant // 2 % 3 == 1:
        last.weight = first.weight.requires_grad_(False)
    else:
        table = torch.randn(size(variant // 6))
        first, last = (Call(lambda self, x: x + self.table[:WIDTH], table=table) for _ in range(2))
    return [first, *passes(variant), last]


def old_hook(variant):
    """A linear layer whose hook sets the weight as an attribute with a graph."""
    if variant % 2:
        return [prune.l1_unstructured(linear(), "weight", 0.3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return [nn.utils.weight_norm(linear())]


def instance_norm(variant):
    norm = nn.InstanceNorm1d(1, track_running_stats=True, affine=variant % 2 == 1)
    return [Call(lambda self, x: self.norm(x[:, None])[:, 0], norm=norm)]


def function_with_state(variant):
    """A torch.autograd.Function that changes a buffer in its backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x, w, layer):
            context.save_for_backward(x, w)
            context.layer = layer
            return x * w

        @staticmethod
        def backward(context, gradient):
            x, w = context.saved_tensors
            context.layer.b.add_(gradient.sum())
            return gradient * w, (gradient * x).sum(0), None

    layer = Call(lambda self, x: Function.apply(x, self.w, self), w=parameter(WIDTH), b=torch.zeros(()))
    return [layer]


def transforms(variant):
    """torch.func inside a layer, beside a buffer that changes."""

    def per_sample(self, x):
        self.b.add_(x.detach().mean(0))
        return torch.func.vmap(lambda row: row * self.w + self.b.sin())(x)

    def functional(self, x):
        self.b = self.b + 1
        return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.b.sin()}, (x,))

    return [Call([per_sample, functional][variant % 2], w=parameter(WIDTH), b=torch.zeros(WIDTH), inner=linear())]


def changed_by_the_caller(variant):
    """State that the caller changes between calls, or between a forward and its backward."""

    def frozen_now_and_then(layer, number):
        layer.w.requires_grad_(number % 2 == 0)

    def in_place(layer, number):
        layer.b.add_(number + 1)

    def assigned(layer, number):
        layer.b = layer.b + number + 1

    def data(layer, number):
        layer.b.data = layer.b.data * 0.5

    def frozen_parameter(layer, number):
        layer.frozen.add_(1)

    def loaded(layer, number):
        layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()})

    def read(self, x):
        return x * self.w + self.b[:WIDTH].sin() + self.frozen.sin()

    def changed(self, x):
        self.b = self.b + x.detach().mean()
        return read(self, x)

    layer = Call(
        [read, changed][variant // 2 % 2],
        w=parameter(WIDTH),
        b=torch.zeros(size(variant // 4)),
        frozen=nn.Parameter(torch.zeros(WIDTH), requires_grad=False),
    )
    ways = [in_place, assigned, data, frozen_parameter]
    if variant % 2:
        layer.between = ways[variant // 8 % 4]
    else:
        layer.after = [*ways, loaded, frozen_now_and_then][variant // 8 % 6]
    return [layer]


STATES = {
    "torch draws": draws(lambda: torch.rand(WIDTH)),
    "torch dropout": draws(lambda: nn.functional.dropout(torch.ones(WIDTH), 0.3)),
    "default generator": draws(lambda: torch.rand(WIDTH, generator=torch.default_generator)),
    "seeded draws": draws(seeded_draw),
    "checkpointed draws": checkpointed_draws,
    "python draws": draws(random.random),
    "python gauss": draws(lambda: random.gauss(0, 1)),
    "numpy draws": draws(numpy.random.rand),
    "own generator": own_generator,
    "own python generator": own_python_generator,
    "ema": ema,
    "writes": writes,
    "unseen writes": unseen_writes,
    "shared buffers": shared_buffers,
    "lazy buffer": lazy_buffer,
    "lazy module": lazy_module(lambda: nn.BatchNorm1d(1, affine=False)),
    "lazy parameter": lazy_module(lambda: nn.BatchNorm1d(1)),
    "odd buffer": odd_buffer,
    "view of a buffer": view_of_buffer,
    "view of a parameter": view_of_parameter,
    "activation from a buffer": activation_from_buffer,
    "written weight": written_weight,
    "mode": mode,
    "context": context,
    "subclass": subclass,
    "subclass of state": subclass_of_state,
    "gradient statistics": gradient_statistics,
    "cached table": cached_table,
    "pre hook": pre_hook,
    "spectral norm hook": lambda v: [nn.utils.spectral_norm(linear())],
    "auxiliary": auxiliary,
    "thread pool": thread_pool,
    "shared module": shared_module,
    "shared across layers": shared_across_layers,
    "old hook": old_hook,
    "instance norm": instance_norm,
    "function with state": function_with_state,
    "transforms": transforms,
    "changed by the caller": changed_by_the_caller,
}

UNSEEN = {"unseen writes", "own python generator"}  # units whose state changes without an operator
FORWARD_ONLY = {"auxiliary"}  # units that step() cannot train
