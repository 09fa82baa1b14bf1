"""The container: a sequential model, cut into stages that run at once."""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe import _C
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.caller import outside_checkpoints, refuse_sharded_layers, refuse_tracing
from gpipe.checks import BalanceError, check_balance, check_checkpoint, check_chunks, place
from gpipe.generators import Draws, shared
from gpipe.skip import Skippable, native_keys, skippables_in, verify_skippables
from gpipe.structure import take_apart

__all__ = ["BalanceError", "GPipe", "Partition"]


class Partition(nn.Sequential):
    """The layers of one stage. Called like any ``nn.Sequential``; a pipeline calls it on the stage's own thread."""

    def forward(self, input: Any) -> Any:
        draws: Draws = self.__dict__.setdefault("_draws", Draws())
        return draws(self._run, input)

    def _run(self, input: Any) -> Any:
        for index, layer in enumerate(self):
            _C.begin_layer(self, index)
            input = layer(input)
        return input


class _Stages(nn.ModuleList):
    """The stages, whose numbers torch.distributed.checkpoint leaves out of names."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {f"stage {index}": str(index) for index in range(len(self))}


class GPipe(nn.Module):
    """Trains a ``nn.Sequential`` over several devices: cuts it into stages by a balance, one worker thread and one
    device a stage, and runs each mini-batch as micro-batches through them (GPipe, Huang et al., arXiv:1811.06965).

        model = nn.Sequential(a, b, c, d)
        pipe = gpipe.GPipe(model, balance=[1, 1, 1, 1], chunks=8)
        loss = criterion(pipe(input), target)
        loss.backward()

    It computes the function of the unpartitioned model run micro-batch by micro-batch; losses, optimizers, hooks,
    ``torch.autograd.grad``, autocast and ``DistributedDataParallel`` around it work as ever. The layers are the
    caller's own modules, moved to their devices, and ``state_dict()`` has the keys of the unpartitioned model.

    Args:
        module: the layers, each called with what the one before it returns. Between stages, and from the last layer,
            that is a tensor; or tensors in tuples, named tuples, lists and dicts, which may hold ``None``.
        balance: how many layers each stage has; see :mod:`gpipe.balance`.
        devices: one for each stage; surplus ones are ignored. Without, the GPUs, or where there are none a CPU worker
            a stage. A device may be given more than once.
        chunks: micro-batches that a mini-batch is cut into, along dimension 0. Each has ceil(samples / chunks) samples,
            so there may be fewer of them.
        checkpoint: which micro-batches recompute their forward in training instead of storing it: ``'always'``,
            ``'except_last'`` or ``'never'``.
        deferred_batch_norm: batch norm updates its running statistics once a mini-batch, with the mean and variance of
            all of it, instead of once a micro-batch.

    Raises:
        TypeError: ``module`` is not a ``nn.Sequential``, or has a ``forward`` of its own, or its skips do not match
            (see :func:`gpipe.skip.verify_skippables`); an argument of the wrong type.
        ValueError: ``balance`` does not cut the model, or an option makes no sense; layers that stand in two places,
            parameters in two layers; hooks, parameters or buffers of ``module`` itself, which belong to no layer;
            parameters that are not initialised.
        IndexError: fewer devices than stages, or one that is not there.

    Attributes:
        balance: how many layers each stage has.
        devices: one for each stage.
        partitions: the stages, a :class:`gpipe.pipeline.Partition` each.
    """

    balance: list[int]
    devices: list[torch.device]
    partitions: nn.ModuleList

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | int | str] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._chunks = check_chunks(chunks)
        self._checkpoint = check_checkpoint(checkpoint)
        verify_module(module)
        verify_skippables(module)
        self.balance = check_balance(balance, len(module))
        self.devices = place(devices, len(self.balance))
        self.deferred_batch_norm = bool(deferred_batch_norm)
        self.partitions = _Stages(_split(module, self.balance, self.devices))
        self.training = module.training
        self._making = threading.RLock()
        self._core: _C.Pipeline | None = None
        self._layers: list[nn.Module] = []  # of the core
        self._norms: list[DeferredBatchNorm] = []
        self.register_load_state_dict_post_hook(_name_missing)  # type: ignore[no-untyped-call]
        if self.balance:
            self._pipeline()  # which refuses what it cannot run

    @property
    def chunks(self) -> int:
        """Micro-batches that a mini-batch is cut into; may be assigned."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = check_chunks(chunks)

    @property
    def checkpoint(self) -> str:
        """Which micro-batches recompute their forward; may be assigned."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._checkpoint = check_checkpoint(checkpoint)

    # The layers, not the stages.

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._stages())

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._stages():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        if isinstance(index, slice):
            raise TypeError("a pipeline has no slices; build a nn.Sequential of list(pipe)[...]")
        return list(self)[index]

    # By name, for functions that follow the names of parameters.

    def __getattr__(self, name: str) -> Any:
        stage = self._stage_with(name)
        return super().__getattr__(name) if stage is None else stage._modules[name]

    def __setattr__(self, name: str, value: Any) -> None:
        stage = self._stage_with(name) if isinstance(value, nn.Module) else None
        if stage is None:
            super().__setattr__(name, value)
        else:
            stage._modules[name] = value

    def _stage_with(self, name: str) -> nn.Module | None:
        stages = self.__dict__.get("_modules", {}).get("partitions", ())
        return next((stage for stage in stages if name in stage._modules), None)

    # Where the parameters are is the pipeline's affair.

    def cuda(self, device: Any = None) -> GPipe:
        return self._stay(torch.device("cuda" if device is None else device))

    def cpu(self) -> GPipe:
        return self._stay(torch.device("cpu"))

    def xpu(self, device: Any = None) -> GPipe:
        return self._stay(torch.device("xpu" if device is None else device))

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        raise _denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Changes the dtype of parameters and buffers. A device is accepted where everything is there already.

        Raises:
            TypeError: for a device to which something would have to move.
        """
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self._stay(device)
        super().to(*args, **kwargs)
        return self

    def _stay(self, device: torch.device) -> GPipe:
        """Itself, if everything is on the device already."""
        wanted = _with_index(device)
        places = [*self.devices, *(tensor.device for tensor in [*self.parameters(), *self.buffers()])]
        if any(_with_index(is_at) != wanted for is_at in places):
            raise _denied()
        return self

    def forward(self, input: Any) -> Any:
        """Runs the whole model on one mini-batch. What a layer raises comes out as it is, with a note of the stage, the
        micro-batch and the layer.

        Args:
            input: a tensor; or tensors in tuples, named tuples, lists and dicts, which may hold ``None``. Dimension 0
                is the batch, and of the same size for all.

        Returns:
            What the last layer returns, of the same types, its tensors on the last stage's device.

        Raises:
            TypeError: for an input, or what a stage passes on, of other types.
            ValueError: for an input without dimensions, or inputs of unequal batch sizes.
            NotImplementedError: under ``torch.export``, ``make_fx``, ``FakeTensorMode``, ``torch.jit.trace``,
                ``torch.func`` and forward-mode differentiation.
        """
        refuse_tracing()
        refuse_sharded_layers(self.partitions)
        if not self.balance:
            take_apart(input)
            return input
        checkpoint = self._checkpoint if self.training else "never"
        pipeline = self._pipeline()
        for norm in self._norms:
            norm.begin_mini_batch()
        try:
            with shared(), outside_checkpoints():
                output = pipeline.forward(input, self._chunks, checkpoint)
            for norm in self._norms:
                norm.commit()
            return output
        finally:
            for norm in self._norms:
                norm.end_mini_batch()

    def trace(self, timeline: _C.Timeline | None) -> None:
        """From now on each mini-batch appends what ran to the timeline, to be read while no call runs; ``None`` ends
        it. On GPUs each action is then waited for. While a profiler of PyTorch's is at work, no bytes are counted."""
        self._pipeline().trace(timeline)

    # Names are the unpartitioned model's.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield _without_stage(name, prefix and f"{prefix}."), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield _without_stage(name, prefix and f"{prefix}."), buffer

    def _fqn_modifiers(self) -> dict[str, str]:
        """Its values are what torch.distributed.checkpoint leaves out of names."""
        return {"": "partitions"}

    # States have the unpartitioned model's keys; within this module they are those of `partitions`.

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of the unpartitioned model, as ``nn.Module.state_dict``."""
        given = [*args, destination, prefix, keep_vars][: len(args)]  # by position, as PyTorch allows
        destination, prefix, keep_vars = [*given, *[destination, prefix, keep_vars][len(given) :]]
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        inner = f"{prefix}partitions."
        for key in [key for key in state if key.startswith(inner)]:
            state[_without_stage(key, prefix)] = state.pop(key)
        metadata = getattr(state, "_metadata", {})
        for key in [key for key in metadata if key.startswith(inner)]:
            # Both: a pipeline's own children look for theirs.
            if name := key[len(inner) :].partition(".")[2]:
                metadata[prefix + name] = metadata[key]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of the unpartitioned model, or one that torchgpipe has saved, cut in any way."""
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = OrderedDict(state_dict)
            inner = {
                f"partitions.{j}.{key}": value
                for j, stage in enumerate(self._stages())
                for key, value in metadata.items()
                if key.partition(".")[0] in stage._modules
            }
            state_dict._metadata = {**metadata, **inner}  # type: ignore[attr-defined]
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        stage_of = {name: j for j, stage in enumerate(self._stages()) for name, _ in stage.named_children()}
        layers = {name: layer for stage in self._stages() for name, layer in stage.named_children()}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name, _, rest = key[len(prefix) :].partition(".")
            if name == "partitions" and name not in stage_of:  # of torchgpipe, maybe cut otherwise
                name, _, rest = rest.partition(".")[2].partition(".")
                rest = _without_wrappers(layers.get(name), rest)
                if _is_deferred_sum(layers.get(name), rest):
                    del state_dict[key]
                    continue
            if name in stage_of:
                state_dict[f"{prefix}partitions.{stage_of[name]}.{name}.{rest}"] = state_dict.pop(key)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    # Copies and pickles are pipelines of their own.

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_making"]
        state["_core"] = None
        state["_layers"] = []
        state["_norms"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._making = threading.RLock()

    def _stages(self) -> list[Partition]:
        return list(self.partitions)  # type: ignore[arg-type]

    def _pipeline(self) -> _C.Pipeline:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and dynamo.cached_backends:  # something is to be compiled
            # Without GPUs, the first thread to compile leaves to all a device guard that ends with it, and the next
            # compilation crashes (PyTorch 2.11). So let it be the caller's, not one of the pipeline's own.
            torch._C._ensureCUDADeviceGuardSet()
        with self._making:
            layers = list(self)
            if self._core is None or any(a is not b for a, b in zip_longest(layers, self._layers)):
                self._layers = layers
                stages = [(partition, layers_of(partition)) for partition in self._stages()]
                devices = [str(device) for device in self.devices]
                self._core = _C.Pipeline(stages, devices, self.deferred_batch_norm)
                self._norms = [module for module in self.modules() if isinstance(module, DeferredBatchNorm)]
            return self._core


_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
    "_state_dict_pre_hooks": "a state-dict pre-hook",
    "_state_dict_hooks": "a state-dict hook",
    "_load_state_dict_pre_hooks": "a load-state-dict pre-hook",
    "_load_state_dict_post_hooks": "a load-state-dict post-hook",
}


