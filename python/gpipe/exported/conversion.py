"""Turns any module into a sequence of layers."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, load
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from gpipe import _C
from gpipe.exported.capture import Captured, Owned, capture, capture_program, examples_of
from gpipe.exported.exporter import is_inside, mode, unchanged
from gpipe.exported.graph import Value
from gpipe.exported.layer import Description, ExportedLayer
from gpipe.exported.layers import Route, Routes, divide
from gpipe.names import OriginalNames, StateNames


class ExportedSequential(OriginalNames, nn.Sequential):
    """A converted model: the layers in order of execution, with the parameters, buffers and names of the original."""

    def _state_names(self) -> StateNames:
        return StateNames(dict(self.named_children()))

    def report(self) -> str:
        """Returns how many layers run without Python, and for each other one the functions that it calls."""
        calls = {layer.name: layer.python_functions for layer in self if isinstance(layer, ExportedLayer)}
        with_python = {name: functions for name, functions in calls.items() if functions}
        lines = [f"{len(self) - len(with_python)} of {len(self)} layers run without Python"]
        return "\n".join([*lines, *(f"'{name}' calls {', '.join(each)}" for name, each in with_python.items())])


def to_sequential(
    module: nn.Module | ExportedProgram | str | os.PathLike[str],
    /,
    *example_args: Any,
    opaque: Iterable[type[nn.Module]] = (),
    **example_kwargs: Any,
) -> nn.Sequential:
    """Converts a module to a sequence of layers that computes the same. Each submodule without submodules of its own
    becomes a layer, with the operators around it. A value that a later layer than the next uses becomes a skip.

        model = gpipe.to_sequential(torchvision.models.resnet50(), images)
        pipe = gpipe.GPipe(model, balance, chunks=8)

    Args:
        module: the model, which :func:`torch.export.export` can export; or a program that was exported in training mode
            with a dynamic dimension 0, or the path of its ``.pt2`` file. The sequence has the same parameters and buffers,
            so training it trains the module, which is not changed otherwise. A converted sequence stays as it is.
        example_args, example_kwargs: an input of the module. Dimension 0 of each tensor is the batch. The sequence takes
            batches of any size, and the other sizes that the module's code takes, from 2. It takes one input: the only
            argument, else the tuple of positional arguments, the dict of keyword arguments, or a tuple of both. Arguments
            without tensors become constants: leave keyword arguments out, and give ``None`` for the others.
        opaque: classes of submodules that cannot be exported, each of which becomes one layer. They get and return tensors
            with the batch as dimension 0.

    The sequence has the module's keys in ``state_dict()``. Call ``train()`` and ``eval()`` on it, not on the module.
    Raises ValueError, with the part and the reason, if the module cannot be converted.
    """
    if isinstance(module, ExportedSequential):
        return module
    for any_shape in (True, False) if isinstance(module, nn.Module) and not opaque else (False,):
        try:
            model = _captured(module, example_args, example_kwargs, opaque, any_shape)
            sequence = _assemble(model, module)
            break
        except ValueError:
            if not any_shape:
                raise
    if isinstance(module, nn.Module):
        examples = examples_of((example_args, example_kwargs))
        if len(set(model.modes.values())) == 2:
            _compare(module, sequence, *examples)
        may_break = model.graph.sizes.guards_of_one_sample()
        _try_one_sample(module, sequence, may_break, *tree_map_only(Tensor, lambda tensor: tensor[:1], examples))
    return sequence


def _try_one_sample(
    module: nn.Module, sequence: nn.Sequential, may_break: list[bool], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Lets one sample through the guards that it ``may_break``, if the module and the sequence agree about it. Else refuses
    it: an export takes for granted that there are more."""
    first: Any = sequence[0]
    description = json.loads(first.description)
    samples = {"size": [next(value for value in description["inputs"] if value is not None), 0]}
    before = json.dumps({**description, "guards": [*description.get("guards", ()), (["<=", 2, samples], "samples >= 2")]})
    for guard, may in zip(description.get("guards", ()), may_break, strict=True):
        if may:
            guard[0] = ["or", ["==", samples, 1], guard[0]]
            guard[1] = f"samples == 1 or {guard[1]}"
    first.describe(json.dumps(description))
    if not _agree(module, sequence, args, kwargs):
        first.describe(before)


