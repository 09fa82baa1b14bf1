"""The units that the models of test_plain_loop.py consist of. A unit is one or more layers that map a tensor (samples,
WIDTH) to another.

``UNITS[name](variant)`` makes the layers of a unit without skips. ``RANDOM`` has units that draw random numbers. The
layers of a unit in ``TOGETHER`` must be in one stage.
"""

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gpipe.skip import Namespace, pop, skippable, stash

WIDTH = 4


class Call(nn.Module):
    """Calls a function with the module and the input. Registers tensors, parameters and modules."""

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


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / 2)


def ids_of(x):
    return (x.detach()[:, 0] * 10).abs().long() % 5


def linear():
    return nn.Linear(WIDTH, WIDTH)


def counter(variant):
    def assigned(self, x):
        self.n = self.n + 1
        return x / self.n

    def in_place(self, x):
        self.n += 1
        return x / self.n.double()

    def read_first(self, x):
        y = x + 0.1 * self.n
        self.n = self.n + 1
        return y

    return [Call([assigned, in_place, read_first][variant % 3], n=torch.zeros((), dtype=torch.long))]


def average(variant):
    def assigned(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * (1 + self.mean)

    def in_place(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * (1 + self.mean.clone())

    def read_first(self, x):
        y = x + self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y

    return [Call([assigned, in_place, read_first][variant % 3], mean=torch.zeros(WIDTH))]


def recomputes_itself(variant):
    def function(self, x):
        return checkpoint(self.inner, x, use_reentrant=variant % 2 == 1)

    return [Call(function, inner=nn.Sequential(linear(), nn.Tanh()))]


def tied(variant):
    first, last = linear(), linear()
    last.weight = first.weight
    return [nn.Sequential(first, nn.Tanh(), last)]


def passes(variant):
    return [nn.Identity() for _ in range(variant % 2)]


def alias(variant):
    return [
        Call(lambda self, x: (x, x)),
        *passes(variant),
        Call(lambda self, xs: xs[0] * 2 + xs[1].sin()),
    ]


def alias_changed(variant):
    def change(self, xs):
        xs[variant // 2 % 2].add_(self.w)
        return xs

    return [
        Call(lambda self, x: (x, x)),
        *passes(variant),
        Call(change, w=parameter(WIDTH)),
        Call(lambda self, xs: xs[0] * 2 + xs[1].sin()),
    ]


def view_changed(variant):
    def change(self, xs):
        xs[variant // 2 % 2].add_(self.w)
        return xs

    return [
        Call(lambda self, x: (x, x[:, :2])),
        *passes(variant),
        Call(change, w=parameter(1)),
        Call(lambda self, xs: xs[0] + torch.cat([xs[1], xs[1]], 1).sin()),
    ]


def branch(variant):
    def function(self, x):
        return x * self.a if x.detach()[0, 0] > 0.1 else x.sin() + self.b

    return [Call(function, a=parameter(WIDTH), b=parameter(WIDTH))]


def gru(variant):
    network = (nn.LSTM if variant % 2 else nn.GRU)(1, WIDTH, batch_first=True)
    return [Call(lambda self, x: self.network(x[:, :, None])[0][:, -1], network=network)]


def attention(variant):
    if variant % 2:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        return [Call(lambda self, x: self.inner(torch.stack([x, x.flip(1)], 1)).mean(1), inner=layer)]

    def function(self, x):
        words = torch.stack([x, x.flip(1), x / 2])
        return self.inner(words, words, words)[0].mean(0)

    return [Call(function, inner=nn.MultiheadAttention(WIDTH, 2))]


def forces(variant):
    def function(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = self.potential(place).tanh().square().sum()
            return x - torch.autograd.grad(energy, place, create_graph=True)[0]

    return [Call(function, potential=linear())]


def module_hook(variant):
    layer = linear()
    if variant % 2:
        layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
    else:
        layer.register_full_backward_hook(lambda module, inputs, _: [None if i is None else i * 2 for i in inputs])
    return [layer]


def dictionary(variant):
    return [
        Call(lambda self, x: {"x": x, "ids": ids_of(x), "n": 2}),
        Call(lambda self, d: d["x"] * d["n"] + self.table(d["ids"]), table=nn.Embedding(5, WIDTH)),
    ]


def several(variant):
    return [
        Call(lambda self, x: (x * 2, ids_of(x), x.float(), x.detach() > 0)),
        Call(lambda self, xs: (xs[0] + self.table(xs[1]), *xs[1:]), table=nn.Embedding(5, WIDTH)),
        Call(lambda self, xs: torch.where(xs[3], xs[0], xs[2].double()) * (1 + xs[1][:, None])),
    ]


def batch_norm(variant):
    norm = nn.BatchNorm1d(1, momentum=None if variant % 2 else 0.1, affine=variant < 2)
    return [Call(lambda self, x: self.norm(x[:, None])[:, 0], norm=norm)]


def view_in_place(self, x):
    x[:, 1:3] += self.w
    return x


UNITS = {
    "linear": lambda v: [linear()],
    "tanh": lambda v: [nn.Tanh()],
    "nested": lambda v: [nn.Sequential(linear(), nn.Tanh(), linear())],
    "layer norm": lambda v: [nn.LayerNorm(WIDTH)],
    "batch norm": batch_norm,
    "convolution": lambda v: [Call(lambda self, x: self.c(x[:, None])[:, 0], c=nn.Conv1d(1, 1, 3, padding=1))],
    "counter": counter,
    "average": average,
    "spectral norm": lambda v: [parametrizations.spectral_norm(linear(), n_power_iterations=1 + v % 2)],
    "weight norm": lambda v: [parametrizations.weight_norm(linear())],
    "checkpoint": recomputes_itself,
    "tied": tied,
    "relu_": lambda v: [nn.ReLU(inplace=True)],
    "add_": lambda v: [Call(lambda self, x: x.add_(self.w), w=parameter(WIDTH))],
    "view in place": lambda v: [Call(view_in_place, w=parameter(2))],
    "alias": alias,
    "alias changed": alias_changed,
    "view changed": view_changed,
    "unused": lambda v: [Call(lambda self, x: x.sin(), w=parameter(WIDTH))],
    "branch": branch,
    "frozen": lambda v: [Call(lambda self, x: x * self.w, w=nn.Parameter(torch.randn(WIDTH), requires_grad=False))],
    "weight twice": lambda v: [Call(lambda self, x: (x @ self.w).tanh() @ self.w.t(), w=parameter(WIDTH, WIDTH))],
    "embedding": lambda v: [Call(lambda self, x: x + self.table(ids_of(x)), table=nn.Embedding(5, WIDTH))],
    "max_norm": lambda v: [Call(lambda self, x: x + self.table(ids_of(x)), table=nn.Embedding(5, WIDTH, max_norm=1.0))],
    "gru": gru,
    "attention": attention,
    "forces": forces,
    "module hook": module_hook,
    "detach": lambda v: [Call(lambda self, x: torch.cat([x[:, :2].detach(), x[:, 2:]], 1))],
    "dictionary": dictionary,
    "several": several,
}

RANDOM = {
    "rrelu": lambda v: [nn.RReLU(inplace=v % 2 == 1)],
    "alpha dropout": lambda v: [nn.AlphaDropout(0.3)],
    "gumbel softmax": lambda v: [Call(lambda self, x: nn.functional.gumbel_softmax(x, hard=v % 2 == 1))],
    "dropout": lambda v: [nn.Dropout(0.3, inplace=v % 2 == 1)],
    "random attention": lambda v: [
        Call(
            lambda self, x: self.inner(torch.stack([x, x.flip(1)], 1)).mean(1),
            inner=nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True),
        )
    ],
}

IN_PLACE = {"dropout", "rrelu", "relu_", "add_", "view in place", "alias changed", "view changed", "pop in place"}
SHARES = {"alias changed", "view changed", "stash the activation"}
TOGETHER = {"dictionary", "shared module"}


# The layers of a skip are functions of the input and of put() or get(). The pipeline implements these with stash() and
# pop(), by plain calls or in generators. The plain model implements them with a dict.


def stash_and_scale(x, put):
    put(x)
    return x * 1.5


def stash_the_activation(x, put):
    put(x)
    return x


STASHES = {"stash": stash_and_scale, "stash the activation": stash_the_activation}


def pop_and_add(x, get):
    return x + get().tanh()


def pop_in_place(x, get):
    x += get()
    return x


POPS = {"pop": pop_and_add, "pop in place": pop_in_place}


@skippable(stash=["skip"])
class Stash(Call):
    def forward(self, x):
        return self.function(x, lambda tensor: stash("skip", tensor))


@skippable(stash=["skip"])
class YieldStash(Call):
    def forward(self, x):
        kept = []
        y = self.function(x, kept.append)
        yield stash("skip", kept[0])
        return y


@skippable(pop=["skip"])
class Pop(Call):
    def forward(self, x):
        return self.function(x, lambda: pop("skip"))


@skippable(pop=["skip"])
class YieldPop(Call):
    def forward(self, x):
        kept = yield pop("skip")
        return self.function(x, lambda: kept)


class Skips:
    """Makes layers that stash and pop; with ``plain``, for a model that does not use the library."""

    def __init__(self, plain):
        self.tensors = {}
        self.plain = plain
        self.namespaces = {}

    def end(self, name, skip, variant):
        function = {**STASHES, **POPS}[name]
        if self.plain and name in STASHES:
            return Call(lambda self_, x: function(x, lambda tensor: self.tensors.__setitem__(skip, tensor)))
        if self.plain:
            return Call(lambda self_, x: function(x, lambda: self.tensors.pop(skip)))
        classes = (Stash, YieldStash) if name in STASHES else (Pop, YieldPop)
        return classes[variant % 2](function).isolate(self.namespaces.setdefault(skip, Namespace()))
