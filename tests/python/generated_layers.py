"""The layers of the models of test_plain_loop.py. A unit is one or more layers that map a tensor (samples, WIDTH) to
another, and may have state of any kind. ``UNITS[name]`` lists functions that make the layers of its variants.
"""

import collections
import concurrent.futures
import contextvars
import random
import warnings
from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.skip import Namespace, pop, skippable, stash

WIDTH = 4
SIZES = (2 * WIDTH, 9000)  # numbers in a buffer; one of 64 KiB and more is not copied in every forward
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)


class Call(nn.Module):
    """Calls a function with the module and the input. Registers tensors as buffers."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, value in members.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def call(function, **makers):
    """Returns a function that makes one layer. ``makers`` make its members."""
    return lambda: [Call(function, **{name: make() for name, make in makers.items()})]


def weight(*shape):
    return lambda: nn.Parameter(torch.randn(*(shape or (WIDTH,))) / 2)


def frozen(size=WIDTH):
    return lambda: nn.Parameter(torch.randn(size), requires_grad=False)


def buffer(*shape):
    return lambda: torch.randn(*(shape or (WIDTH,)))


def linear():
    return nn.Linear(WIDTH, WIDTH)


def norm(**options):
    """Returns a batch norm of one channel, which takes one sample too."""
    return Call(lambda self, x: self.norm(x[:, None])[:, 0], norm=nn.BatchNorm1d(1, **options))


def ids_of(x):
    return (x.detach()[:, 0] * 10).abs().long() % 5


def mean_of(x):
    return x.detach().mean(0)


def apart(*makers):
    """Returns the variants of several layers: behind each other, and with a layer between them."""
    return [lambda: [m() for m in makers], lambda: [makers[0](), nn.Identity(), *(m() for m in makers[1:])]]


# Structures between layers.


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


def changed(index):
    def function(self, xs):
        xs[index].add_(self.w)
        return xs

    return lambda: Call(function, w=weight(1)())


def joined(self, xs):
    return xs[0] * 2 + torch.cat([xs[1], xs[1]], 1)[:, :WIDTH].sin()


def embed(self, x):
    return {"x": x["x"] + self.table(x["ids"]), "pair": Pair(x["pair"].second, None), "list": [x["ids"] > 2]}


def select(self, x):
    assert type(x["pair"]) is Pair and x["pair"].second is None
    return torch.where(x["list"][0][:, None], x["x"], x["pair"].first.double())


STRUCTURES = {
    "views": [
        call(lambda self, x: torch.cat([x, x], 1).chunk(2, 1)[1]),
        call(lambda self, x: x.t().contiguous().t()),
        call(lambda self, x: x.mean(1, keepdim=True).expand(-1, WIDTH)),
        call(lambda self, x: F.pad(x, (1, 1))[:, 1:-1]),
    ],
    "alias": [
        *apart(lambda: Call(lambda self, x: (x, x)), lambda: Call(joined)),
        *apart(lambda: Call(lambda self, x: (x, x)), changed(0), lambda: Call(joined)),
        *apart(lambda: Call(lambda self, x: [x, x[:, :2]]), changed(1), lambda: Call(joined)),
    ],
    "dictionary": apart(
        lambda: Call(lambda self, x: {"x": x, "ids": ids_of(x), "pair": Pair(x, x.float())}),
        lambda: Call(embed, table=nn.Embedding(5, WIDTH)),
        lambda: Call(select),
    ),
}

# Random numbers.


class Draw(nn.Module):
    """Draws from a generator that all layers share. A layer of a pipeline writes what its forwards drew to ``log``. The
    plain model repeats it in the order of the micro-batches, and draws too."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.log, self.repeats = draw, collections.deque(), False

    def forward(self):
        value = self.draw()
        if self.repeats:
            return self.log.popleft() if self.log else value
        if not gpipe.is_recomputing():
            self.log.append(value)
        return value


def draws(draw):
    """Returns layers that draw always, in some forwards, for some inputs, and twice."""

    def later(self, x):
        self.n = self.n + 1
        return x * (1.5 + self.drawn()) if self.n % 3 else x

    def sometimes(self, x):
        return x * (1.5 + self.drawn()) if x.detach()[0, 0] > 0.1 else x

    functions = [lambda self, x: x * (1.5 + self.drawn()), later, sometimes, lambda self, x: x * self.drawn() + self.drawn()]
    return [call(function, n=lambda: torch.full((), 2), drawn=lambda: draw) for function in functions]


def shared_draws(draw):
    return [lambda: [Call(lambda self, x: x * (1.5 + self.drawn()), drawn=Draw(draw))]]