def _verify_own(module: nn.Sequential) -> None:
    """A pipeline takes over the layers, and nothing else of the model."""
    kind = type(module)
    plain = kind.forward in (nn.Sequential.forward, Partition.forward) and kind.__call__ is nn.Module.__call__
    if not plain or "forward" in vars(module) or module._compiled_call_impl is not None:
        raise TypeError(
            f"the model ({kind.__name__}) has a forward of its own, or is compiled as a whole, but a pipeline calls "
            "only its layers; move what the forward does into layers, compile the layers, or give "
            "nn.Sequential(*model) where that computes the same"
        )
    own = [what for attribute, what in _HOOKS.items() if getattr(module, attribute)]
    own += [f"a parameter ('{name}')" for name, value in module._parameters.items() if value is not None]
    own += [f"a buffer ('{name}')" for name, value in module._buffers.items() if value is not None]
    if own:
        raise ValueError(
            f"the model itself, not one of its layers, has {', '.join(own)}, which a pipeline would lose; register "
            "parameters and buffers in a layer, hooks on a layer or on the pipeline"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' is not initialised yet, as in lazy layers: run the unpartitioned model once, on a sample"
            )


def verify_module(module: nn.Sequential) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, but is {type(module)}")
    children = list(module._modules.items())
    _verify_own(module)
    if len({id(layer) for _, layer in children}) != len(children):
        raise ValueError("module with duplicate children is not supported")
    owners: dict[int, str] = {}
    for name, layer in children:
        for parameter in layer.parameters():
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                raise ValueError(
                    "module with duplicate parameters in distinct children is not supported: "
                    f"'{owner}' and '{name}' share one"
                )


