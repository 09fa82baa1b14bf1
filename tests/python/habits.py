"""Habits of models and of their users, as code that test_habits.py plants in a model. It uses all imports."""

import contextlib
import copy
import functools
import linecache
import operator
import pickle
import random
import textwrap
import time
import unittest.mock
from collections import Counter, OrderedDict, deque, namedtuple
from types import SimpleNamespace

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

GLOBAL = SimpleNamespace(scale=1.0)
RATES = [1.0]
MIXED = {"act": torch.sin, "rate": 1.0}
DEFAULT = {"n": 1}
COUNTS = Counter()
TIMES = {}
Pair = namedtuple("Pair", "first second")


class Triple(torch.autograd.Function):
    """Has a wrong backward."""

    forward = staticmethod(lambda context, x: x.clone())
    backward = staticmethod(lambda context, gradient: gradient * 3)


class Slots:
    __slots__ = ("rate",)


class Text(str):
    """Has attributes."""


class Scale:
    scale = 2.0

    def get(self):
        return self.scale


class Scaled(nn.Module, Scale):
    def forward(self, x):
        return x * self.scale


def numbers(*shape, seed=1):
    return torch.randn(shape or (5, 3, 4), generator=torch.Generator().manual_seed(seed)).double()


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float)


def double_backward(module, grad_input, grad_output):
    module.backwards = getattr(module, "backwards", 0) + 1
    return tuple(None if each is None else each * 2 for each in grad_input)


STATEMENTS = {  # arguments, and the code of a model without habits
    "use": ("self, x, input", "return x"),  # in the forward of a planted module
    "init": ("self", "pass"),
    "forward": ("self, x, input=None, *, key=None", "return x + self.do.use(self, self.dense(x).sin(), input)"),
    "call": ("block, x, input", "return block(x)"),  # the model calls a block
    "before": ("self, model", "pass"),  # changes a planted module before the conversion
    "after": ("self, model", "pass"),
    "whole": ("called, loader", "pass"),  # changes the pipeline or the plain model, or returns another to call
}
EXPRESSIONS = {
    "enter": ("input", "input"),  # what the model does with its input first
    "converting": ("", "contextlib.nullcontext()"),  # a context of the conversion
    "around": ("", "contextlib.nullcontext()"),  # a context of all calls
    "quiet": ("", "torch.no_grad()"),  # a context of calls without gradients
    "example": ("", "numbers()"),  # the input of the conversion
    "batch": ("", "numbers(seed=2)"),
    "bad": ("", "None"),  # an input that the model refuses
}


def run(code, space):
    """Runs code. Tracebacks and ``inspect`` know its lines."""
    file = f"<habit {len(linecache.cache)}>"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    exec(compile(code, file, "exec"), globals(), space)


class Habit:
    """What is unusual in a model, or in what its user does with it: code as in ``STATEMENTS`` and ``EXPRESSIONS``, and
    methods of planted modules. ``guard`` is a regular expression of what a refusal may name, beside the model."""

    def __init__(self, use="", init="", *, methods="", guard="$^", **code):
        self.methods, self.guard, self.has_interface = {}, guard, bool(code.keys() & {"call", "forward"})
        run(methods, self.methods)
        code |= {"use": use, "init": init}
        for name, (arguments, usual) in (STATEMENTS | EXPRESSIONS).items():
            text, space = code.pop(name, "") or usual, {}
            text = f"return {text}" if name in EXPRESSIONS else text
            run(f"def made({arguments}):\n" + textwrap.indent(text, " "), space)
            setattr(self, name, space["made"])
        assert not code, code.keys()


