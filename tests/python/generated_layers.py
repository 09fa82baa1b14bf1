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
            if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor | None):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


def call(function, **makers):
    """Returns a function that makes a unit of one layer. ``makers`` make its members."""
    return lambda: [Call(function, **{name: make() for name, make in makers.items()})]


def layers(*makers):
    """Returns the variants of a unit of several layers: one behind the other, and with a layer in between."""
    return [lambda: [make() for make in makers], lambda: [makers[0](), nn.Identity(), *(make() for make in makers[1:])]]


def weight(*shape):
    return lambda: nn.Parameter(torch.randn(*(shape or (WIDTH,))) / 2)


def frozen(size=WIDTH):
    return lambda: nn.Parameter(torch.randn(size), requires_grad=False)


def zeros(*shape):
    return lambda: torch.zeros(shape)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def norm(**options):
    """Returns a batch norm of one channel, which takes one sample too."""
    return Call(lambda self, x: self.norm(x[:, None])[:, 0], norm=nn.BatchNorm1d(1, **options))


def ids_of(x):
    return (x.detach()[:, 0] * 10).abs().long() % 5


def mean_of(x):
    return x.detach().mean(0)


# Structures and views between layers.


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
    ],
    "alias": [
        *layers(lambda: Call(lambda self, x: (x, x)), lambda: Call(joined)),
        *layers(lambda: Call(lambda self, x: (x, x)), changed(0), lambda: Call(joined)),
        *layers(lambda: Call(lambda self, x: [x, x[:, :2]]), changed(1), lambda: Call(joined)),
    ],
    "dictionary": layers(
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
        return x * (1.5 + draw()) if self.n % 3 else x

    return [
        call(lambda self, x: x * (1.5 + draw())),
        call(later, n=zeros()),
        call(lambda self, x: x * (1.5 + draw()) if x.detach()[0, 0] > 0.1 else x),
        call(lambda self, x: x * draw() + draw()),
    ]


def seeded():
    torch.manual_seed(5)
    return torch.rand(WIDTH)


def own(make, draw):
    """Returns a layer that has a generator, and one that makes it in a forward."""

    def late(self, x):
        if not hasattr(self, "late"):
            self.late = make(3)
        return x * (0.5 + draw(self.late))

    return [call(lambda self, x: x * (0.5 + draw(self.own)), own=lambda: make(1)), call(late)]


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
    "python draws": [call(lambda self, x: x * (1.5 + self.drawn()), drawn=lambda: Draw(random.random))],
    "numpy draws": [call(lambda self, x: x * (1.5 + self.drawn()), drawn=lambda: Draw(numpy.random.rand))],
    "own generator": own(lambda seed: torch.Generator().manual_seed(seed), lambda own: torch.rand(WIDTH, generator=own)),
    "own python generator": [
        own(random.Random, lambda own: own.random())[0],
        own(numpy.random.default_rng, lambda own: own.random())[0],
        own(numpy.random.RandomState, lambda own: own.rand())[0],
    ],
}

# Buffers and parameters that a forward or backward changes.


def setter(name, value):
    """Returns a function that assigns what ``value`` returns to an attribute."""
    return lambda self, x: setattr(self, name, value(self, x))


def index_write(self, x):
    self.b[ids_of(x)] += 1


WAYS = [
    lambda self, x: torch.add(self.b, 1, out=self.b),
    lambda self, x: torch._foreach_add_([self.b], [x.detach().mean()]),
    lambda self, x: self.b.data.add_(1),
    lambda self, x: setattr(self.b, "data", self.b.data + 1),
    lambda self, x: self.b.set_(self.b + 1),
    lambda self, x: self.b.view(-1)[1:].mul_(0.5).add_(x.detach().mean()),
    lambda self, x: nn.init.constant_(self.b, x.detach().mean().item()),
    lambda self, x: self.alias.add_(1),
    setter("b", lambda self, x: torch.cat([mean_of(x), self.b[WIDTH:]])),
    index_write,
]


def changes(change, first=False, **makers):
    """Returns a layer that changes its state ``b`` after it has read it, or before."""

    def function(self, x):
        if first:
            with torch.no_grad():
                change(self, x)
            return x * (1 + self.b[:WIDTH].tanh())
        y = x + self.b[:WIDTH].tanh()
        with torch.no_grad():
            change(self, x)
        return y

    return call(function, **makers)


def with_alias(make):
    def made():
        (layer,) = make()
        layer.alias = layer.b[:1]
        return [layer]

    return made


def late(make, change=lambda self: None):
    """Returns a layer whose first forward makes a buffer or a module."""

    def function(self, x):
        if not hasattr(self, "late"):
            make(self, x)
        change(self)
        return self.late(x) if isinstance(self.late, nn.Module) else x + self.late.sin()

    return call(function)


def comes_and_goes(self, x):
    y = x if self.b is None else x + self.b
    self.b = mean_of(x) if self.b is None else None
    return y


def grows(self, x):
    self.b = torch.cat([self.b, mean_of(x)[None]])
    return x + self.b.sum(0).sin()


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


def of_one_memory():
    a = torch.randn(WIDTH)
    return [Call(lambda self, x: x + self.a[1] * self.b.add_(1)[0].clone(), a=a, b=a[:2])]


def parameter_and_buffer():
    a = torch.randn(WIDTH)
    return [Call(lambda self, x: x * self.w + self.a.sin(), w=nn.Parameter(a), a=a)]