def seeded():
    torch.manual_seed(5)
    return torch.rand(WIDTH)


def own_generator(make, draw):
    def late(self, x):
        if not hasattr(self, "late"):
            self.late = make(3)
        return x * (0.5 + draw(self.late))

    def early():
        layer = Call(lambda self, x: x * (0.5 + draw(self.generator)))
        layer.generator = make(1)
        return [layer]

    return [early, lambda: [Call(late)]] if make is generator else [early]


def generator(seed):
    return torch.Generator().manual_seed(seed)


RANDOM = {
    "draws": draws(lambda: torch.rand(WIDTH)),
    "dropout": [lambda: [nn.Dropout(0.3)], lambda: [nn.Dropout(0.3, inplace=True)], lambda: [nn.RReLU()]],
    "default generator": draws(lambda: torch.rand(WIDTH, generator=torch.default_generator)),
    "seeds": draws(seeded),
    "checkpoint": [
        call(
            lambda self, x: checkpoint(self.inner, F.dropout(x, 0.3), use_reentrant=False),
            inner=lambda: nn.Sequential(linear(), nn.Dropout(0.3)),
        )
    ],
    "python draws": shared_draws(random.random),
    "numpy draws": shared_draws(numpy.random.rand),
    "own generator": own_generator(generator, lambda own: torch.rand(WIDTH, generator=own)),
    "own python generator": own_generator(random.Random, lambda own: own.random())
    + own_generator(numpy.random.default_rng, lambda own: own.random())
    + own_generator(numpy.random.RandomState, lambda own: own.rand()),
}

# Buffers and parameters that a forward changes.


def index_write(self, x):
    self.b[ids_of(x)] += 1


def new_data(self, x):
    self.b.data = self.b.data + 1


def assigned(self, x):
    self.b = torch.cat([mean_of(x), self.b[WIDTH:]])


WAYS = [
    lambda self, x: torch.add(self.b, 1, out=self.b),
    lambda self, x: torch._foreach_add_([self.b], [x.detach().mean()]),
    lambda self, x: self.b.data.add_(1),
    lambda self, x: self.b.set_(self.b + 1),
    lambda self, x: self.b.view(-1)[1:].mul_(0.5).add_(x.detach().mean()),
    lambda self, x: nn.init.constant_(self.b, x.detach().mean().item()),
    lambda self, x: self.alias.add_(1),
    index_write,
    new_data,
    assigned,
]


def writes(change, size, first):
    """Returns a layer that writes to a buffer before or after it reads the buffer."""

    def function(self, x):
        if first:
            change(self, x)
            return x * (1 + self.b[:WIDTH].tanh())
        y = x + self.b[:WIDTH].tanh()
        change(self, x)
        return y

    def make():
        layer = Call(function, b=torch.randn(size))
        layer.alias = layer.b[:1]
        return [layer]

    return make


def unseen(self, x):
    y = x + self.b
    self.b.numpy()[0] += 1
    return y


def ema(change):
    def function(self, x):
        y = x + self.w[:WIDTH].tanh()
        with torch.no_grad():
            change(self.w, x.detach().mean())
        return y

    return [call(function, w=frozen(size)) for size in SIZES]


def move_data(w, mean):
    w.data = w.data * 0.9 + mean


