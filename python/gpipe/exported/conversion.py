"""Turns any module into a sequence of layers."""

import inspect
import os
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, enable_grad, inference_mode, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from gpipe.checks import check_is, shown
from gpipe.exported.blocks import Calls
from gpipe.exported.capture import capture, examples_of, refuse_modules, refuse_shared_state
from gpipe.exported.exporter import NotExported, first_line, is_inside, mode, unchanged, whole_modules
from gpipe.exported.graph import Graph, Value
from gpipe.exported.guards import Guards, changes_in
from gpipe.exported.layer import Description, ExportedLayer
from gpipe.exported.layers import Route, divide
from gpipe.exported.pretended import is_on_meta, pretend, real_like, refuse_loose, shapes_only
from gpipe.exported.read import Read
from gpipe.exported.sizes import Sizes
from gpipe.exported.twins import Twins, copy_of, prove_batch
from gpipe.wrapper import ConvertedSequence, batch_first


_lock = threading.RLock()  # torch.export is not thread-safe


def to_sequential(
    module: nn.Module,
    /,
    *example_args: Any,
    opaque: Iterable[type[nn.Module]] = (),
    native: bool = False,
    batch_dim: int = 0,
    **example_kwargs: Any,
) -> nn.Sequential:
    """Converts a module to a sequence of layers that computes the same. Its layers take and return tensors. A value that a
    later layer than the next uses becomes a skip.

        model = gpipe.to_sequential(torchvision.models.resnet50(), images)
        pipe = gpipe.GPipe(model, balance, chunks=8)

    A *block* is a submodule that a forward calls once, with tensors: one of a class that the model has several times, such
    as the layers of a transformer, else one without submodules of its own. Its layer calls the module itself, so its code,
    hooks, attributes and state are used as they are then. The code between blocks is exported by :func:`torch.export.export`
    and belongs to the layer before it. Calls refuse what has changed there since the conversion.

    Args:
        module: the model. The sequence has its children, parameters, buffers and modes. A converted sequence stays as it is.
        example_args, example_kwargs: an input of the module. Dimension 0 of each tensor is the batch. The sequence takes
            batches of any size, and the other sizes that the module's code takes; those of images from 2. It takes one input:
            the only argument, else the tuple of positional arguments, the dict of keyword arguments, or a tuple of both. Arguments
            without tensors become constants: leave keyword arguments out, and give ``None`` for the others.
        opaque: classes of submodules to keep whole, each call as one layer.
        native: whether to export every module that can be, except ``opaque`` ones, so that layers run without Python, and C++
            can load the model: see :func:`gpipe.export_model`. ``report()`` of the sequence tells which cannot. Freeze modules
            before: calls refuse other modes of modules than when the model was converted.
        batch_dim: the dimension of all inputs and outputs that is the batch: 0, or 1 for a model whose sequences come first.
            Pipelines cut inputs, targets and outputs along it.

    Runs the module on a few samples, to see what it calls and whether the sequence does the same. Leaves it unchanged. Raises
    ValueError, with the part and the reason, if the module cannot be converted.
    """
    if isinstance(module, ConvertedSequence):
        return module
    check_is(module, "module", nn.Module, "nn.Module", "nn.Sequential(*layers) makes one of layers")
    arguments = example_args, example_kwargs
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(arguments)):
        given = f"to_sequential(module, input) or from_module(module, input), but not {shown(example_kwargs or example_args)}"
        raise ValueError(f"give an example input, with tensors: {given}")
    if batch_dim not in (0, 1) or isinstance(batch_dim, bool):
        raise ValueError(f"batch_dim must be 0 or 1, but is {batch_dim!r}")
    whole = whole_modules(module, opaque)
    on_meta = is_on_meta(module)
    plain = patch.object(module, "_compiled_call_impl", None)  # else comparisons would compile the model
    with _lock, plain, inference_mode(False), enable_grad(), unchanged(module.modules(), values=True):
        refuse_modules({"": module}, ())
        if on_meta:
            refuse_loose(module)
            pretend(module)
        forward = module.forward

        def transposed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = batch_first((args, kwargs), 1)
            return batch_first(forward(*args, **kwargs), 1)

        transposed.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        with patch.object(module, "forward", transposed) if batch_dim else nullcontext():
            sequence, guards = _converted(module, batch_first(arguments, batch_dim), whole, native, batch_dim, on_meta)
    sequence.follow_model()
    sequence.__dict__.update(batch_dim=batch_dim, guards=guards())
    return sequence


