"""The stages of a pipeline as modules.

The first stage that has a parameter owns it. A stage on another device gets a stand-in on its device with each micro-batch.
Its modules keep the parameter registered, so that names and optimizers see one parameter. Another rank has a copy.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe import _C
from gpipe._C import is_checkpointing
from gpipe.randomness import Draws, redirect_generators
from gpipe.skip import Skippable, skippables_in, verify_skippables
from gpipe.weights import Values
from gpipe.wrapper import ConvertedLayer, ConvertedSequence, Shell, layers_in


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "a backward reached a tensor that a layer keeps as an attribute, but the layer's forward is recomputed later; "
            "return the tensor from the layer or stash it, and use it in the loss"
        )


class Partition(nn.Sequential):
    """The layers of one stage. A pipeline calls it on the stage's worker thread. Layers may have any name that
    ``nn.Sequential`` allows, so the class's own names begin with an underscore."""

    __kept: list[tuple[nn.Module, str]] = []  # attributes that hold a differentiable tensor after a forward

    def forward(self, input: Any) -> Any:
        if (draws := self.__dict__.get("_draws")) is None:
            draws = self.__dict__["_draws"] = Draws(self)
        borrowed = _C.borrowed(self)
        with _standing_in(self, borrowed) if borrowed else nullcontext():
            output = draws(self.__run, input)
        if is_checkpointing():
            self.__mark_kept()
        return output

    def __mark_kept(self) -> None:
        """Makes a backward through a tensor that a layer keeps an error, because its forward will be recomputed."""
        if torch.is_grad_enabled():  # the first such forward builds its graph, which shows what is differentiable
            self.__kept = [
                (module, name)
                for module in self.modules()
                for name, value in vars(module).items()
                if isinstance(value, Tensor) and value.grad_fn is not None
            ]
            return
        keep: Any = _Kept.apply
        for module, name in self.__kept:
            if isinstance(tensor := vars(module).get(name), Tensor):
                with torch.enable_grad():
                    vars(module)[name] = keep(torch.empty(0, requires_grad=True), tensor.detach())

    def __run(self, input: Any, after_layer: Callable[[str], None]) -> Any:
        for index, (name, layer) in enumerate(zip(self._modules, self)):
            _C.begin_layer(self, index)
            try:
                input = layer(input)
            except ValueError as error:
                if "Expected more than 1 value per channel" in str(error) and hasattr(error, "add_note"):
                    error.add_note(
                        "[gpipe] a batch norm cannot train on a micro-batch of one sample; use fewer chunks for this "
                        "mini-batch, or leave it out: DataLoader(..., drop_last=True)"
                    )
                raise
            after_layer(name)
        return input


class Stages(nn.ModuleList):
    def __iter__(self) -> Iterator[Partition]:
        return super().__iter__()  # type: ignore[return-value]

    def layers(self) -> dict[str, nn.Module]:
        """Returns the layers of all stages by their paths, ``<stage>.<layer>``."""
        return {f"{index}.{name}": layer for index, stage in enumerate(self) for name, layer in zip(stage._modules, stage)}


def split(
    module: nn.Sequential, balance: list[int], devices: list[torch.device], is_here: list[bool], values: Values
) -> list[Partition]:
    """Returns the stages of a model. Moves this rank's stages, as ``is_here`` tells, to their devices. Tensors on the ``meta``
    device get ``values``. Raises ValueError as :meth:`Values.give`, and if stages on different devices share a parameter
    through a module that cannot use a stand-in."""
    for layer in layers_in(module).values():
        if isinstance(layer, ConvertedLayer):
            layer.follow_model()
    layers = iter(layers_in(module).items())
    stages = [Partition(OrderedDict(islice(layers, count))) for count in balance]
    for stage in stages:
        stage.training = module.training
    own = [(stage, device) for stage, device, here in zip(stages, devices, is_here) if here]
    _check_stand_ins(own)
    borrowed = borrowed_across_ranks(stages, is_here)
    values.give(module.__dict__.get("module", module), stages, devices, is_here, borrowed)
    # From last to first, so that a parameter of several stages ends on the device of the first one here.
    for stage, device in reversed(own):
        stage.to(device)
    for stage in stages:
        for layer in stage:
            if isinstance(layer, ConvertedLayer):
                layer.return_tensors()
    return stages


def layers_of(module: nn.Sequential) -> list[tuple[str, nn.Module, list[Any]]]:
    """Returns the layers of a model or stage as the extension module takes them: tuples (name, module, skips), where
    ``skips`` has a tuple (module, stashes, pops, peeks) for each skippable module that is the layer or nested in it."""
    redirect_generators()
    return [
        (
            layer.name_in_messages(name) if isinstance(layer, Skippable) else name,
            layer,
            [(skip, *skip.declared()) for _, skip in skippables_in(layer, name)],
        )
        for name, layer in layers_in(module).items()
    ]


