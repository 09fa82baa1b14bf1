"""A model in stages, and the C++ pipeline that runs them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import Self  # comes with torch

from gpipe import _C
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.caller import prepare_compilation
from gpipe.checks import Workers, check_chunks
from gpipe.losses import Losses
from gpipe.partition import Partition, Stages, borrowed_across_ranks, forget_others, layers_of, split
from gpipe.ranks import Ranks
from gpipe.skip import Skippable
from gpipe.weights import Values
from gpipe.wrapper import ConvertedLayer, ConvertedSequence, Wrapper, batch_first, entering, layers_in

# The settings that may be assigned, with their checks. Another spelling is refused, because it would have no effect.
_SETTINGS: dict[str, Callable[[Any], Any]] = {"checkpoint": _C.check_checkpoints, "chunks": check_chunks}
# The settings whose assignment is refused, because it would have no effect.
_FIXED = "balance", "deferred_batch_norm", "devices", "keep_memory", "module", "partitions", "placement", "schedule"


class StagedModel(Wrapper):
    """A model that is cut into stages. It has the model's own children, so names and state are the model's. It is a sequence
    of layers. The C++ pipeline is made when it is first needed; a copy makes its own. Then stages of other ranks lose their
    layers, and the tensors of these are on the ``meta`` device."""

    balance: list[int]
    ranks: Ranks | None
    devices: list[torch.device]
    placement: list[int]
    _first_names: dict[str, str]  # over ranks, of each name of the whole state the first one of its tensor
    partitions: Stages
    _sequence: nn.Sequential
    _batch_dim: int
    _schedule: str
    _is_here: list[bool]
    _borrowed: list[nn.Parameter]
    _options: tuple[Any, ...]
    _lock: threading.RLock
    _losses: Losses
    _made: _C.Pipeline | None
    _layers: list[nn.Module]  # of the C++ pipeline
    _norms: list[DeferredBatchNorm]  # of these layers

    def __init__(
        self,
        sequence: nn.Sequential,
        balance: list[int],
        workers: Workers,
        schedule: str,
        deferred_batch_norm: bool,
        keep_memory: bool,
        ranks: Ranks | None,
        values: Values,
    ) -> None:
        super().__init__(sequence.__dict__.get("module", sequence))
        rank, native_ranks = (0, None) if ranks is None else (ranks.rank, ranks._core)
        self.__dict__.update(balance=balance, ranks=ranks, devices=workers.devices, placement=workers.placement)
        self.__dict__.update(_sequence=sequence, _schedule=schedule)
        self.__dict__["_is_here"] = [workers.ranks[worker] == rank for worker in self.placement]
        own_devices = [device for device, at in zip(self.devices, workers.ranks) if at == rank]
        of_stages = [self.devices[worker] for worker in self.placement]
        self.__dict__["_batch_dim"] = vars(sequence).get("batch_dim", 0)
        self.__dict__["partitions"] = Stages(split(sequence, balance, of_stages, self._is_here, values))
        state = {} if ranks is None else self.module.state_dict(keep_vars=True)
        firsts: dict[int, str] = {}
        self.__dict__["_first_names"] = {name: firsts.setdefault(id(value), name) for name, value in state.items()}
        places = {id(each): place for place, (_, each) in enumerate(super().named_parameters())}
        of_layers = [places[id(each)] for each in self.partitions.parameters()]
        options = own_devices, self.placement, deferred_batch_norm, keep_memory, native_ranks, of_layers
        borrowed = borrowed_across_ranks(list(self.partitions), self._is_here)
        self.__dict__.update(_options=options, _borrowed=borrowed)
        self._forget()
        if balance:
            self._pipeline()  # raises what it refuses

    def _forget(self) -> None:
        layers = list(self.partitions.layers().values())
        self.__dict__.update(_lock=threading.RLock(), _made=None, _layers=layers, _norms=[], _losses=Losses())

    def _pipeline(self) -> _C.Pipeline:
        """Returns the C++ pipeline. Makes a new one if layers were replaced, or if stages share other parameters."""
        prepare_compilation()
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
                if self.ranks.size > self.ranks.replicas:
                    forget_others(self.module, list(self.partitions))
            self._layers = list(self)
            self._norms = [module for module in self.partitions.modules() if isinstance(module, DeferredBatchNorm)]
            return self._made

    def _refresh_layers(self) -> None:
        """Gives the stages the layers and tensors that the model has now, and the model those that were put into a stage. Raises
        RuntimeError if the model has other layers."""
        present = layers_in(self._sequence)
        own = {name for stage in self.partitions for name in stage._modules}
        has_all = self.ranks is None or self._made is None
        if other := [name for name in present if name not in own and has_all] + [*(own - present.keys())]:
            raise RuntimeError(
                f"layer '{other[0]}' was added to the model of this pipeline or taken from it; make another pipeline of the model"
            )
        known = set(self._layers)
        for stage in self.partitions:
            for name, layer in stage._modules.items():
                if layer is not present[name] and layer not in known:
                    present[name] = layer
                stage._modules[name] = present[name]
                if isinstance(layer, ConvertedLayer):
                    layer.follow_model()

    def _entering(self, input: Any) -> Any:
        if all(self._is_here[:1]):
            return entering(self._sequence, input)
        if isinstance(self._sequence, ConvertedSequence):
            self._sequence.guards.check([])
        return batch_first(input, self._batch_dim)

    def _leaving(self, output: Any) -> Any:
        """Returns what the model does, for what the last layer returned."""
        return self._sequence.leaving(output) if isinstance(self._sequence, ConvertedSequence) else output

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
        self._refresh_layers()
        return iter(self.partitions.layers().values())

    def __getitem__(self, index: int) -> nn.Module:
        if isinstance(index, slice):
            raise TypeError("a pipeline has no slices; make a model of layers with nn.Sequential(*list(pipe)[...])")
        return list(self)[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and (name in self.__dict__ or isinstance(getattr(type(self), name, None), property)):
            raise AttributeError(f"'{name}' of a pipeline is fixed; make another one by gpipe.GPipe(model, ..., {name}=...)")
        if not name.startswith("_") and name not in _SETTINGS and not hasattr(self, name):
            for near in get_close_matches(name, _SETTINGS, 1, 0.8):
                raise AttributeError(f"a pipeline has no '{name}'; did you mean '{near}'?")
        own = name in self.__dict__ and any(name in each for each in (self._modules, self._parameters, self._buffers))
        if name in _SETTINGS or own:  # the model may have a child or a tensor with the name
            self.__dict__[name] = _SETTINGS.get(name, lambda given: given)(value)
        else:
            super().__setattr__(name, value)

    # Over ranks, what another rank has is left out.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        # A parameter that another rank owns counts as a duplicate.
        hidden = {id(each) for each in self._borrowed if remove_duplicate}
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, each) for name, each in named if id(each) not in hidden and not self._is_elsewhere(each))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        named = super().named_buffers(prefix, recurse, remove_duplicate)
        return ((name, each) for name, each in named if not self._is_elsewhere(each))

    def _is_elsewhere(self, tensor: object) -> bool:
        return self.ranks is not None and isinstance(tensor, Tensor) and tensor.is_meta

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for name in [name for name, value in state.items() if self._is_elsewhere(value)]:
            del state[name]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of the unpartitioned model, or one that torchgpipe saved for any balance. Over ranks, the state of
        other ranks' layers may be there or not. Arguments and result as for ``nn.Module.load_state_dict``."""
        state = of_torchgpipe(state_dict, layers_in(self._sequence))
        others = {name: each for name, each in super().state_dict(keep_vars=True).items() if self._is_elsewhere(each)}
        if others:
            state = OrderedDict({name: each for name, each in state.items() if name not in others} | others)
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, *args: Any) -> None:
        # Also called when a module around the pipeline loads its state.
        super()._load_from_state_dict(*args)
        if self._made is not None:
            self._made.note_load()

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