def _split(module: nn.Sequential, balance: list[int], devices: list[torch.device]) -> Iterator[Partition]:
    layers = iter(module.named_children())
    for number, device in zip(balance, devices):
        partition = Partition()
        for _ in range(number):
            partition.add_module(*next(layers))
        partition.to(device)
        partition.training = module.training
        yield partition


def layers_of(module: nn.Sequential) -> list[tuple[str, nn.Module, list[Any]]]:
    """Layers as the extension module takes them: name, module, what each skippable module in it stashes and pops."""
    return [
        (
            name,
            layer,
            [
                (skippable, native_keys(skippable.stashable()), native_keys(skippable.poppable()))
                for _, skippable in skippables_in(layer, name)
            ],
        )
        for name, layer in module.named_children()
    ]


def _without_stage(name: str, prefix: str) -> str:
    """The unpartitioned model's name of what is called <prefix>partitions.<stage>.<name> here."""
    inner = f"{prefix}partitions."
    return prefix + name[len(inner) :].partition(".")[2] if name.startswith(inner) else name


def _name_missing(module: nn.Module, incompatible: Any) -> None:
    """Names missing keys as the unpartitioned model does."""
    for keys in incompatible:
        keys[:] = [re.sub(r"(^|\.)partitions\.\d+\.", r"\1", key) for key in keys]


def _without_wrappers(layer: nn.Module | None, key: str) -> str:
    """A key of a layer's state without the `module.` that torchgpipe puts before that of each skippable module."""
    if isinstance(layer, Skippable) and "module" not in layer._modules:
        key = key.removeprefix("module.")
    name, dot, rest = key.partition(".")
    child = layer._modules.get(name) if layer is not None else None
    return key if child is None else name + dot + _without_wrappers(child, rest)


def _is_deferred_sum(layer: nn.Module | None, key: str) -> bool:
    """Whether a key of a layer's state is of torchgpipe's deferred batch norm alone."""
    owner, _, name = key.rpartition(".")
    if layer is None or name not in ("sum", "sum_squares"):
        return False
    module = dict(layer.named_modules()).get(owner)
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _with_index(device: torch.device) -> torch.device:
    """A device as its tensors name it: without an index, an accelerator's current one is meant."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and torch.accelerator.is_available():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _denied() -> TypeError:
    return TypeError(
        "denied to move parameters and buffers, because GPipe should manage device placement; give it devices=[...]"
    )