def forget_others(module: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Replaces the tensors of a model that none of a rank's stages has by tensors on the ``meta`` device, so that their memory
    is free. A tensor that another rank's layer has too stays under the names of the layers here."""
    here: set[tuple[int, str]] = set()
    for each in chain.from_iterable(stage.modules() for stage in stages):
        owner = each.original_of_gpipe if isinstance(each, Shell) else each
        here.update((id(owner), name) for name in (*each._parameters, *each._buffers))
    made: dict[int, Tensor] = {}
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (id(each), name) in here or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _places(stage: nn.Module, parameters: Sequence[Tensor]) -> Iterator[tuple[nn.Module, str, int]]:
    """Yields where the modules of a stage have parameters: module, name, and the parameter's index."""
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if (index := indices.get(id(parameter))) is not None:
                yield module, name, index


@contextmanager
def _standing_in(stage: nn.Module, borrowed: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Makes the modules of a stage find stand-ins for a block. ``borrowed`` has tuples (parameter, stand-in)."""
    places = list(_places(stage, [parameter for parameter, _ in borrowed]))
    for module, name, index in places:
        module.__dict__[name] = borrowed[index][1]  # Python looks here before it asks the module
    try:
        yield
    finally:
        for module, name, _ in places:
            del module.__dict__[name]


def _check_stand_ins(stages: list[tuple[Partition, torch.device]]) -> None:
    home: dict[int, torch.device] = {}  # of parameters, by id
    earlier: set[int] = set()  # ids of the modules of earlier stages
    for stage, device in stages:
        borrowed = [each for each in stage.parameters() if home.setdefault(id(each), device) != device]
        for module, name, _ in _places(stage, borrowed):
            scripted = isinstance(module, torch.jit.ScriptModule)
            if scripted or id(module) in earlier:
                why = "is compiled by TorchScript" if scripted else "itself stands in both stages"
                raise ValueError(
                    f"'{name}' of a {type(module).__name__} belongs to stages on different devices, but the module {why}; "
                    "put the layers that share it into one stage, place the stages on one device, or tie the parameters of "
                    "two modules"
                )
        earlier.update(map(id, stage.modules()))


def borrowed_across_ranks(stages: Sequence[nn.Module], is_here: Sequence[bool]) -> list[nn.Parameter]:
    """Returns the parameters of this rank's stages, as ``is_here`` tells, that belong to a stage of another rank."""
    owned_here: dict[nn.Parameter, bool] = {}
    held = [(parameter, here) for stage, here in zip(stages, is_here) for parameter in stage.parameters()]
    found = [parameter for parameter, here in held if not owned_here.setdefault(parameter, here) and here]
    return list(dict.fromkeys(found))


def verify_module(module: nn.Sequential) -> None:
    """Raises TypeError or ValueError if a model cannot become a pipeline; see :class:`gpipe.GPipe`."""
    kind = type(module)
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but is {kind}; use "
            "gpipe.GPipe.from_module(module, input, stages=2) for another module, nn.Sequential(*layers) for layers"
        )
    plain = kind.forward in (nn.Sequential.forward, Partition.forward, ConvertedSequence.forward)
    if not plain or kind.__call__ is not nn.Module.__call__ or "forward" in vars(module) or module._compiled_call_impl is not None:
        raise TypeError(
            f"the model ({kind.__name__}) has a forward of its own, or is compiled as a whole, but a pipeline calls "
            "only its layers; move the code of the forward into layers, compile the layers, or pass "
            "nn.Sequential(*model) if that computes the same"
        )
    used = [name for name, table in vars(module).items() if name.endswith("_hooks") and table and "_state_dict" not in name]
    own = [f"a{name[:-1].replace('_', ' ')}" for name in used]  # such as "a forward hook"
    if layers_in(module) is module._modules:
        own += [f"a parameter ('{name}')" for name, value in module._parameters.items() if value is not None]
        own += [f"a buffer ('{name}')" for name, value in module._buffers.items() if value is not None]
    if own:
        raise ValueError(
            f"the model itself, not one of its layers, has {', '.join(own)}, which a pipeline would lose; register "
            "parameters and buffers in a layer, and hooks on a layer or on the pipeline"
        )
    model = vars(module).get("module", module)
    if isinstance(module, ConvertedSequence):
        module.guards.check_model()
    registered = {id(parameter) for parameter in model.parameters()}
    for path, each in model.named_modules():
        for name, value in vars(each).items():
            elements = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
            if any(isinstance(element, nn.Parameter) and id(element) not in registered for element in elements):
                raise ValueError(
                    f"'{name}' of '{path}' ({type(each).__name__}) holds a parameter that no module has registered; use "
                    "nn.ParameterList or nn.ParameterDict"
                )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"'{name}' of a lazy layer is not initialized; run the model once on a sample first")
    first: dict[nn.Module | None, str] = {}
    for name, layer in layers_in(module).items():
        if (other := first.setdefault(layer, name)) != name:
            raise ValueError(
                f"layers '{other}' and '{name}' are the same module; use a copy, because each layer belongs to one place"
            )
    verify_skippables(module)
