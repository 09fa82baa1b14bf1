"""A module that stands for another one, as a pipeline and a converted model do."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten
from typing_extensions import Self  # comes with torch

from gpipe.checks import shown
from gpipe.structure import take_apart


def _mode_of(name: str) -> property:
    """Returns a property for the mode of the module in an attribute."""

    def set_mode(owner: nn.Module, mode: bool) -> None:
        if name in vars(owner):  # else nn.Module.__init__ sets it
            vars(owner)[name].training = mode

    return property(attrgetter(f"{name}.training"), set_mode)


class Wrapper(nn.Module):
    """A module with the children, parameters, buffers and hooks of the state of another one, ``module``. Both have the same
    dicts of them, so names, state, modes and changes of one are the other's. So are attributes and methods: optimizers of
    timm, for example, ask ``hasattr(model, "no_weight_decay")``."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tables = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"
        self.__dict__ |= {name: table for name, table in vars(module).items() if name in tables or "_state_dict_" in name}
        self.__dict__["module"] = module

    training = _mode_of("module")

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            with suppress(AttributeError):
                if not name.startswith("_"):
                    return getattr(self.__dict__.get("module"), name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        self._owner_of(name).__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._owner_of(name).__delattr__(name)

    def _owner_of(self, name: str) -> Any:
        """Returns the module if it has an attribute that the wrapper lacks, else the wrapper as a plain module."""
        is_own = name.startswith("_") or name in dir(self) or not hasattr(self.__dict__.get("module"), name)
        return super() if is_own else self.module

    def get_submodule(self, target: str) -> nn.Module:
        # Attributes of the wrapper may have the names of children.
        return self.module.get_submodule(target) if target else self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)