def late_buffer(persistent):
    def function(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", mean_of(x), persistent=persistent)
        self.late.mul_(0.5)
        return x + self.late.sin()

    return function


def comes_and_goes(self, x):
    if self.b is None:
        self.b = mean_of(x)
        return x + self.b.sin()
    y = x - self.b
    self.b = None
    return y


def comes_late():
    layer = Call(comes_and_goes)
    layer.register_buffer("b", None)
    return [layer]


def grows(self, x):
    self.b = torch.cat([self.b.view(-1, WIDTH), mean_of(x)[None]])
    return x + self.b.sum(0).sin()


def late_module(make):
    def function(self, x):
        if not hasattr(self, "late"):
            self.late = make()
        return self.late(x[:, None])[:, 0]

    return function


def complex_buffer(self, x):
    self.b = self.b * (1 + 1j)
    return x + self.b.imag.sin()


def cache(self, x):
    self.b[: len(x)] = x.detach()
    return x, self.b[: len(x)]


def cached_table(self, x):
    if not hasattr(self, "table") or len(self.table) < len(x):
        self.table = torch.arange(float(len(x)))[:, None]
    return x + self.table[: len(x)]


def clamped(self, x):
    self.w.data.clamp_(-0.5, 0.5)
    return x * self.w


def two_of_one_memory(self, x):
    y = x + self.a[1]
    self.b.add_(1)
    return y * (1 + self.a[:1].sin())


def with_view():
    a = torch.randn(WIDTH)
    return [Call(two_of_one_memory, a=a, b=a[:2])]


def parameter_and_buffer():
    a = torch.randn(WIDTH)
    return [Call(lambda self, x: x * self.w + self.a.sin(), w=nn.Parameter(a), a=a)]


def read_table(self, x):
    return x + self.b[:WIDTH]


def noted_gradient(change):
    """A layer whose backward changes a buffer."""

    def function(self, x):
        y = x.as_subclass(torch.Tensor) * self.w
        if y.requires_grad:
            y.register_hook(lambda gradient: change(self, gradient.sum()))
        return y

    return call(function, w=weight(), b=lambda: torch.zeros(()))


def add_gradient(self, total):
    self.b.add_(total)


def assign_gradient(self, total):
    self.b = self.b + total


BUFFERS = {
    "writes": [writes(change, size, first) for change in WAYS for size in SIZES for first in (False, True)],
    "unseen writes": [call(unseen, b=buffer())],
    "ema": [*ema(lambda w, mean: w.lerp_(mean.expand_as(w), 0.1)), *ema(move_data)],
    "late buffer": [call(late_buffer(True)), call(late_buffer(False)), call(grows, b=lambda: torch.zeros(1, WIDTH))]
    + [comes_late],
    "late module": [call(late_module(lambda: nn.BatchNorm1d(1, affine=False))), call(late_module(lambda: nn.BatchNorm1d(1)))],
    "odd buffer": [
        *[call(read_table, b=lambda size=size: torch.randn(1).expand(size)) for size in SIZES],
        call(lambda self, x: x + torch.sparse.sum(self.b, 1).to_dense(), b=lambda: torch.rand(WIDTH, 9).to_sparse()),
        call(lambda self, x: torch.where(self.b, x, x.sin()), b=lambda: torch.rand(WIDTH) < 0.5),
        call(complex_buffer, b=lambda: torch.ones(WIDTH, dtype=torch.complex128)),
    ],
    "view of a buffer": apart(lambda: Call(cache, b=torch.zeros(16, WIDTH)), lambda: Call(joined)),
    "buffers of one memory": [with_view, parameter_and_buffer],
    "written weight": [call(clamped, w=weight())],
    "cached table": [call(cached_table)],
    "batch norm": [lambda: [norm(momentum=0.1)], lambda: [norm(momentum=None)]],
    "gradient statistics": [noted_gradient(add_gradient), noted_gradient(assign_gradient)],
}

# What PyTorch's own tools add to a layer.


class Marked(torch.Tensor):
    """A tensor whose sine is a cosine."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        function = torch.Tensor.cos if function is torch.Tensor.sin else function
        return super().__torch_function__(function, types, args, kwargs or {})


def marked_state(self, x):
    self.b = self.b * 0.5 + mean_of(x)
    return (x * self.w.sin() + self.b.sin()).as_subclass(torch.Tensor)


def scope(self, x):
    token = CONTEXT.set(CONTEXT.get() + 1)
    try:
        return x * CONTEXT.get()
    finally:
        CONTEXT.reset(token)


def by_mode(self, x):
    return F.hardtanh(x) if self.training else x * self.w


def in_a_thread(self, x):
    def work(grad_mode):
        with torch.set_grad_enabled(grad_mode):
            self.n.add_(1)
            return x * self.w * self.n.clone()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work, torch.is_grad_enabled()).result()


def per_sample(self, x):
    self.b.add_(mean_of(x))
    return torch.func.vmap(lambda row: row * self.w + self.b.sin())(x)


def functional(self, x):
    self.b = self.b + 1
    return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.b.sin()}, (x,))


def hooked(register, hook, function=lambda self, x: self.inner(x)):
    def make():
        layer = Call(function, inner=linear(), b=torch.zeros(WIDTH))
        register(layer, hook)
        return [layer]

    return make


def keep_mean(module, inputs):
    module.b = module.b + mean_of(inputs[0])


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return [nn.utils.weight_norm(linear())]


def tied():
    first, last = linear(), linear()
    last.weight = first.weight
    return first, last


def shared_buffer():
    table = torch.randn(WIDTH)
    return [Call(read_table, b=table), nn.Tanh(), Call(read_table, b=table)]


def shared_module():
    shared = norm()
    return [nn.Sequential(shared), nn.Sequential(shared)]


# State that the caller changes between calls, or between a forward and its backward.


def after_add(layer, number):
    layer.b.add_(number + 1)


def after_assign(layer, number):
    layer.b = layer.b + number + 1


def after_load(layer, number):
    layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()})


def after_freeze(layer, number):
    layer.w.requires_grad_(number % 2 == 0)


def changed_by_the_caller(when, change):
    def make():
        layer = Call(lambda self, x: x * self.w + self.b[:WIDTH].sin(), w=weight()(), b=torch.zeros(SIZES[0]))
        setattr(layer, when, change)
        return [layer]

    return make


TOOLS = {
    "linear": [lambda: [linear()], lambda: [nn.Sequential(linear(), nn.Tanh(), linear())]],
    "tanh": [lambda: [nn.Tanh()], lambda: [nn.ReLU(inplace=True)]],
    "in place": [call(lambda self, x: x.add_(self.w), w=weight()), call(lambda self, x: x.mul_(1.5))],
    "weights": [
        call(lambda self, x: x.sin(), w=weight()),
        call(lambda self, x: x * self.w, w=frozen()),
        call(lambda self, x: (x @ self.w).tanh() @ self.w.t(), w=weight(WIDTH, WIDTH)),
        call(lambda self, x: x * self.a if x.detach()[0, 0] > 0.1 else x.sin() + self.b, a=weight(), b=weight()),
    ],
    "norms of weights": [
        lambda: [parametrizations.spectral_norm(linear())],
        lambda: [parametrizations.weight_norm(linear())],
        lambda: [nn.utils.spectral_norm(linear())],
        lambda: [prune.l1_unstructured(linear(), "weight", 0.3)],
        old_weight_norm,
    ],
    "hooks": [
        hooked(nn.Module.register_forward_pre_hook, keep_mean),
        hooked(nn.Module.register_forward_hook, lambda module, inputs, output: output * 1.5),
        hooked(nn.Module.register_full_backward_hook, lambda module, inputs, _: [None if i is None else i * 2 for i in inputs]),
    ],
    "subclass": [
        *apart(lambda: Call(lambda self, x: x.as_subclass(Marked)), lambda: Call(lambda self, x: x.sin().as_subclass(torch.Tensor))),
        call(marked_state, w=lambda: nn.Parameter(weight()().detach().as_subclass(Marked)), b=lambda: buffer()().as_subclass(Marked)),
    ],
    "context": [call(lambda self, x: x * CONTEXT.get()), call(scope)],
    "mode": [call(by_mode, w=weight())],
    "thread": [call(in_a_thread, w=weight(), n=lambda: torch.zeros(()))],
    "transforms": [call(per_sample, w=weight(), b=buffer()), call(functional, inner=linear, b=lambda: torch.zeros(()))],
    "shared weight": [lambda: [*tied()], lambda: [nn.Sequential(*tied())], shared_buffer],
    "shared module": [shared_module],
    "changed after a call": [
        changed_by_the_caller("after", change) for change in (after_add, after_assign, after_load, after_freeze)
    ],
    "changed between": [changed_by_the_caller("between", change) for change in (after_add, after_assign)],
}

UNITS = STRUCTURES | RANDOM | BUFFERS | TOOLS
TOGETHER = {"shared module"}  # whose layers must be in one stage
UNSEEN = {"unseen writes", "own python generator"}  # whose state changes without an operator


# Skips. The layers of a pipeline stash and pop, by plain calls or in generators. The plain model has a dict.


@skippable(stash=["skip"])
class Stash(Call):
    def forward(self, x):
        stash("skip", x.as_subclass(torch.Tensor))
        return x * 1.5


@skippable(stash=["skip"])
class YieldStash(Call):
    def forward(self, x):
        yield stash("skip", x.as_subclass(torch.Tensor))
        return x * 1.5


@skippable(pop=["skip"])
class Pop(Call):
    def forward(self, x):
        return self.function(x, pop("skip"))


@skippable(pop=["skip"])
class YieldPop(Call):
    def forward(self, x):
        skip = yield pop("skip")
        return self.function(x, skip)


POPS = [lambda x, skip: x + skip.tanh(), lambda x, skip: x.add_(skip)]


class Skips:
    """Makes layers that stash and pop; with ``plain``, for a model that does not use the library."""

    def __init__(self, plain):
        self.plain, self.tensors, self.namespaces = plain, {}, collections.defaultdict(Namespace)

    def end(self, name, skip, variant):
        function = POPS[variant // 2]
        if not self.plain:
            classes = (Stash, YieldStash) if name == "stash" else (Pop, YieldPop)
            return classes[variant % 2](function).isolate(self.namespaces[skip])
        if name == "stash":
            return Call(lambda self_, x: (self.tensors.update({skip: x.as_subclass(torch.Tensor)}), x * 1.5)[1])
        return Call(lambda self_, x: function(x, self.tensors.pop(skip)))
