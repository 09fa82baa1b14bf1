"""Finds the blocks of a model: submodules that are kept whole, each as one layer that calls it.

A block becomes one operator of the export. To learn the shapes of its outputs, the export runs it on fake tensors.
"""

import functools
import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten, treespec_dumps, treespec_loads

from gpipe.exported.exporter import NotExported, first_line
from gpipe.exported.read import Read

OPERATOR = "gpipe_export::whole"
_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict
_OF_OTHERS = {"torch", "gpipe", *sys.stdlib_module_names}  # whose code reads nothing that a model sets
_CONSTANTS = bool, int, float, str, type(None)


Shapes = list[torch.Size]


@dataclass
class Calls:
    """What plain runs of a model did."""

    counts: list[Counter[nn.Module]] = field(default_factory=list)  # calls of each module, by run
    outputs: dict[Any, Any] = field(default_factory=dict)  # of the last call in each mode, without gradients; see _key()
    given: dict[nn.Module, tuple[list[bool], TreeSpec]] = field(default_factory=dict)  # which of its arguments were tensors
    shapes: dict[nn.Module, tuple[Shapes, Shapes]] = field(default_factory=dict)  # of the tensors that it took and gave
    fewer: dict[nn.Module, tuple[Shapes, Shapes]] = field(default_factory=dict)  # the same, of a run with fewer samples
    changed: dict[nn.Module, list[int]] = field(default_factory=dict)  # numbers of the tensors that a call changed in place
    unfit: set[nn.Module] = field(default_factory=set)  # modules that took or gave something else than tensors
    without_values: bool = False  # whether modules returned random numbers
    read: dict[nn.Module, Read] = field(default_factory=dict)  # by the code of a module, outside its submodules
    of_mode: dict[nn.Module, bool] = field(default_factory=dict)  # whether code that is not PyTorch's may read it
    own_backwards: set[nn.Module] = field(default_factory=set)  # modules whose code calls a torch.autograd.Function
    callers: list[nn.Module] = field(default_factory=list)  # the modules that run in a recorded run, the innermost last
    sees_code: bool = True  # whether ``read`` is complete

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Records the calls of a model's submodules in a block."""
        self.counts.append(Counter())
        running: list[tuple[list[tuple[Tensor, int]], Shapes]] = []
        self.callers = callers = [module]
        tensors_of = {each: _tensors_of(each) for each in module.modules()}
        replaced: set[nn.Module] = set()

        def begin(each: nn.Module, args: Any, kwargs: Any) -> None:
            leaves, spec = tree_flatten((args, kwargs))
            self.given.setdefault(each, ([isinstance(leaf, Tensor) for leaf in leaves], spec))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            under_vmap = torch._C._functorch.maybe_current_level() is not None
            if each in tensors_of and _tensors_of(each) != tensors_of[each]:
                replaced.add(each)
            if under_vmap or not tensors or not all(type(leaf) is Tensor or isinstance(leaf, _CONSTANTS) for leaf in leaves):
                self.unfit.add(each)
            running.append(([(tensor, _version(tensor)) for tensor in tensors], _shapes(tensors)))
            callers.append(each)

        def end(each: nn.Module, args: Any, output: Any) -> None:
            self.counts[-1][each] += 1
            leaves = tree_leaves(output)
            if not any(isinstance(leaf, Tensor) for leaf in leaves):
                self.unfit.add(each)
            if not all(leaf is None or type(leaf) is Tensor or isinstance(leaf, nn.Parameter) for leaf in leaves):
                self.unfit.add(each)
            self.outputs[_key(each)] = recorded = tree_map_only(Tensor, Tensor.detach, output)
            self.outputs.setdefault(each, recorded)
            versions, taken = running.pop()
            callers.pop()
            self.shapes.setdefault(each, (taken, _shapes(leaves)))
            changed = [number for number, (tensor, before) in enumerate(versions) if _version(tensor) != before]
            self.changed[each] = sorted({*self.changed.get(each, ()), *changed})

        with ExitStack() as hooks:
            for each in module.modules():
                if each is not module and not isinstance(each, torch.jit.ScriptModule):
                    hooks.enter_context(each.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                    hooks.enter_context(each.register_forward_hook(end))
            yield
        # For a call only: by torch.func.functional_call(), or frozen.
        self.unfit |= {each for each in replaced if _tensors_of(each) == tensors_of[each]}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Notes what code reads that runs in a block, in which calls are recorded."""

        def note(frame: FrameType, event: str, argument: object) -> None:
            file = str(frame.f_globals.get("__name__"))
            if event == "c_call" and isinstance(kind := getattr(argument, "__self__", None), type) and issubclass(kind, Function):
                self.own_backwards.add(self.callers[-1])
            if event != "call":
                return
            if is_own := file.partition(".")[0] not in _OF_OTHERS:
                self.read.setdefault(self.callers[-1], Read(set(), set())).add(frame.f_code, file)
            of_modules = file.startswith("torch.nn.modules.") and file != nn.Module.__module__
            # Code may call forward() itself, or getattr().
            if (is_own or of_modules) and not {"training", "forward"}.isdisjoint((*frame.f_code.co_names, *frame.f_code.co_consts)):
                self.of_mode[self.callers[-1]] = is_own or self.of_mode.get(self.callers[-1], False)

        self.sees_code = sys.getprofile() is None
        if self.sees_code:
            sys.setprofile(note)
        try:
            yield
        finally:
            if self.sees_code:
                sys.setprofile(None)

    @contextmanager
    def replayed(
        self, blocks: Iterable[nn.Module], dtype: torch.dtype | None = None, *, given: bool = False
    ) -> Iterator[list[Tensor]]:
        """Makes calls of some modules cheap for a block of code: they return what they returned in a recorded run in the present
        mode, plus a number that depends on all tensors that they get; with ``given``, on those that they got in that run too.
        Floating-point outputs are of a ``dtype``, if one is given. Gives the block a tensor per module that trains, to which its
        outputs' gradients flow."""
        trained = {each: torch.zeros((), requires_grad=True) for each in blocks if any(p.requires_grad for p in each.parameters())}

        def call(each: nn.Module, *args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if given and len(leaves) == len(self.given[each][0]):
                leaves = [*itertools.compress(leaves, self.given[each][0])]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            number = sum((index + 1) * _sum(tensor) for index, tensor in enumerate(tensors)) + trained.get(each, 0)
            shapes = iter(self.shapes_for(each, tensors))

            def recalled(recorded: Tensor) -> Tensor:
                recorded = recorded[tuple(map(slice, next(shapes)))]
                return (recorded + number).to(dtype or recorded.dtype) if recorded.is_floating_point() else recorded.clone()

            return tree_map_only(Tensor, recalled, self.outputs.get(_key(each), self.outputs[each]))

        with ExitStack() as stack:
            for each in blocks:
                stack.enter_context(patch.object(each, "_compiled_call_impl", functools.partial(call, each)))
            yield list(trained.values())

    def shapes_for(self, each: nn.Module, inputs: list[Tensor]) -> list[list[int]]:
        """Returns the shapes of the tensors that a module gives for inputs with another number of samples than in the recorded
        run. Which sizes change with it is known from a run with fewer samples, else only dimension 0 does."""
        (taken, given) = self.shapes[each]
        samples = next(iter(taken[0]), 0)
        fewer = [[torch.Size((0, *shape[1:])) if shape[:1] == (samples,) else shape for shape in shapes] for shapes in (taken, given)]
        few_taken, few_given = self.fewer.get(each, fewer)
        sizes = zip(*map(itertools.chain.from_iterable, ([each.shape for each in inputs], taken, few_taken)))
        now, size, few = next((sizes for sizes in sizes if sizes[1] != sizes[2]), (1, 1, 1))

        def shape_for(shape: torch.Size, few_shape: torch.Size) -> list[int]:
            return [now * a // size if a != b and a * few == b * size else a for a, b in zip(shape, few_shape)]

        return [shape_for(a, b if len(a) == len(b) else a) for a, b in zip(given, few_given)]

    def read_by(self, modules: Iterable[nn.Module]) -> Read:
        """Returns what the code of some modules reads, outside their submodules."""
        found = [self.read[each] for each in modules if each in self.read]
        return Read(*(set().union(*each) for each in zip(*found))) if found else Read(set(), set())

    def reads_mode(self, each: nn.Module) -> bool:
        """Returns whether the code of a module, outside its submodules, may depend on a mode."""
        own_train = type(each).train is not nn.Module.train or isinstance(each, torch.jit.ScriptModule)
        return not self.sees_code or own_train or each in self.of_mode

    def may_depend_on_mode(self, module: nn.Module) -> bool:
        """Returns whether a model may call or compute something else in training mode than in evaluation mode, besides the values
        and gradients of batch norm and dropout."""

        def is_known(each: nn.Module) -> bool:
            return isinstance(each, (_BatchNorm, _DropoutNd)) and not (self.of_mode.get(each) or getattr(each, "inplace", False))

        return any(self.reads_mode(each) and not is_known(each) for each in module.modules())

    def can_be_block(self, each: nn.Module) -> bool:
        """Returns whether a run calls a module at most once, with tensors, and gets tensors."""
        if each in self.unfit or each not in self.outputs or any(run[each] > 1 for run in self.counts):
            return False
        try:
            treespec_loads(treespec_dumps(self.given[each][1]))
        except Exception:  # a class that pytree cannot write
            self.unfit.add(each)
        return each not in self.unfit

    def blocks(self, module: nn.Module, whole: Iterable[nn.Module]) -> dict[str, nn.Module]:
        """Returns the blocks of a model by path: modules in ``whole``; modules of a class that the model has more than once,
        without a container of such modules or another of its class inside; and modules that call no other module."""
        kinds = Counter(type(each) for each in self.outputs)
        given = set(whole)
        found: dict[str, nn.Module] = {}

        def calls_others(each: nn.Module) -> bool:
            return any(inner in self.outputs for inner in each.modules() if inner is not each)

        def has_more(each: nn.Module) -> bool:
            for container in each.modules():
                if container is not each and type(container) is type(each) and container in self.outputs:
                    return True
                children = container.children() if isinstance(container, _CONTAINERS) else ()
                inner = [type(child) for child in children if child in self.outputs and calls_others(child)]
                if max(Counter(kind for kind in inner if not issubclass(kind, _CONTAINERS)).values(), default=0) > 1:
                    return True
            return False

        def visit(path: str, each: nn.Module) -> None:
            for name, child in each.named_children():
                at = f"{path}.{name}" if path else name
                repeated = type(child) is not nn.Sequential and kinds[type(child)] > 1 and not has_more(child)
                if child in found.values():
                    continue
                if child in given or (self.can_be_block(child) and (repeated or not calls_others(child))):
                    found[at] = child
                else:
                    visit(at, child)

        visit("", module)
        return found


def _key(module: nn.Module) -> Any:
    """Returns what stands for a module in its mode and under the present autocast."""
    return module, module.training, *map(autocast_dtype, ("cpu", "cuda"))


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Returns the type that operators on a kind of device compute in under autocast; ``None`` without autocast."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _tensors_of(module: nn.Module) -> list[tuple[int, bool]]:
    return [(id(tensor), tensor.requires_grad) for tensor in (*module.parameters(), *module.buffers())]


def _shapes(leaves: Iterable[Any]) -> Shapes:
    return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]


_KINDS = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]


def _sum(tensor: Tensor) -> Tensor:
    """Returns a number that depends on a tensor's type, and on a sample of its elements and their order."""
    elements = tensor.reshape(-1)
    elements = elements[:: max(1, len(elements) // 1000)]
    elements = (elements.abs() if elements.is_complex() else elements).to(torch.get_default_dtype())
    return (elements * torch.linspace(1, 2, len(elements), device=elements.device)).mean() / 16 + _KINDS.index(tensor.dtype)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Tracing(threading.local):
    """What the operator's fake implementation needs on the thread of an export."""

    blocks: Mapping[str, nn.Module]
    calls: Calls
    runs: bool  # whether blocks run on fake tensors
    any_shape: bool  # whether other sizes than the number of samples are symbols
    output: tuple[list[bool], TreeSpec]  # of the last call: which leaves are tensors


_tracing = _Tracing()


@contextmanager
def kept_whole(blocks: Mapping[str, nn.Module], calls: Calls, *, any_shape: bool, runs: bool) -> Iterator[None]:
    """Makes each call of the ``blocks``, by path, one operator while this thread runs a ``with`` block. ``calls`` was recorded
    in a plain run. ``runs``: whether blocks run on fake tensors, which shows the sizes of their outputs. With ``any_shape``,
    a block that cannot raises NotExported; else only the number of samples may change."""
    _tracing.blocks, _tracing.calls = blocks, calls
    _tracing.any_shape, _tracing.runs = any_shape, runs
    with ExitStack() as stack:
        stack.callback(vars(_tracing).clear)
        for path, block in blocks.items():
            call = functools.partial(_call, path, calls.changed.get(block, []))
            # With this attribute, nn.Module calls neither forward() nor hooks.
            stack.enter_context(patch.object(block, "_compiled_call_impl", call))
        yield


def _call(path: str, changed: list[int], *args: Any, **kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    kinds = ["tensor" if isinstance(leaf, Tensor) else "size" if isinstance(leaf, torch.SymInt) else [leaf] for leaf in leaves]
    block, outputs = _tracing.blocks[path], _tracing.calls.outputs
    try:
        call = json.dumps([path, treespec_dumps(spec), kinds, changed, _parts(outputs.get(_key(block), outputs[block]))[1]])
    except (TypeError, NotImplementedError):
        kind = type(block).__name__
        raise ValueError(f"a module that is kept whole must get tensors, numbers, texts and None, but {kind} does not") from None
    results = iter(_operator()(tensors, numbers, call))
    are_tensors, result_spec = _tracing.output
    return tree_unflatten([next(results) if is_tensor else None for is_tensor in are_tensors], result_spec)


@functools.cache
def _operator() -> Any:
    torch.library.define(OPERATOR, "(Tensor[] inputs, SymInt[] sizes, str call) -> Tensor[]")
    torch.library.register_fake(OPERATOR, _fake)
    return torch.ops.gpipe_export.whole.default


def _fake(inputs: list[Tensor], sizes: list[int], call: str) -> list[Tensor]:
    leaves, spec = tree_flatten(_fake_output(_tracing.blocks[parsed(call).path], inputs, sizes, call))
    _tracing.output = [isinstance(leaf, Tensor) for leaf in leaves], spec
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in tensors]


def _fake_output(block: nn.Module, inputs: list[Tensor], sizes: list[int], call: str) -> Any:
    """Returns what a block gives, as fake tensors."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes a second, so only here

    args, kwargs = parsed(call).arguments(inputs, sizes)
    environment: Any = next((each.fake_mode.shape_env for each in inputs if isinstance(each, FakeTensor)), None)

    def unknown(leaves: Any) -> set[Any]:
        return {symbol for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor) for symbol in free_unbacked_symbols(leaf)}

    try:
        if not _tracing.runs:
            raise ValueError("blocks do not run")
        # Without torch functions and the tracer's calls of modules, because nothing inside is recorded.
        quietly = environment.ignore_fresh_unbacked_symbols() if environment else nullcontext()
        plainly = patch.object(nn.Module, "__call__", nn.Module._wrapped_call_impl)
        with torch.random.fork_rng([]), quietly, plainly, torch._C.DisableTorchFunction(), _sizes_only(block):
            output = block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not unknown(output) <= unknown(inputs):
            raise ValueError("the sizes of its output depend on data")
        return output
    except Exception as error:  # it does what fake tensors cannot; then only the number of samples may change
        if _tracing.any_shape or unknown(inputs):
            raise NotExported(f"cannot convert the model for any sizes: {first_line(error)}") from error
        shapes = iter(_tracing.calls.shapes_for(block, inputs))
        return tree_map_only(
            Tensor, lambda each: inputs[0].new_empty(next(shapes), dtype=each.dtype), _tracing.calls.outputs[block]
        )


@contextmanager
def _sizes_only(block: nn.Module) -> Iterator[None]:
    """Makes modules of PyTorch in a block, whose code fixes sizes, reads values or takes long, run on fake tensors in a block of
    code."""
    with ExitStack() as stack:
        # Whether a mask is causal decides about no size.
        stack.enter_context(patch("torch.nn.modules.transformer._detect_is_causal_mask", lambda *args: False))
        for each in block.modules():
            if getattr(type(each), "forward", None) is _BatchNorm.forward:  # whose operator takes long on fake tensors
                stack.enter_context(patch.object(each, "forward", lambda input: input))
            if isinstance(each, nn.RNNBase) and each in _tracing.calls.outputs:
                stack.enter_context(patch.object(each, "forward", functools.partial(_recurrent, each)))
        yield


def _recurrent(module: nn.RNNBase, input: Tensor, state: Any = None) -> Any:
    """Returns what a recurrent module does, on fake tensors: its own operators would fix the length to that of the example."""
    recorded, states = _tracing.calls.outputs[module]
    batch, is_transposed = 0 if module.batch_first else 1, module.batch_first and not recorded.is_contiguous()
    sizes = input.transpose(0, 1).shape if is_transposed else input.shape
    output = input.new_empty((*sizes[:2], recorded.shape[2]), dtype=recorded.dtype)

    def state_like(each: Tensor) -> Tensor:
        return input.new_empty((each.shape[0], input.shape[batch], each.shape[2]), dtype=each.dtype)

    return output.transpose(0, 1) if is_transposed else output, tree_map_only(Tensor, state_like, states)


class Parsed(NamedTuple):
    """The text of a call: a module's path, the structure and kinds of its arguments, which tensors it changes, and the structure
    of its output."""

    path: str
    spec: TreeSpec
    kinds: list[Any]
    changed: list[int]
    output: str

    def arguments(self, inputs: list[Tensor], sizes: list[int]) -> Any:
        tensors, numbers = iter(inputs), iter(sizes)
        leaves = [each[0] if isinstance(each, list) else next(tensors if each == "tensor" else numbers) for each in self.kinds]
        return tree_unflatten(leaves, self.spec)


@functools.cache
def parsed(call: str) -> Parsed:
    path, spec, *others = json.loads(call)
    return Parsed(path, treespec_loads(spec), *others)


def _parts(output: Any) -> tuple[list[Tensor], str]:
    """Returns the tensors of an output, and a text that tells its structure."""
    leaves, spec = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, f"{[isinstance(leaf, Tensor) for leaf in leaves]} {spec}"


def run_whole(block: nn.Module, call: str, inputs: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Calls a module as the operator was called. Returns the tensors of its output. Raises RuntimeError for another structure of
    the output than in the conversion, which a hook may make."""
    known = parsed(call)
    args, kwargs = known.arguments(inputs, sizes)
    tensors, structure = _parts(block(*args, **kwargs))
    if structure != known.output:
        raise RuntimeError(
            f"'{known.path}' ({type(block).__name__}) returns another structure of tensors than in the conversion; change the "
            "model first, then convert it and make the pipeline"
        )
    return tensors