def of_torchgpipe(state: Mapping[str, Any], layers: Mapping[str, nn.Module]) -> Mapping[str, Any]:
    """Returns a state with the model's keys, if torchgpipe saved it, maybe with another balance; else the state itself."""
    if "partitions" in layers or not any(key.startswith("partitions.") for key in state):
        return state
    found = OrderedDict()
    for key, value in state.items():
        name, _, rest = key.split(".", 2)[2].partition(".") if key.startswith("partitions.") else (key, "", "")
        rest = _without_wrappers(layers.get(name), rest)
        owner, _, own = rest.rpartition(".")
        modules = dict(layers[name].named_modules()) if own in ("sum", "sum_squares") and name in layers else {}
        if not isinstance(modules.get(owner), nn.modules.batchnorm._BatchNorm):  # whose sums only torchgpipe saves
            found[f"{name}.{rest}" if rest else name] = value
    return found


def _without_wrappers(layer: nn.Module | None, key: str) -> str:
    """Removes from a key of a layer's state the ``module.`` that torchgpipe adds for each skippable module."""
    if isinstance(layer, Skippable) and "module" not in layer._modules:
        key = key.removeprefix("module.")
    name, dot, rest = key.partition(".")
    child = layer._modules.get(name) if layer is not None else None
    return key if child is None else name + dot + _without_wrappers(child, rest)