def _converted(
    module: nn.Module, arguments: Any, whole: Mapping[str, nn.Module], native: bool, batch_dim: int, on_meta: bool
) -> tuple[ConvertedSequence, Callable[[], Guards]]:
    """Returns the sequence of a model, and what makes its guards."""
    examples = tree_map_only(Tensor, real_like, examples_of(arguments, batch_dim)) if on_meta else examples_of(arguments, batch_dim)
    computes = partial(shapes_only, module) if on_meta else nullcontext

    def runs(given: Any) -> Calls:
        with computes():
            return _plain_runs(module, given)[0]

    with computes():
        few, calls, effects = _few_samples(module, examples, batch_dim, on_meta)
    blocks = dict(whole) if native else calls.blocks(module, whole.values())
    refused: dict[str, str] = {}
    both = False  # whether evaluation mode has a graph of its own in any case
    modes: tuple[bool, ...] = ()
    ways = iter(({"any_shape": True, "runs": True}, {"any_shape": False, "runs": True}, {"any_shape": False, "runs": False}))
    way = next(ways)
    while True:
        try:
            exported = {path: each for path, each in module.named_modules() if not is_inside(path, blocks)}
            refuse_modules(exported, effects)
            modes = (True, False) if both or any(map(calls.reads_mode, exported.values())) else (True,)
            graphs, tensors = capture(module, examples, blocks, calls, batch_dim, modes, **way)
            sequence, for_one = _assemble(graphs, tensors, blocks, module)
            read = calls.read_by(exported.values())
            twins_of = partial(Twins, module, partial(_run, sequence), exported, blocks.values(), read, modes)
            twins = twins_of(few, calls)
            try:
                twins.compare()
            except ValueError as error:
                if few is examples or "the model was converted for inputs with" not in str(error):
                    raise
                twins = twins_of(examples, runs(examples))
                twins.compare()
            break
        except ValueError as error:
            at = getattr(error, "path", "")
            at = at or next((path for path, each in exported.items() if each in calls.own_backwards), "")
            if path := _innermost(module, at, calls):
                blocks = {each: block for each, block in blocks.items() if not is_inside(each, [path])}
                blocks[path] = module.get_submodule(path)
                refused[path] = str(error).removeprefix("cannot convert the model: ").partition("; to keep each")[0]
                if not getattr(error, "path", ""):
                    kind = type(blocks[path]).__name__
                    refused[path] = f"'{path}' ({kind}) calls a torch.autograd.Function with its own backward"
            elif len(modes) == 1 and not isinstance(error, NotExported):
                both = True
            elif (other := next(ways, None)) is not None:
                way = other
            else:
                if few is not examples:
                    runs(examples)  # which may tell more
                if at and module.get_submodule(at) in calls.unfit:
                    text = str(error).partition("; to keep each")[0]
                    raise NotExported(f"{text}{_UNFIT}", at) from error
                raise
    shared = () if on_meta else sorted(effects)  # modules on meta return random numbers, which tell nothing
    refuse_shared_state(sequence, input_of(*few), calls.read_by(module.modules()), shared)
    tested = twins.tested()
    dtypes = [leaf.dtype for leaf in tree_leaves(input_of(*few)) if isinstance(leaf, Tensor)]
    sequence.__dict__["refused"] = refused
    first, strict = sequence[0], sequence[0].description
    first.describe(for_one)
    if not twins.agree(tree_map_only(Tensor, partial(_first, 1), few)):  # an export takes for granted that there are more
        first.describe(strict)
    guards = partial(Guards, module, exported, dtypes, tested, read, effects)
    return sequence, partial(guards, *_deciding(module, exported, calls, modes))


def _few_samples(module: nn.Module, examples: Any, batch_dim: int, on_meta: bool) -> tuple[Any, Calls, set[tuple[str, str]]]:
    """Runs a model on a few samples, and proves that dimension 0 is the batch. Returns the samples, and what the model calls and
    changes."""
    for samples in (2, 4, None):  # some code needs more, or treats one sample differently
        few = tree_map_only(Tensor, partial(_first, samples), examples)
        try:
            calls, effects, output = _plain_runs(module, few)
            calls.without_values = on_meta
            changes = changes_in({}, calls.read_by(module.modules()))
            fits = prove_batch(module, few, output, calls, batch_dim)
            effects |= changes()
            if fits:
                break
        except ValueError:
            if samples is None:
                raise
    return few, calls, effects


def _innermost(module: nn.Module, at: str, calls: Calls) -> str:
    """Returns the path of what to keep whole in the place of a module whose code cannot be exported: itself if that is possible,
    else the innermost one around it; an empty text if there is none."""
    names = at.split(".")
    outer = [".".join(names[:end]) for end in range(len(names), 0, -1)] if at else []
    return next((each for each in outer if calls.can_be_block(module.get_submodule(each))), "")


def _deciding(
    module: nn.Module, exported: Mapping[str, nn.Module], calls: Calls, modes: tuple[bool, ...]
) -> tuple[list[nn.Module], list[list[bool]]]:
    """Returns the modules whose modes decide what the graphs compute, and these modes in each graph."""
    unknown = not any(map(calls.reads_mode, exported.values()))  # then only the comparison found a difference
    of_any = unknown or any(calls.of_mode.get(each) for each in exported.values())  # own code may read the mode of any module
    deciding = [each for each in exported.values() if len(modes) > 1 and (of_any or calls.reads_mode(each))]
    decided = []
    for training in modes:
        with mode(module, training):
            decided.append([each.training for each in deciding])
    return deciding, decided


def _first(samples: int | None, tensor: Tensor) -> Tensor:
    return tensor[:samples]


