"""A module that stands for another one, as a pipeline and a converted model do."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import Self  # comes with torch


class Wrapper(nn.Module):
    """A module with the children, parameters, buffers and hooks of the state of another one, ``module``. Both have the same
    dicts of them, so names, state, modes and changes of one are the other's."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tables = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"
        self.__dict__ |= {name: table for name, table in vars(module).items() if name in tables or "_state_dict_" in name}
        self.__dict__["module"] = module

    def _set_training(self, mode: bool) -> None:
        if "module" in self.__dict__:  # else nn.Module.__init__ sets it
            self.module.training = mode

    training = property(attrgetter("module.training"), _set_training)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if not name.startswith("_") and hasattr(self.__dict__.get("module"), name):
                raise AttributeError(f"{error}; its model has it: use .module.{name}", name=name, obj=self) from None
            raise

    def get_submodule(self, target: str) -> nn.Module:
        # Attributes of the wrapper may have the names of children.
        return self.module.get_submodule(target) if target else self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)


class WrappingSequence(Wrapper, nn.Sequential):
    """A sequence of layers that computes what ``module`` does, and has its children in place of the layers.
    ``guards.check(tensors)`` raises RuntimeError unless the layers do that for an input with these tensors. Dimension
    ``batch_dim``, 0 or 1, of the model's inputs and outputs is the batch; of the layers' it is dimension 0."""

    guards: Any
    batch_dim: int

    def __init__(self, module: nn.Module, layers: dict[str, nn.Module], batch_dim: int) -> None:
        super().__init__(module)
        self.__dict__.update(_layers_of_gpipe=layers, batch_dim=batch_dim)

    def __len__(self) -> int:
        return len(layers_in(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(layers_in(self).values())

    def forward(self, input: Any) -> Any:
        self.guards.check(tree_leaves(input))
        for layer in self:
            layer.follow_model()  # type: ignore[operator]
        output = super().forward(batch_first(input, self.batch_dim))  # type: ignore[no-untyped-call]
        return batch_first(output, self.batch_dim)

    def __getitem__(self, index: Any) -> Any:
        layers = layers_in(self)
        return nn.Sequential(OrderedDict(list(layers.items())[index])) if isinstance(index, slice) else list(layers.values())[index]


class Shell(nn.Module):
    """Stands in a layer for a module of the model whose tensors the layer uses without calling it. Has the module's mode. Its
    own names are none that a tensor or a child of the model may have."""

    original_of_gpipe: nn.Module
    own_of_gpipe: set[str]  # names of tensors that the original does not have: constants

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(original_of_gpipe=original, own_of_gpipe=set())

    def __set_training(self, mode: bool) -> None:
        if "original_of_gpipe" in self.__dict__:
            self.original_of_gpipe.training = mode

    training = property(attrgetter("original_of_gpipe.training"), __set_training)


class ConvertedLayer(nn.Module):
    """A layer of a converted model. ``model`` is a tree of shells, and of the model's own modules that the layer calls."""

    model: nn.Module
    _shells: list[tuple[str, Shell]]  # by path, in the tree

    def _of_tree(self) -> list[tuple[str, Shell]]:
        if "_shells" not in self.__dict__:  # the tree is complete after the conversion
            self._shells = [(path, each) for path, each in self.model.named_modules() if isinstance(each, Shell)]
        return self._shells

    def _shared(self) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
        """Yields each tensor of the model in a shell: the module's path, the name, and the dicts of the shell and the model."""
        for path, shell in self._of_tree():
            for kind in ("_parameters", "_buffers"):
                own, of_model = vars(shell)[kind], vars(shell.original_of_gpipe)[kind]
                yield from ((path, name, own, of_model) for name in own if name not in shell.own_of_gpipe)

    def follow_model(self) -> None:
        """Takes the tensors, and the modules to call, that the model has now. Raises RuntimeError if it has one no more."""
        for path, name, own, of_model in self._shared():
            own[name] = _present(path, name, of_model)
        for path, shell in self._of_tree():
            for name, child in shell._modules.items():
                present = _present(path, name, shell.original_of_gpipe._modules)
                if not isinstance(child, Shell):
                    shell._modules[name] = present
                elif child.original_of_gpipe is not present:
                    raise RuntimeError(_GONE.format(f"{path}.{name}".lstrip(".")))

    def return_tensors(self) -> None:
        """Gives the model the tensors of the shells, which may have been moved."""
        for _, name, own, of_model in self._shared():
            of_model[name] = own[name]


_GONE = "'{}' of the model was replaced since the conversion; change the model first, then convert it and make the pipeline"


def _present(path: str, name: str, of_model: Mapping[str, Any]) -> Any:
    if (found := of_model.get(name)) is None:
        raise RuntimeError(_GONE.format(f"{path}.{name}".lstrip(".")))
    return found


def batch_first(value: Any, batch_dim: int) -> Any:
    """Swaps dimensions 0 and ``batch_dim`` of the tensors in a value. Raises ValueError for a tensor that lacks one."""

    def swapped(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            raise ValueError(f"a tensor has the shape {tuple(tensor.shape)}, but dimension 1 of each must be the batch")
        return tensor.transpose(0, 1).contiguous()

    return tree_map_only(Tensor, swapped, value) if batch_dim else value


def layers_in(sequence: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers of a sequence by name."""
    layers: dict[str, nn.Module] = sequence.__dict__.get("_layers_of_gpipe", sequence._modules)
    return layers