H = Habit
LINEAR, NORM = "self.inner = nn.Linear(4, 4)", "self.norm = nn.BatchNorm1d(4)"
USE_NORM = "return self.norm(x.transpose(1, 2)).transpose(1, 2)"
CAST = "F.linear(x.float(), self.dense.weight.float()).double()"
WITH_INPUT = {"call": "return block(x, input)"}
LONGER = {"batch": "numbers(5, 4, 4)", "guard": "shape|size"}
AUTOCAST = {"around": "torch.autocast('cpu', torch.bfloat16)", "guard": "autocast"}
FLOAT = {"example": "numbers().float()", "guard": "dtype|float"}
STRIDES = WITH_INPUT | {"batch": "numbers(4, 3, 5).transpose(0, 2)", "guard": "contiguous|stride"}
SEED, GRAD = {"guard": "seed|random"}, {"guard": "grad"}
CHANGES = {  # before the conversion, or afterwards
    "weight_norm": "parametrizations.weight_norm(self.dense)",
    "spectral_norm": "parametrizations.spectral_norm(self.dense)",
    "old spectral_norm": "nn.utils.spectral_norm(self.dense)",
    "own parametrization": "parametrize.register_parametrization(self.dense, 'weight', nn.Tanh())",
    "prune": "prune.l1_unstructured(self.dense, 'weight', 0.3)",
    "tied parameters": "self.dense.weight = model.blocks[2].dense.weight",
    "requires_grad": "self.dense.requires_grad_(False)",
    "own forward": "old = self.forward; self.forward = lambda x: old(x) * 2",
    "forward of a child": "self.dense.forward = lambda x: x * self.dense.weight[0]",
    "adapter": "self.dense = nn.Sequential(self.dense.requires_grad_(False), nn.Linear(4, 4).double())",
    "hook of a parameter": "self.dense.weight.register_hook(lambda grad: grad * 2)",
    "forward hook": "self.register_forward_hook(lambda module, args, output: output * 2)",
    "forward hook of a child": "self.dense.register_forward_hook(lambda module, args, output: output * 2)",
    "pre-hook": "self.register_forward_pre_hook(lambda module, args: (args[0] * 2,))",
    "hook that counts": "self.register_forward_hook(lambda m, args, output: vars(m).update(n=vars(m).get('n', 0) + 1))",
    "backward hook": "self.register_full_backward_hook(double_backward)",
    "backward hook of a child": "self.dense.register_full_backward_hook(double_backward)",
    "backward pre-hook": "self.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))",
}
HABITS = {
    "": H(),
    **{f"{name}, {w}": H(guard="hook", **{w: code}) for name, code in CHANGES.items() for w in ("before", "after")},
    "global hook": H(
        around="nn.modules.module.register_module_forward_hook(lambda m, args, y: y * (1 + isinstance(m, nn.Linear)))",
        guard="hook",
    ),
    "table of hooks": H(after="self._forward_hooks = {-1: lambda module, args, output: output * 2}", guard="hook"),
    "another layer": H(after="self.dense = nn.Linear(4, 4).double()"),
    "another parameter": H(after="self.dense.weight = nn.Parameter(self.dense.weight.detach() * 2)"),
    ".data": H(after="self.dense.weight.data = self.dense.weight.data * 2"),
    # Attributes and numbers.
    "counts": H("self.calls += 1; return x * (1 + self.calls / 10)", "self.calls = 0"),
    "keeps a loss": H("self.aux = x.pow(2).mean(); return x", "self.aux = None"),
    "logs": H("self.log.append(float(x.detach().mean())); return x", "self.log = []"),
    "moves a tensor": H(
        "y = self.total; self.total = y + x.detach().mean((0, 1)); return x if self.training else x - y",
        "self.total = torch.zeros(4)",
    ),
    "caches": H("if not hasattr(self, 'cache'): self.cache = torch.arange(4.0).double()\nreturn x + self.cache"),
    "caches by size": H(
        "n = x.shape[1]; return x + self.cache.setdefault(n, torch.ones(n, 1) * n)", "self.cache = {}", **LONGER
    ),
    "number": H("return x * self.scale", "self.scale = 1.0", after="self.scale = 2.0"),
    "number of a mixin": H("return self.inner(x)", "self.inner = Scaled()", after="self.inner.scale = 5.0"),
    "global": H("return x * GLOBAL.scale", before="GLOBAL.scale = 1.0", after="GLOBAL.scale = 2.0", guard="global"),
    "global counter": H("GLOBAL.calls += 1; return x * 2", before="GLOBAL.calls = 0", guard="global"),
    "Counter of several blocks": H("COUNTS['n'] += 1; return x * 2", guard="global"),
    "time in a global": H("TIMES['at'] = time.perf_counter(); return x * 2", guard="global"),
    "number in a list of a configuration": H(
        "return x * self.config.inner.rates[0]", "self.config = SimpleNamespace(inner=SimpleNamespace(rates=[1.0]))",
        after="self.config.inner.rates[0] = 2.0",
    ),
    "number in a global list": H("return x * RATES[0]", before="RATES[0] = 1.0", after="RATES[0] = 2.0", guard="RATES"),
    "number of a method's object": H("return x * self.get()", "self.get = Scale().get", after="self.get.__self__.scale = 5.0"),
    "number of a block": H(init="self.rate = 1.0", call="return block(x) * block.rate", after="self.rate = 2.0"),
    "number that is set for a call": H(
        "return x * self.rate", "self.rate = 1.0", call="block.rate = 3.0; y = block(x); block.rate = 1.0; return y"
    ),
    "dict of several blocks": H(
        "self.box['n'] = n = self.box['n'] + 1; return x * (1 + n % 3)", "self.box = {'n': 0}",
        before="self.box = getattr(model.blocks[0], 'box', self.box)",
    ),
    "tensor in a dict of several blocks": H(
        "y = self.box['h']; self.box['h'] = x.detach()[:1]; return x + y", "self.box = {'h': torch.zeros(4).double()}",
        before="self.box = getattr(model.blocks[0], 'box', self.box)",
    ),
    "generator of several blocks": H(
        "return x * torch.rand(4, generator=self.draw)", "self.draw = torch.Generator()",
        before="self.draw = getattr(model.blocks[0], 'draw', self.draw)",
    ),
    "number of another block": H(
        "self.calls += 1; return x * (1 + (self.box[0].calls if self.box else 0) % 3)", "self.box, self.calls = [], 0",
        before="if self is not model.blocks[0] and self is not model: self.box.append(model.blocks[0])",
    ),
    "another block": H(
        "self.calls += 1; return x * (2 if self.box else 1)", "self.box, self.calls = [], 0",
        before="if self is not model.blocks[0] and self is not model: self.box.append(model.blocks[0])",
    ),
    "dict that is replaced": H(
        "self.sizes = {'n': x.shape[1]}; return x * self.sizes['n']", "self.sizes = DEFAULT", after="self.sizes = DEFAULT"
    ),
    "global that blocks pass on": H(
        "if self is GLOBAL.first: GLOBAL.passed = x.detach()\nreturn x + GLOBAL.passed",
        before="GLOBAL.first, GLOBAL.passed = model.blocks[0], 0.0", guard="global",
    ),
    "list of several blocks": H(
        "self.log.append(float(x.detach().mean())); return x", "self.log = []",
        before="self.log = getattr(model.blocks[0], 'log', self.log)",
    ),
    "attribute of a partial": H(
        "return x * self.act.rate", "self.act = functools.partial(abs); self.act.rate = 1.0", after="self.act.rate = 2.0"
    ),
    "attribute of a text": H(
        "return x * self.name.rate", "self.name = Text('a'); self.name.rate = 1.0", after="self.name.rate = 2.0"
    ),
    "deque": H("return x * self.rates[0]", "self.rates = deque([1.0])", after="self.rates[0] = 2.0"),
    "name of a configuration": H(
        "return x * len(self.config.name)", "self.config = SimpleNamespace(name='a')", after="self.config.name = 'two'"
    ),
    "attribute that comes": H("return x * (self.rate if hasattr(self, 'rate') else 1)", after="self.rate = 2.0"),
    "element of a mixed dict": H(
        "return MIXED['act'](x) * MIXED['rate']", before="MIXED['rate'] = 1.0", after="MIXED['rate'] = 2.0", guard="MIXED"
    ),
    "array": H("return x * torch.from_numpy(self.table)", "self.table = numpy.ones(4)", after="self.table *= 2"),
    "another object of a global": H(
        "return x * GLOBAL.own.scale", before="GLOBAL.own = SimpleNamespace(scale=1.0)",
        after="GLOBAL.own = SimpleNamespace(scale=3.0)", guard="global",
    ),
    "number in a list of objects": H(
        "return x * self.all[0].scale", "self.all = [Scale(), Scale()]", after="self.all[0].scale = 3.0"
    ),
    "number in a slot": H("return x * self.own.rate", "self.own = Slots(); self.own.rate = 1.0", after="self.own.rate = 2.0"),
    "number in a kind of dict": H(
        "return x * self.rates['a']", "self.rates = OrderedDict(a=1.0)", after="self.rates['a'] = 2.0"
    ),
    "attribute of the class": H("return x * self.rate", methods="rate = 2.0", after="type(self).rate = 3.0"),
    "method of the class": H(
        "return self.scaled(x)", methods="def scaled(self, x): return x * 2",
        after="type(self).scaled = lambda self, x: x * 3",
    ),
    "property": H(
        "return x * self.twice", "self.half = 2.0",
        methods="twice = property(lambda self: self.half * 2)", after="self.half = 5.0",
    ),
    "function of torch": H(
        "return F.relu(x)", around="unittest.mock.patch.object(F, 'relu', torch.sigmoid)", guard="torch"
    ),
    "number of another module": H(
        "self.drop.p = 1.0 if self.training else 0.0; return x + self.drop(x)", "self.drop = nn.Dropout(0.5)"
    ),
    "variable of a closure": H(
        "return self.act(x)", "scale = Scale(); self.act = lambda x: x * scale.scale",
        after="self.act.__closure__[0].cell_contents.scale = 3.0",
    ),
    "closure": H("return self.act(x)", "box = [2.0]; self.box = box; self.act = lambda x: x * box[0]", after="self.box[0] = 3.0"),
    "tensor in a dict": H(
        "return x * self.table['a']", "self.table = {'a': torch.full((4,), 2.0).double()}",
        after="self.table['a'] = torch.full((4,), 3.0).double()",
    ),
    "text": H("return x.sin() if self.act == 'sin' else x.cos()", "self.act = 'sin'", after="self.act = 'cos'"),
    "function": H("return self.act(x)", "self.act = torch.tanh", after="self.act = torch.sin"),
    "dropout.p": H("return x + self.drop(x)", "self.drop = nn.Dropout(0.0)", after="self.drop.p = 1.0"),
    "drop path": H(
        "return x / (1 - self.rate) if self.rate and self.training else x", "self.rate = 0.0", after="self.rate = 0.5"
    ),
    # Random numbers that do not depend on the order of the blocks.
    "random.Random": H("return x * self.draw.random()", "self.draw = random.Random(0)"),
    "numpy generator": H("return x * float(self.draw.random())", "self.draw = numpy.random.default_rng(0)"),
    "torch.Generator": H("return x * torch.rand(4, generator=self.draw)", "self.draw = torch.Generator()"),
    "seed": H("torch.manual_seed(3); return x * torch.rand(4)", **SEED),
    "seed in a fork": H(
        "with torch.random.fork_rng(devices=[]): torch.manual_seed(3); return x * torch.rand(4)", **SEED
    ),
    # Branches.
    "is_grad_enabled()": H("return x * (2 if torch.is_grad_enabled() else 1)", **GRAD),
    "requires_grad of a parameter": H(
        "return x * (2 if self.dense.weight.requires_grad else 1)", after="self.dense.requires_grad_(False)"
    ),
    "frozen for a call": H(call="block.requires_grad_(False); y = block(x); block.requires_grad_(True); return y"),
    "requires_grad read": H("return x * (2 if x.requires_grad else 1)", **GRAD),
    "input.requires_grad": H(
        "return x * (2 if input.requires_grad else 1)", batch="numbers().requires_grad_()", **WITH_INPUT, **GRAD
    ),
    "inference mode": H("return x * (2 if x.is_inference() else 1)", quiet="torch.inference_mode()", guard="inference"),
    "training": H("return x * 2 if self.training else x.sin()"),
    "dtype of a weight": H(
        "return x * (2 if self.dense.weight.dtype == torch.float else 1)", whole="called.double()", **FLOAT
    ),
    "float()": H("return x.float().sin().to(x.dtype)", after="model.double()", **FLOAT),
    "uint8 input": H(
        "return x + (input / 255 if input.dtype == torch.uint8 else input)",
        enter="input.double()", batch="numbers().mul(50).byte()", guard="dtype|uint8", **WITH_INPUT,
    ),
    "float32 input": H(
        "return x + input.double().sin().to(input.dtype)",
        enter="input.double()", batch="numbers().float()", guard="dtype|float", **WITH_INPUT,
    ),
    "is_contiguous()": H("return x * (2 if input.is_contiguous() else 1)", **STRIDES),
    "stride()": H("return x * input.stride(2)", **STRIDES),
    "device": H("return x + torch.ones(4, device=x.device, dtype=x.dtype) + x.new_zeros(x.shape[0], 1, 4)"),
    "len()": H("return x + torch.ones(len(x), 1, 4)"),
    "one sample": H("return x * 2 if x.shape[0] == 1 else x", batch="numbers(3, 3, 4)", guard="sample|batch"),
    "default dtype": H(
        "return x * 2 if torch.get_default_dtype() == torch.double else x",
        around="default_dtype(torch.double)", guard="default dtype",
    ),
    "data": H("return x * 2 if input.abs().max() > 50 else x", batch="numbers() * 100", **WITH_INPUT),
    # Autocast.
    "autocast inside": H(f"with torch.autocast('cpu', torch.bfloat16): return {CAST}"),
    "autocast": H(f"return {CAST}", **AUTOCAST),
    "no autocast inside": H(f"with torch.autocast('cpu', enabled=False): return {CAST}", **AUTOCAST),
    "is_autocast_enabled()": H("return x * (2 if torch.is_autocast_enabled('cpu') else 1)", **AUTOCAST),
    # Modes and batch norm.
    "train() merges": H(methods="""
def train(self, mode=True):
    if mode != self.training: self.dense.weight.data += 0.5 if mode else -0.5
    return nn.Module.train(self, mode)
"""),
    "train() freezes": H(
        USE_NORM, NORM, before="self.train()",
        methods="def train(self, mode=True): nn.Module.train(self, mode); self.norm.eval(); return self",
    ),
    "frozen norm": H(USE_NORM, NORM, before="self.norm.eval().requires_grad_(False)"),
    "norm.eval()": H(USE_NORM, NORM, after="self.norm.eval()"),
    "modules()": H(USE_NORM, NORM, whole="for m in called.modules(): isinstance(m, nn.BatchNorm1d) and m.eval()"),
    "norm.eval() in forward": H("self.norm.eval(); " + USE_NORM, NORM),
    "mode of another module": H(
        "return x * (2 if self.dense.training else 3)", after="self.dense.eval()", guard="modes"
    ),
    "mode by attrgetter": H(
        "return x * (2 if operator.attrgetter('training')(self.dense) else 3)", after="self.dense.eval()", guard="modes"
    ),
    "momentum": H(USE_NORM, NORM, after="self.norm.momentum = 0.7"),
    "eps": H(USE_NORM, NORM, after="self.norm.eps = 0.5"),
    "reset_running_stats()": H(
        USE_NORM, NORM, before="self.norm.running_var *= 3", after="self.norm.reset_running_stats()"
    ),
    "update_bn()": H(USE_NORM, NORM, whole="""
average = AveragedModel(called)
average.update_parameters(called)
update_bn(loader, average)
return average.module
"""),
    # Gradients.
    "no_grad()": H("with torch.no_grad(): scale = self.inner(x)\nreturn x * scale", LINEAR),
    "set_grad_enabled()": H("with torch.set_grad_enabled(self.training): y = self.inner(x)\nreturn x + y", LINEAR),
    "autograd.grad()": H("""
with torch.enable_grad():
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(self.inner(x).sin().sum(), x, create_graph=self.training)[0]
""", LINEAR),
    "own backward": H("return Triple.apply(x)"),
    "hook of a tensor": H("if x.requires_grad: x.register_hook(lambda grad: grad * 2)\nreturn x"),
    "hook of a tensor that logs": H(
        "if x.requires_grad: x.register_hook(lambda grad: self.log.append(1))\nreturn x", "self.log = []"
    ),
    "checkpoint()": H("return checkpoint(self.inner, x, use_reentrant=False)", LINEAR),
    "functional_call()": H(
        "return torch.func.functional_call(self.inner, {'bias': self.inner.weight[0]}, (x,))", LINEAR
    ),
    "vmap()": H("return torch.func.vmap(self.inner)(x)", LINEAR),
    # Parameters, buffers and state.
    "max_norm": H(
        "return x + self.words((input[:, :, 0] > 0).long())",
        "self.words = nn.Embedding(2, 4, max_norm=0.5)", **WITH_INPUT,
    ),
    "parameter in a list": H("return x * self.loose[0]", "self.loose = [nn.Parameter(torch.ones(4).double())]"),
    "writes a parameter": H(
        "self.code.data.mul_(0.9); return x * self.code.clone()", "self.code = nn.Parameter(torch.ones(4), False)"
    ),
    "parameter that comes": H(
        "return x if self.more is None else x @ self.more", "self.more = None",
        after="self.more = nn.Parameter(torch.ones(4, 4).double())",
    ),
    "parameter that goes": H(
        "return x * getattr(self, 'less', 1)", "self.less = nn.Parameter(torch.ones(4))", after="del self.less"
    ),
    "buffer that comes": H(
        "return x if self.rows is None else x + self.rows", "self.register_buffer('rows', None)", after="self.rows = torch.ones(4)"
    ),
    "part of a buffer": H("return x + self.rows[: x.shape[1]]", "self.rows = nn.Buffer(torch.randn(8, 4))", **LONGER),
    "assign=True": H(whole="called.load_state_dict({k: v * 0.5 for k, v in called.state_dict().items()}, assign=True)"),
    "replaces a buffer": H(
        "y = self.mean; self.mean = y * 0.9 + x.detach().mean((0, 1)); return x if self.training else x - y",
        "self.mean = nn.Buffer(torch.zeros(4))",
    ),
    "changes a buffer": H(
        "y = self.mean.clone(); self.mean.lerp_(x.detach().mean((0, 1)), 0.1); return x if self.training else x - y",
        "self.mean = nn.Buffer(torch.zeros(4), persistent=False)",
    ),
    "registers a buffer": H(
        "'mean' in self._buffers or self.register_buffer('mean', torch.arange(4.0)); return x + self.mean"
    ),
    "extra state": H("self.calls += 1; return x", "self.calls = 0", methods="""
def get_extra_state(self): return {'calls': self.calls}
def set_extra_state(self, state): self.calls = state['calls'] + 10
""", whole="called.load_state_dict(called.state_dict())"),
    "old names": H("return x + self.new", "self.new = nn.Parameter(torch.zeros(4))", methods="""
def _load_from_state_dict(self, state, prefix, *others):
    if f'{prefix}old' in state: state[f'{prefix}new'] = state.pop(f'{prefix}old')
    nn.Module._load_from_state_dict(self, state, prefix, *others)
""", whole="called.load_state_dict({k.replace('new', 'old'): v + 1 for k, v in called.state_dict().items()})"),
    "hook of a state": H(
        "return x + self.mean", "self.mean = nn.Buffer(torch.ones(4), persistent=False)",
        before="self.register_state_dict_post_hook(lambda m, state, path, _: state.update({path + 'mean': m.mean}))",
        whole="called.load_state_dict(called.state_dict(), strict=False)",
    ),
    "pickle": H(whole="return pickle.loads(pickle.dumps(called))"),
    "deepcopy": H(whole="return copy.deepcopy(called)"),
    "apply()": H(whole="called.apply(lambda m: isinstance(m, nn.Linear) and nn.init.constant_(m.bias, 0.5))"),
    "get_submodule()": H(
        "return x + F.dropout(x, 1.0, self.training)", whole="called.get_submodule('blocks.1').eval()"
    ),
    "get_parameter()": H(whole="called.get_parameter('blocks.1.dense.bias').requires_grad_(False)"),
    # Checks of data and sizes.
    "assert": H("assert input.max() < 1000\nreturn x", bad="numbers() * 1e6", **WITH_INPUT),
    "_assert_async()": H("torch._assert_async((input < 1000).all()); return x", bad="numbers() * 1e6", **WITH_INPUT),
    "_check_tensor_all()": H("torch._check_tensor_all(input < 1000); return x", bad="numbers() * 1e6", **WITH_INPUT),
    "raise": H("if x.shape[1] > 3: raise ValueError('too long')\nreturn x", bad="numbers(5, 4, 4)"),
    "//": H("n = x.shape[1]; return x * ((1 - n) // 2) + x * (n // 2)", **LONGER),
    "**": H("n = x.shape[1]; return x * (n - 5) ** 3 / n**2", **LONGER),
    # Changes in place.
    "changes a view": H("y = x * 1; y[:, :, 1:].mul_(2); y.transpose(1, 2)[:, 0].add_(1); return y"),
    "changes its input": H(forward="x.mul_(2); return x + self.dense(x).sin()", call="return block(x) + x"),
    # Interfaces of blocks.
    "returns its input": H(forward="return x"),
    "returns a view": H(forward="return x[:, :, 1:]", call="return torch.cat([block(x), x[:, :, :1]], 2)"),
    "returns a dict": H(forward="return {'x': self.dense(x).sin(), 'none': None}", call="return x + block(x)['x']"),
    "returns a named tuple": H(
        forward="return Pair(self.dense(x).sin(), [x])", call="y = block(x); return y.first + y.second[0]"
    ),
    "another structure by a hook": H(
        call="y = block(x); return y[0] + y[1] if isinstance(y, tuple) else y",
        after="self is model or self.register_forward_hook(lambda module, args, output: (output, output))",
    ),
    "returns None": H(forward="self.norm = float(x.detach().norm())", call="block(x); return x"),
    "takes a keyword": H(
        forward="return x + self.dense(x).sin() * (1 if key is None else key)", call="return block(x, key=input)"
    ),
    "takes a dict": H(
        forward="return x['x'] + self.dense(x['y'][0]).sin()", call="return block({'x': x, 'y': [input, None]})"
    ),
    "takes a mask": H(
        forward="return x + self.dense(x).masked_fill(input, 0)", call="return block(x, input[:, :, :1] > 0)"
    ),
    "called twice": H(call="return block(block(x))"),
    "another method": H(methods="def attend(self, x): return x + self.dense(x).sin()", call="return block.attend(x)"),
    "two names": H(
        "return self.other(x)", "self.other = self.dense", after="self.other = nn.Linear(4, 4).double()", guard="other"
    ),
    "part of a block": H(call="return x + block.dense(x).sin()"),
    "shared block": H(before="model.blocks[2] = model.blocks[0]"),
    "shared child": H(before="self.dense = model.blocks[0].dense"),
    "default tensor": H(
        methods="def forward(self, x, scale=torch.full((4,), 2.0)): return x + self.dense(x).sin() * scale",
        call="return block(x)",
    ),
    # Conversions.
    "converted under no_grad()": H(
        "with torch.no_grad(): y = self.inner(x)\nreturn x * y", LINEAR, converting="torch.no_grad()"
    ),
    "converted in inference mode": H("return x * self.inner(x)", LINEAR, converting="torch.inference_mode()"),
    "converted under autocast": H(f"return {CAST}", converting="torch.autocast('cpu', torch.bfloat16)"),
    "converted with a default dtype": H("return x + torch.ones(4) / 3", converting="default_dtype(torch.double)"),
    "converted in evaluation mode": H(USE_NORM, NORM, before="model.eval()", whole="called.train()"),
    "called before": H(
        "n = x.shape[1]; return x + self.cache.setdefault(n, torch.ones(n, 1) * n)", "self.cache = {}",
        before="model(numbers(2, 3, 4))", **LONGER,
    ),
    # Kinds of modules.
    "ModuleDict": H(
        "for key in reversed(list(self.table)): x = self.table[key](x)\nreturn x",
        "self.table = nn.ModuleDict({'b': nn.Linear(4, 4), 'a': nn.Tanh()})",
    ),
    "longer list": H(
        "return sum(each(x) for each in self.members)", "self.members = nn.ModuleList([nn.Linear(4, 4)])",
        after="self.members.append(nn.Linear(4, 4).double())",
    ),
    "script": H("return self.inner(x)", "self.inner = torch.jit.script(nn.Linear(4, 4))"),
    "compile": H("return self.inner(x)", "self.inner = torch.compile(nn.Linear(4, 4), backend='eager')"),
    # Layers that look along other dimensions.
    "LSTM": H("return self.inner(x)[0]", "self.inner = nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True)", **LONGER),
    "GRU": H("y, last = self.inner(x.transpose(0, 1)); return (y + last[:1]).transpose(0, 1)", "self.inner = nn.GRU(4, 4)", **LONGER),
    "causal mask": H(
        "mask = nn.Transformer.generate_square_subsequent_mask(len(x[0]), dtype=x.dtype); return self.inner(x, src_mask=mask)",
        "self.inner = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)", **LONGER,
    ),
    "batch second": H(
        forward="return x + self.dense(x).sin().cumsum(0)", call="return block(x.transpose(0, 1)).transpose(0, 1)", **LONGER
    ),
    "transpose_()": H("y = x.clone(); y.transpose_(1, 2); return x + y.sum((1, 2))[:, None, None] * x.shape[1]", **LONGER),
    "takes a bool": H(forward="return x + self.dense(x).sin() * (2 if input else 1)", call="return block(x, True)"),
    "partial": H(
        "return self.act(x)", "self.act = functools.partial(lambda rates, x: x * rates[0], [2.0])",
        after="self.act.args[0][0] = 3.0",
    ),
}