class ConvertedSequence(Wrapper, nn.Sequential):
    """A sequence of layers that computes what ``module`` does, and has its children in place of the layers.
    ``guards.check(tensors)`` raises RuntimeError unless the layers do that for an input with these tensors, and
    ``guards.check_model()`` unless they do for any. Dimension ``batch_dim``, 0 or 1, of the model's inputs and outputs is
    the batch; of the layers' it is dimension 0. The first layer takes, and the last one returns, a tensor or a tuple of
    tensors. ``input`` and ``outputs`` have ``True`` in the place of each tensor. ``outputs`` has one structure per mode:
    first the one of training, then the one of evaluation.
    ``refused`` tells, by path, why modules became blocks whose code between smaller blocks cannot be exported."""

    refused: dict[str, str]
    guards: Any = None  # until the conversion has ended
    batch_dim: int = 0
    _input: Any
    _outputs: Sequence[Any]

    def __init__(self, module: nn.Module, layers: dict[str, nn.Module], input: Any, outputs: Sequence[Any]) -> None:
        super().__init__(module)
        self.__dict__.update(_layers_of_gpipe=layers, _input=input, _outputs=outputs)

    def report(self) -> str:
        """Returns how many layers run without Python, and for each other one the functions that it calls."""
        with_python = [layer for layer in self if getattr(layer, "python_functions", ())]
        lines = [f"{len(self) - len(with_python)} of {len(self)} layers run without Python", *self.refused.values()]
        return "\n".join([*lines, *(f"'{layer.name}' calls {', '.join(layer.python_functions)}" for layer in with_python)])

    def __len__(self) -> int:
        return len(layers_in(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(layers_in(self).values())

    def forward(self, input: Any) -> Any:
        tensors = self.entering(input)
        self.follow_model()
        with naming_dimensions(self.batch_dim):
            return self.leaving(super().forward(tensors))  # type: ignore[no-untyped-call]

    def entering(self, input: Any) -> Any:
        """Returns what the first layer takes, for an input of the model. Raises TypeError if the model was converted for another
        structure, and RuntimeError as the guards do."""
        leaves, found = tree_flatten(_in_order_of(self._input, input))
        tensors, expected = tree_flatten(self._input)
        if found != expected:
            take_apart(input)  # its error names the part that is not a tensor
            raise TypeError(
                f"the model was converted for another structure of the input: expected {_shown(expected)}, but got "
                f"{_shown(found)}; give what was expected, with a tensor for each '...', and leave out what was a constant"
            )
        for number, (leaf, is_tensor) in enumerate(zip(leaves, tensors)):
            if not isinstance(leaf, Tensor if is_tensor else NoneType):
                wanted = "must be a tensor" if is_tensor else "was a constant at the conversion; give None"
                raise ValueError(f"input {number} is {shown(leaf)}, but {wanted}")
        given = batch_first(tuple(leaf for leaf in leaves if leaf is not None), self.batch_dim)
        if self.guards is not None:
            self.guards.check(given)
        return given if len(given) > 1 else given[0]

    def leaving(self, output: Any) -> Any:
        """Returns what the model does, in its present mode, for what the last layer returned."""
        tensors = iter(batch_first(output if isinstance(output, tuple) else (output,), self.batch_dim))
        return tree_map(lambda is_tensor: next(tensors) if is_tensor else None, self._outputs[0 if self.module.training else -1])

    @property
    def is_plain(self) -> bool:
        """Whether the last layer returns what the model does."""
        return self.batch_dim == 0 and all(each is True for each in self._outputs)

    def follow_model(self) -> None:
        """Gives the layers the tensors, and the modules to call, that the model has now."""
        for layer in self:
            layer.follow_model()

    def __getitem__(self, index: Any) -> Any:
        layers = layers_in(self)
        return nn.Sequential(OrderedDict(list(layers.items())[index])) if isinstance(index, slice) else list(layers.values())[index]


class Shell(nn.Module):
    """Stands in a layer for a module of the model whose tensors or mode the layer uses without calling it."""

    original_of_gpipe: nn.Module  # no tensor of a model has this name

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original_of_gpipe"] = original

    training = _mode_of("original_of_gpipe")


class ConvertedLayer(nn.Module):
    """A layer of a converted model. Its children stand for modules of the ``model``: the modules that the layer calls,
    and shells."""

    model: nn.Module

    def __init__(self, model: nn.Module, called: Iterable[str]) -> None:
        """Makes a layer that calls the modules at some paths."""
        super().__init__()
        self.__dict__["model"] = model
        # What the layer has of the model: a dict of its own and the name there, a dict of the model and the name there.
        self._links: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
        for path in called:
            outer, _, name = path.rpartition(".")
            self._modules[_key(path)] = model.get_submodule(path)
            self._links.append((self._modules, _key(path), model.get_submodule(outer)._modules, name))

    def child(self, path: str) -> nn.Module:
        """Returns what stands for the module at a path, by default a new shell."""
        if _key(path) not in self._modules:
            self._modules[_key(path)] = Shell(self.model.get_submodule(path))
        found = self._modules[_key(path)]
        assert found is not None
        return found

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor of the model, or a constant, under its name in the model."""
        path, _, own = name.rpartition(".")
        if isinstance(shell := self.child(path), Shell):
            kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
            here, there = vars(shell)[kind], vars(shell.original_of_gpipe)[kind]
            here[own] = tensor
            if there.get(own) is tensor:
                self._links.append((here, own, there, own))

    def follow_model(self) -> None:
        """Takes the tensors, and the modules to call, that the model has now. Raises RuntimeError if it has one no more."""
        for here, name, there, own in self._links:
            if (found := there.get(own)) is None:
                raise RuntimeError(
                    f"'{own}' was taken from the model since the conversion; change the model first, then convert it and make "
                    "the pipeline"
                )
            here[name] = found

    def return_tensors(self) -> None:
        """Gives the model the tensors of the shells, which may have been moved."""
        for here, name, there, own in self._links:
            there[own] = here[name]


def _key(path: str) -> str:
    """Returns the key of what stands for the module at a path among a layer's children."""
    return f"model.{path}" if path else "model"


def _in_order_of(example: Any, value: Any) -> Any:
    """Returns a value with the keys of its dicts in the order of an example."""
    if isinstance(example, dict) and isinstance(value, dict) and example.keys() == value.keys():
        return {key: _in_order_of(each, value[key]) for key, each in example.items()}
    if type(example) is tuple and type(value) is tuple and len(example) == len(value):
        return tuple(_in_order_of(*pair) for pair in zip(example, value))
    return value


def _shown(spec: TreeSpec) -> str:
    return str(tree_unflatten(["..."] * spec.num_leaves, spec)).replace("'...'", "...")


def batch_first(value: Any, batch_dim: int) -> Any:
    """Swaps dimensions 0 and ``batch_dim`` of the tensors in a value. Raises ValueError for a tensor that lacks one."""

    def swapped(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            raise ValueError(f"a tensor has the shape {tuple(tensor.shape)}, but dimension 1 of each must be the batch")
        return tensor.transpose(0, 1).contiguous()

    return tree_map_only(Tensor, swapped, value) if batch_dim else value


@contextmanager
def naming_dimensions(batch_dim: int) -> Iterator[None]:
    """Adds to errors about shapes in a block that layers have the batch as dimension 0, if the model has it elsewhere."""
    try:
        yield
    except Exception as error:
        if batch_dim and "shape" in str(error) and hasattr(error, "add_note"):  # Python 3.10 has no notes
            error.add_note("[gpipe] the layers have the batch as dimension 0; swap dimensions 0 and 1 for the model's shapes")
        raise


def entering(sequence: nn.Module, input: Any) -> Any:
    """Returns what the first layer of a sequence takes. Errors as :meth:`ConvertedSequence.entering`."""
    return sequence.entering(input) if isinstance(sequence, ConvertedSequence) else input


def layers_in(sequence: nn.Module) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = sequence.__dict__.get("_layers_of_gpipe", sequence._modules)
    return layers
