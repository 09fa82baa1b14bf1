"""A model in stages, and the C++ pipeline that runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import Self  # comes with torch

from gpipe import _C
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.caller import prepare_compilation
from gpipe.checks import Workers, check_checkpoint, check_chunks
from gpipe.losses import Losses
from gpipe.names import ConvertedLayer, OriginalNames, StateNames
from gpipe.partition import Partition, Stages, borrowed_across_ranks, layers_of, split
from gpipe.ranks import Ranks

# The settings that may be assigned, with their checks. Another spelling is refused, because it would have no effect.
_SETTINGS: dict[str, Callable[[Any], Any]] = {"checkpoint": check_checkpoint, "chunks": check_chunks}
# The settings whose assignment is refused, because it would have no effect.
_FIXED = "balance", "deferred_batch_norm", "devices", "keep_memory", "placement", "schedule"


class StagedModel(OriginalNames):
    """A model that is cut into stages. It is a sequence of layers, and its state has the names of the model without
    stages. The C++ pipeline is made when it is first needed; a copy makes its own. Then stages of other ranks lose their
    layers."""

    partitions: Stages

    def __init__(
        self,
        module: nn.Sequential,
        balance: list[int],
        workers: Workers,
        schedule: str,
        deferred_batch_norm: bool,
        keep_memory: bool,
        ranks: Ranks | None,
    ) -> None:
        super().__init__()
        rank, native_ranks = (0, None) if ranks is None else (ranks.rank, ranks._core)
        self.balance, self.ranks = balance, ranks
        self.devices, self.placement = workers.devices, workers.placement
        self._is_here = [workers.ranks[worker] == rank for worker in self.placement]
        self._schedule = schedule
        own_devices = [device for device, at in zip(self.devices, workers.ranks) if at == rank]
        of_stages = [self.devices[worker] for worker in self.placement]
        self.partitions = Stages(split(module, balance, of_stages, self._is_here))
        places = {id(each): place for place, (_, each) in enumerate(super().named_parameters())}
        of_layers = [places[id(each)] for each in self.partitions.parameters()]
        self._options = own_devices, self.placement, deferred_batch_norm, keep_memory, native_ranks, of_layers
        self._borrowed = borrowed_across_ranks(list(self.partitions), self._is_here)
        self.training = module.training
        state = {} if ranks is None else self.state_dict(keep_vars=True)
        first_names: dict[int, str] = {}
        self.whole_state = {name: first_names.setdefault(id(value), name) for name, value in state.items()}
        self._forget()
        if balance:
            self._pipeline()  # raises what it refuses

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._made: _C.Pipeline | None = None
        self._layers: list[nn.Module] = []  # of the C++ pipeline
        self._norms: list[DeferredBatchNorm] = []  # of these layers
        self._losses = Losses()

    def _pipeline(self) -> _C.Pipeline:
        """Returns the C++ pipeline. Makes a new one if layers were replaced, or if stages share other parameters."""
        prepare_compilation()
        for name in (*self._modules, *self._parameters):
            if name != "partitions":
                raise RuntimeError(
                    f"'{name}' was added to the pipeline, which runs only the layers it was made of: `del pipe.{name}`, "
                    "change the model, and make another pipeline"
                )
        for layer in self:
            if isinstance(layer, ConvertedLayer):
                layer.check_original()
        with self._lock:
            replaced = any(a is not b for a, b in zip_longest(self, self._layers))
            if self._made is not None and not replaced and self._made.refresh():
                return self._made
            if self._made is not None and self.ranks is not None:
                raise RuntimeError(
                    "layers or shared parameters of this pipeline were replaced; over ranks, make a new pipeline "
                    "on all ranks"
                )
            stages = [(stage, layers_of(stage)) for stage in self.partitions]
            self._made = _C.Pipeline(stages, self._present_schedule(), *self._options)
            if self.ranks is not None:
                self.ranks._pipelines.add(self._made)
                for index, stage in enumerate(self.partitions):
                    if not self._is_here[index]:
                        self.partitions[index] = Partition().train(stage.training)
            self._layers = list(self)
            self._norms = [module for module in self.partitions.modules() if isinstance(module, DeferredBatchNorm)]
            return self._made

    def _present_schedule(self) -> str:
        """Returns the schedule of steps, which ``'auto'`` becomes in the first one."""
        if self._made is not None:
            self._schedule = self._made.schedule()
        return self._schedule

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks is not None:
            raise TypeError("a pipeline over ranks cannot be copied or pickled; save its state_dict()")
        made = ("_lock", "_made", "_layers", "_norms", "_losses")  # by _forget()
        state = {name: value for name, value in self.__dict__.items() if name not in made}
        return state | {"_schedule": self._present_schedule()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget()

    # A sequence of layers, not of stages. A layer is an attribute too.

    def __len__(self) -> int:
        return len(self.partitions.layers())

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.partitions.layers().values())

    def __getitem__(self, index: int) -> nn.Module:
        if isinstance(index, slice):
            raise TypeError("a pipeline has no slices; make a model of layers with nn.Sequential(*list(pipe)[...])")
        return list(self)[index]

    def __getattr__(self, name: str) -> Any:
        if (stage := self._stage_with(name)) is not None:
            return stage._modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            # With the name and the object, Python proposes a similar name.
            raise AttributeError(f"{error}{self._place_in_original(name)}", name=name, obj=self) from None

    def _place_in_original(self, name: str) -> str:
        """Returns where to find an attribute that only the original of a converted model has; an empty text for others."""
        layers = self.partitions.layers() if "partitions" in self.__dict__.get("_modules", ()) else {}
        converted = [(key, layer) for key, layer in layers.items() if isinstance(layer, ConvertedLayer)]
        orders = {id(layer.order): layer.order for _, layer in converted}  # layers of one model share theirs
        parameters = [each for order in orders.values() for each in order if each.partition(".")[0] == name]
        if not parameters and all(layer.name_in_messages(key).partition(".")[0] != name for key, layer in converted):
            return ""
        other = f", or pipe.get_parameter('{parameters[0]}')" if parameters else ""
        return f": the model that was converted has it, and the pipeline trains that model's parameters; use the model{other}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and (name in self.__dict__ or isinstance(getattr(type(self), name, None), property)):
            raise AttributeError(f"'{name}' of a pipeline is fixed; make another one by gpipe.GPipe(model, ..., {name}=...)")
        if not name.startswith("_") and name not in _SETTINGS and not hasattr(self, name):
            for near in get_close_matches(name, _SETTINGS, 1, 0.8):
                raise AttributeError(f"a pipeline has no '{name}'; did you mean '{near}'?")
        stage = self._stage_with(name) if isinstance(value, nn.Module) else None
        if stage is None:
            super().__setattr__(name, _SETTINGS[name](value) if name in _SETTINGS else value)
        else:
            stage._modules[name] = value

    def _stage_with(self, name: str) -> nn.Module | None:
        if name == "partitions":  # the stages, also if a layer has this name
            return None
        stages = self.__dict__.get("_modules", {}).get("partitions", ())
        return next((stage for stage in stages if name in stage._modules), None)

    # Names are the unpartitioned model's.

    def _state_names(self) -> StateNames:
        return StateNames({f"partitions.{path}": layer for path, layer in self.partitions.layers().items()})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        # A parameter that another rank owns counts as a duplicate.
        hidden = {id(each) for each in self._borrowed if remove_duplicate}
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in named if id(parameter) not in hidden)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Returns a dict whose values torch.distributed.checkpoint leaves out of names."""
        return {"": "partitions"}

    # Layers stay on the devices of their stages.

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Serves to(), cuda(), double() and the like, also of a module around the pipeline.
        own_devices = self._options[0]
        for device in {*own_devices, *(tensor.device for tensor in [*self.parameters(), *self.buffers()])}:
            try:
                stays = fn(torch.empty(0, device=device)).device == device
            except (AssertionError, RuntimeError):  # this process has no such device
                stays = False
            if not stays:
                refuse_to_move()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        refuse_to_move()


def refuse_to_move() -> NoReturn:
    raise TypeError(
        "denied to move parameters and buffers: a pipeline keeps them on the devices of its workers; pass "
        "GPipe(..., devices=[...]) instead"
    )