def _run(sequence: nn.Sequential, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return sequence(input_of(args, kwargs))


def _plain_runs(module: nn.Module, arguments: Any) -> tuple[Calls, set[tuple[str, str]], Any]:
    """Runs a model in evaluation mode, and in training mode if that may differ. Returns what it calls, what forwards change in
    modules, and the output in evaluation mode."""
    calls, output = Calls(), None
    effects: set[tuple[str, str]] = set()
    try:
        for training in (False, True):
            if training and not calls.may_depend_on_mode(module):
                break
            with mode(module, training), unchanged(module.modules()):
                args, kwargs = tree_map_only(Tensor, copy_of, arguments)
                changes = changes_in(dict(module.named_modules()), Read(set(), set()))
                with calls.recorded(module), calls.reading():
                    result = tree_map_only(Tensor, Tensor.detach, module(*args, **kwargs))
                output = result if not training else output
                effects |= changes()
    except Exception as error:
        given = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        text = f"cannot convert the model ({type(module).__name__}), because it fails on this input ({given}): {first_line(error)}"
        if "argument" in text or (any(isinstance(arg, Mapping) for arg in arguments[0]) and not arguments[1]):
            text += "; give arguments by name as kwargs={...} and several as a tuple, to to_sequential as **{...} and one by one"
        raise ValueError(text) from error
    return calls, effects, output


_UNFIT = (
    "; it cannot be kept whole either, because it takes or returns something else than tensors: put it, with the code that "
    "makes and uses these, into a submodule that takes and returns tensors"
)


def as_sequential(module: nn.Module, input: Any) -> nn.Sequential:
    """Returns a ``nn.Sequential`` as it is. Converts any other module, called with an input of the sequence."""
    if isinstance(module, nn.Sequential) or not isinstance(module, nn.Module):
        return module
    return converted(module, input)


def converted(module: nn.Module, input: Any, native: bool = False) -> nn.Sequential:
    """Returns the sequence of a module for an input of the sequence."""
    if isinstance(input, dict):
        return to_sequential(module, native=native, **input)
    return to_sequential(module, *(input if isinstance(input, tuple) else (input,)), native=native)


def _assemble(
    graphs: list[Graph], tensors: Mapping[str, Tensor], blocks: Iterable[str], model: nn.Module
) -> tuple[ConvertedSequence, str]:
    """Returns the sequence, and a description of its first layer that lets one sample through."""
    routes = list(zip(*divide(graphs)))  # of each layer, in each mode
    layers: dict[str, nn.Module] = {}
    entering = [tree_flatten(input_of(*tree_unflatten(graph.inputs, graph.in_spec))) for graph in graphs]
    inputs, sizes, outputs = [leaves for leaves, _ in entering], graphs[0].sizes, [graph.outputs for graph in graphs]
    example = tree_unflatten([value and True for value in inputs[0]], entering[0][1])
    returned = [tree_unflatten([value and True for value in graph.outputs], graph.out_spec) for graph in graphs]
    owned = _owners(tensors, blocks, routes)
    for index, each in enumerate(routes):
        first, last = index == 0, index == len(routes) - 1

        def described(begin: int, end: int, sizes: Sizes | None = None) -> Description:
            given = inputs[begin:end] if first else None, sizes, outputs[begin:end] if last else None
            return Description(each[begin:end], *given)

        alike = len({str(described(mode, mode + 1)) for mode in range(len(each))}) == 1
        description = described(0, 1 if alike else 2, sizes if first else None)
        if first:
            for_one = str(described(0, 1 if alike else 2, sizes.with_one_sample()))
        layer = ExportedLayer(each[0].name, model, description.called, str(description))
        for name in owned[index]:
            layer.add(name, tensors[name])
        layers[_key(each[0].name, layers)] = layer
    return ConvertedSequence(model, layers, example, returned), for_one


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the input of a sequence that was converted with these arguments."""
    args, kwargs = tree_map(lambda leaf: leaf if isinstance(leaf, (Tensor, Value)) else None, (args, dict(kwargs)))
    kwargs = {name: arg for name, arg in kwargs.items() if any(leaf is not None for leaf in tree_leaves(arg))}
    if kwargs:
        return (args, kwargs) if args else kwargs
    return args[0] if len(args) == 1 else args


def _owners(tensors: Mapping[str, Tensor], blocks: Iterable[str], routes: list[tuple[Route, ...]]) -> list[list[str]]:
    """Returns the names of each layer's tensors, without those of modules that are kept whole. One that is not used belongs to
    the layer with the nearest name."""
    owned = [list(dict.fromkeys(value.tensor for route in each for value in route.owned)) for each in routes]
    used = {id(tensors[name]) for names in owned for name in names}
    paths = [each[0].name.split(".") for each in routes]
    for name, each in tensors.items():
        if id(each) not in used and not is_inside(name, blocks):
            common = [len(os.path.commonprefix([name.split("."), path])) for path in paths]
            owned[common.index(max(common))].append(name)
    return owned


def _key(name: str, layers: Container[str]) -> str:
    """Returns a key for a layer in the sequence. Names of modules cannot have dots."""
    key = name.replace(".", "_")
    while key in layers:
        key += "_"
    return key