def noted_gradient(change):
    """Returns a layer whose backward changes a buffer."""

    def function(self, x):
        y = x.as_subclass(torch.Tensor) * self.w
        if y.requires_grad:
            y.register_hook(lambda gradient: change(self, gradient.sum()) and None)
        return y

    return call(function, w=weight(), b=zeros())


STATE = {
    "writes": [
        with_alias(changes(change, first, b=lambda size=size: torch.randn(size)))
        for change in WAYS
        for size in SIZES
        for first in (False, True)
    ],
    "unseen writes": [changes(lambda self, x: self.b.numpy().__iadd__(1), b=zeros(WIDTH))],
    "moving average": [
        changes(change, b=frozen(size))
        for change in (lambda self, x: self.b.lerp_(x.mean().expand_as(self.b), 0.1), WAYS[3])
        for size in SIZES
    ],
    "late buffer": [
        late(lambda self, x: self.register_buffer("late", mean_of(x)), lambda self: self.late.mul_(0.5)),
        late(lambda self, x: self.register_buffer("late", mean_of(x), persistent=False), lambda self: self.late.mul_(0.5)),
        call(comes_and_goes, b=lambda: None),
        call(grows, b=zeros(1, WIDTH)),
    ],
    "late module": [
        late(lambda self, x: setattr(self, "late", norm(affine=False))),
        late(lambda self, x: setattr(self, "late", norm())),
    ],
    "odd buffer": [
        *[call(lambda self, x: x + self.b[:WIDTH], b=lambda size=size: torch.randn(1).expand(size)) for size in SIZES],
        call(lambda self, x: x + torch.sparse.sum(self.b, 1).to_dense(), b=lambda: torch.rand(WIDTH, 9).to_sparse()),
        call(lambda self, x: torch.where(self.b, x, x.sin()), b=lambda: torch.rand(WIDTH) < 0.5),
        call(complex_buffer, b=lambda: torch.ones(WIDTH, dtype=torch.complex128)),
    ],
    "view of a buffer": layers(lambda: Call(cache, b=torch.zeros(16, WIDTH)), lambda: Call(joined)),
    "buffers of one memory": [of_one_memory, parameter_and_buffer],
    "written weight": [call(clamped, w=weight())],
    "cached table": [call(cached_table)],
    "batch norm": [lambda: [norm(momentum=0.1)], lambda: [norm(momentum=None)]],
    "gradient statistics": [noted_gradient(lambda self, total: self.b.add_(total)), noted_gradient(setter("b", lambda self, total: self.b + total))],
}

# What PyTorch's own tools, Python and the caller add to a layer.


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


def in_a_thread(self, x):
    def work(grad_mode):
        with torch.set_grad_enabled(grad_mode):
            return x * self.w * self.n.add_(1).clone()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work, torch.is_grad_enabled()).result()


def per_sample(self, x):
    self.b.add_(mean_of(x))
    return torch.func.vmap(lambda row: row * self.w + self.b.sin())(x)


def functional(self, x):
    self.b = self.b + 1
    return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.b.sin()}, (x,))


def hooked(register, hook):
    def make():
        layer = Call(lambda self, x: self.inner(x), inner=linear(), b=torch.zeros(WIDTH))
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
    return [first, last]


def shared_buffer():
    table = torch.randn(WIDTH)
    return [Call(lambda self, x: x + self.b, b=table), nn.Tanh(), Call(lambda self, x: x * self.b, b=table)]


def shared_module():
    shared = norm()
    return [nn.Sequential(shared), nn.Sequential(shared)]


def by_the_caller(when, change):
    """Returns a layer whose state the caller changes: after a call, or between a forward and its backward."""

    def make():
        layer = Call(lambda self, x: x * self.w + self.b.sin(), w=weight()(), b=torch.zeros(WIDTH))
        setattr(layer, when, change)
        return [layer]

    return make


CHANGES = [
    lambda layer, number: layer.b.add_(number + 1),
    setter("b", lambda layer, number: layer.b + number + 1),
    lambda layer, number: layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()}),
    lambda layer, number: layer.w.requires_grad_(number % 2 == 0),
]

TOOLS = {
    "linear": [lambda: [linear()], lambda: [nn.Sequential(linear(), nn.Tanh(), linear())]],
    "in place": [
        call(lambda self, x: x.add_(self.w), w=weight()),
        call(lambda self, x: x.mul_(1.5)),
        lambda: [nn.ReLU(inplace=True)],
    ],
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
        *layers(
            lambda: Call(lambda self, x: x.as_subclass(Marked)),
            lambda: Call(lambda self, x: x.sin().as_subclass(torch.Tensor)),
        ),
        call(
            marked_state,
            w=lambda: nn.Parameter(torch.randn(WIDTH).as_subclass(Marked)),
            b=lambda: torch.randn(WIDTH).as_subclass(Marked),
        ),
    ],
    "context": [call(lambda self, x: x * CONTEXT.get()), call(scope)],
    "mode": [call(lambda self, x: F.hardtanh(x) if self.training else x * self.w, w=weight())],
    "thread": [call(in_a_thread, w=weight(), n=zeros())],
    "transforms": [call(per_sample, w=weight(), b=zeros(WIDTH)), call(functional, inner=linear, b=zeros())],
    "shared weight": [tied, lambda: [nn.Sequential(*tied())], shared_buffer],
    "shared module": [shared_module],
    "changed after a call": [by_the_caller("after", change) for change in CHANGES],
    "changed between": [by_the_caller("between", change) for change in CHANGES[:2]],
}

UNITS = STRUCTURES | RANDOM | STATE | TOOLS
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