def _compare(module: nn.Module, sequence: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if a model and its sequence do different things in their modes. If the sequence cannot follow these,
    calls will raise ModeError too."""
    ours, theirs = _results(module, sequence, args, kwargs)
    if isinstance(ours, Exception):
        raise ours
    if not isinstance(theirs, _C.ModeError) and not _equal(ours, theirs):
        raise ValueError(
            "cannot convert the model: some of its modules are in training mode and others in evaluation mode, and the "
            "exports do not show what it computes then; call train() or eval() on the whole model before"
        )


def _agree(module: nn.Module, sequence: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a model and its sequence return equal values, or both raise, in each mode. In one, they must return."""
    returned = False
    for training in (True, False):
        with mode(module, training), mode(sequence, training):
            results = _results(module, sequence, args, kwargs)
        if all(isinstance(each, Exception) for each in results):
            continue
        if not _equal(*results):
            return False
        returned = True
    return returned


def _results(module: nn.Module, sequence: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns what a model and its sequence return and leave in buffers, or the exception that they raise."""

    def result_of(call: Callable[[Any, Any], Any]) -> Any:
        own = tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))  # which the model may change
        with unchanged(module, seed=0):
            try:
                return [*tree_leaves(call(*own)), *(buffer.clone() for buffer in module.buffers())]
            except Exception as error:
                return error

    whole = result_of(lambda args, kwargs: module(*args, **kwargs))
    return [whole, result_of(lambda args, kwargs: sequence(input_of(args, kwargs)))]


def _equal(ours: Any, theirs: Any) -> bool:
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except (AssertionError, TypeError):  # the latter for an exception
        return False
    return True


def _captured(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], opaque: Iterable[type[nn.Module]], any_shape: bool
) -> Captured:
    if isinstance(module, nn.Module):
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            raise ValueError("give an example input, with tensors: to_sequential(module, input) or from_module(module, input)")
        return capture(module, args, kwargs, opaque, any_shape=any_shape)
    if not isinstance(module, (ExportedProgram, str, os.PathLike)):
        raise TypeError(f"module must be nn.Module, ExportedProgram or a path, but is {type(module)}")
    if args or kwargs or opaque:
        raise TypeError("an exported program is converted without an example input and without opaque")
    if not isinstance(module, ExportedProgram):
        with open(module, "rb") as file:
            module = load(file)
    return capture_program(module)


def as_sequential(module: nn.Module, input: Any) -> nn.Sequential:
    """Returns a ``nn.Sequential`` as it is. Converts any other module, called with an input of the sequence."""
    if isinstance(module, nn.Sequential) or not isinstance(module, nn.Module):
        return module
    return converted(module, input)


def converted(module: nn.Module, input: Any) -> nn.Sequential:
    """Returns the sequence of a module for an input of the sequence."""
    if isinstance(input, dict):
        return to_sequential(module, **input)
    return to_sequential(module, *(input if isinstance(input, tuple) else (input,)))


class _Tree:
    """Makes the tree of modules that holds some of a model's tensors, and modules that are kept whole."""

    def __init__(self, modes: dict[str, bool], whole: dict[str, nn.Module]) -> None:
        self._modes = modes
        self._places = dict(whole)
        self.root = self.place("")

    def place(self, path: str) -> nn.Module:
        """Returns the module at a path, which it makes if the tree has none."""
        if path not in self._places:
            self._places[path] = nn.Module()
            self._places[path].training = self._modes.get(path, True)
        if path:
            outer, _, name = path.rpartition(".")
            self.place(outer)._modules[name] = self._places[path]
        return self._places[path]

    def add(self, name: str, owned: Owned) -> None:
        """Registers a tensor under its name."""
        path, _, own = name.rpartition(".")
        place = self.place(path)
        if isinstance(owned.tensor, nn.Parameter):
            place._parameters[own] = owned.tensor
        else:
            place._buffers[own] = owned.tensor
            if not owned.persistent:
                place._non_persistent_buffers_set.add(own)


def _assemble(model: Captured, original: object) -> nn.Sequential:
    """Returns the sequence of the layers of a model. ``original``: what was captured, a module or a program."""
    training = original.training if isinstance(original, nn.Module) else True
    routes = Routes(model.graph, divide(model.graph)).routes
    sequence = ExportedSequential()
    sequence.training = training
    example_input = input_of(*tree_unflatten(model.graph.inputs, model.graph.in_spec))
    inputs, in_spec = tree_flatten(example_input)
    example, *returned = [tree_unflatten(range(spec.num_leaves), spec) for spec in (in_spec, *model.graph.out_specs)]
    owned, order = _owners(model, routes), list(model.tensors)
    for index, each in enumerate(routes):
        first, last = index == 0, each is routes[-1]
        entering, sizes = (inputs, model.graph.sizes) if first else (None, None)
        description = Description(each, entering, sizes, model.graph.outputs if last else None)
        tree = _Tree(model.modes, model.whole)
        for name in owned[index]:
            tree.add(name, model.tensors[name])
        for path in (*description.places, *(value.tensor.rpartition(".")[0] for value in each.owned)):
            tree.place(path)
        layer = ExportedLayer(
            each.name, tree.root, order, str(description), example if first else None, returned if last else None
        )
        layer.training = training
        if isinstance(original, nn.Module):
            layer.watch(original)
        sequence.add_module(_key(each.name, sequence, model.tensors), layer)
    return sequence


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the input of a sequence that was converted with these arguments."""
    args, kwargs = tree_map(lambda leaf: leaf if isinstance(leaf, (Tensor, Value)) else None, (args, dict(kwargs)))
    kwargs = {name: arg for name, arg in kwargs.items() if any(leaf is not None for leaf in tree_leaves(arg))}
    if kwargs:
        return (args, kwargs) if args else kwargs
    return args[0] if len(args) == 1 else args


def _owners(model: Captured, routes: list[Route]) -> list[list[str]]:
    """Returns the names of each layer's tensors. A tensor with several names has all of them in one layer. One that is not
    used belongs to the layer with the nearest name."""
    users = ((value.tensor, index) for index, each in enumerate(routes) for value in each.owned)
    layers = {id(model.tensors[name].tensor): index for name, index in users}
    owned: list[list[str]] = [[] for _ in routes]
    paths = [route.name.split(".") for route in routes]
    for name, each in model.tensors.items():
        if is_inside(name, model.whole):
            continue
        common = [len(os.path.commonprefix([name.split("."), path])) for path in paths]
        index = layers.setdefault(id(each.tensor), common.index(max(common)))
        owned[index].append(name)
    return owned


def _key(name: str, sequence: nn.Sequential, tensors: Iterable[str]) -> str:
    """Returns a key for a layer in the sequence. Names of modules cannot have dots. The original's names must not lead
    to a layer, because functions that replace tensors by name would take it for the original module."""
    key, first = name.replace(".", "_"), {each.partition(".")[0] for each in tensors}
    while hasattr(sequence, key) or key in first:
        key += "_"
    return key
