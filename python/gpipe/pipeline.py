"""The container: a sequential model, cut into stages that run in parallel."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from gpipe import _C
from gpipe.batchnorm import DeferredBatchNorm, one_mini_batch
from gpipe.caller import outside_checkpoints, prepare_compilation, refuse_sharded_layers, refuse_tracing
from gpipe.checks import BalanceError, check_balance, check_checkpoint, check_chunks, place_stages
from gpipe.generators import without_turn
from gpipe.model_checks import verify_module
from gpipe.names import UnpartitionedNames
from gpipe.partition import Partition, Stages, layers_of, split
from gpipe.placement import FixedPlacement
from gpipe.skip import verify_skippables
from gpipe.structure import take_apart

__all__ = ["BalanceError", "GPipe", "Partition"]


class GPipe(UnpartitionedNames, FixedPlacement):
    """Trains a ``nn.Sequential`` over several devices. Cuts it into stages by a balance, each with a worker thread and
    a device, and runs each mini-batch as micro-batches through them (GPipe, Huang et al., arXiv:1811.06965).

        model = nn.Sequential(a, b, c, d)
        pipe = gpipe.GPipe(model, balance=[1, 1, 1, 1], chunks=8)
        loss = criterion(pipe(input), target)
        loss.backward()

    It computes the function of the unpartitioned model run micro-batch by micro-batch. Losses, optimizers, hooks,
    ``torch.autograd.grad``, autocast and ``DistributedDataParallel`` around it work as without a pipeline, except
    ``create_graph``, which is refused. The layers are the caller's own modules, moved to their devices.
    ``state_dict()`` has the keys of the unpartitioned model.

    Forward and backward may be called from any thread except the pipeline's workers; calls take turns.

    Args:
        module: the model. Each layer is called with the output of the layer before it. Between stages, and as the
            result, pass tensors, alone or in tuples, named tuples, lists and dicts, which may hold ``None``.
        balance: the number of layers of each stage; see :mod:`gpipe.balance`.
        devices: one per stage; surplus devices are ignored. A device may be given more than once. Default: the GPUs, or
            the CPU for each stage if there are no GPUs.
        chunks: the most micro-batches that a mini-batch is cut into, along dimension 0. Each but the last has
            ceil(samples / chunks) samples, so there may be fewer micro-batches.
        checkpoint: which micro-batches recompute their forward in training mode instead of storing its graph:
            ``'always'``, ``'except_last'`` or ``'never'``.
        deferred_batch_norm: whether batch norm updates its running statistics once per mini-batch, with the mean and
            variance of all of it, instead of once per micro-batch.

    Raises:
        TypeError: if ``module`` is not a ``nn.Sequential`` or has a ``forward`` of its own, if its skips do not match
            (see :func:`gpipe.skip.verify_skippables`), or if an argument has the wrong type.
        ValueError: if ``balance`` does not cut the model or an option is out of range; if a layer stands in two places,
            or a parameter in two layers; if ``module`` itself has hooks, parameters or buffers; if a parameter is not
            initialized.
        IndexError: for fewer devices than stages, or a device that this process does not have.

    Attributes:
        balance: the number of layers of each stage.
        devices: the device of each stage.
        partitions: the stages, each a :class:`gpipe.pipeline.Partition`.
    """

    balance: list[int]

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
        self.devices = place_stages(devices, len(self.balance))
        self.deferred_batch_norm = bool(deferred_batch_norm)
        self.partitions = Stages(split(module, self.balance, self.devices))
        self.training = module.training
        self._core_lock = threading.RLock()
        self._core: _C.Pipeline | None = None
        self._layers: list[nn.Module] = []  # of the core
        self._norms: list[DeferredBatchNorm] = []
        if self.balance:
            self._pipeline()  # raises what the core refuses

    @property
    def chunks(self) -> int:
        """The most micro-batches that a mini-batch is cut into. May be assigned."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = check_chunks(chunks)

    @property
    def checkpoint(self) -> str:
        """Which micro-batches recompute their forward. May be assigned."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._checkpoint = check_checkpoint(checkpoint)

    def extra_repr(self) -> str:
        devices = ", ".join(str(device) for device in self.devices)
        text = f"balance={self.balance}, devices=[{devices}], chunks={self.chunks}, checkpoint='{self.checkpoint}'"
        return f"{text}, deferred_batch_norm=True" if self.deferred_batch_norm else text

    # A sequence of layers, not of stages.

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._stages())

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._stages():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        if isinstance(index, slice):
            raise TypeError("a pipeline has no slices; make a model of layers with nn.Sequential(*list(pipe)[...])")
        return list(self)[index]

    def forward(self, input: Any) -> Any:
        """Runs the whole model on one mini-batch. An exception of a layer is raised unchanged, with a note that names
        the stage, the micro-batch and the layer.

        Args:
            input: tensors, alone or in tuples, named tuples, lists and dicts, which may hold ``None``. Dimension 0 is
                the batch, of the same size in all tensors.

        Returns:
            The output of the last layer for the whole mini-batch, with its tensors on the last stage's device.

        Raises:
            TypeError: if the input, or the output of a stage, holds anything but tensors and ``None``.
            ValueError: if an input has no dimensions, or if the inputs have unequal batch sizes.
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
        with one_mini_batch(self._norms), without_turn(), outside_checkpoints():
            return pipeline.forward(input, self._chunks, checkpoint)

    def trace(self, timeline: _C.Timeline | None) -> None:
        """Records the actions of each later mini-batch in a timeline.

        On GPUs, the workers then wait for each action to end, so that the times are right. No bytes are counted while a
        PyTorch profiler runs. Read the timeline while no call runs.

        Args:
            timeline: the timeline to append to; ``None`` ends the recording.
        """
        self._pipeline().trace(timeline)

    # A copy or a pickle is a pipeline of its own, which makes its core at its first call.

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_core_lock"]
        state["_core"] = None
        state["_layers"] = []
        state["_norms"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._core_lock = threading.RLock()

    def _pipeline(self) -> _C.Pipeline:
        """Returns the core. Makes a new one if layers have been replaced."""
        prepare_compilation()
        with self._core_lock:
            layers = list(self)
            if self._core is None or any(a is not b for a, b in zip_longest(layers, self._layers)):
                self._layers = layers
                stages = [(partition, layers_of(partition)) for partition in self._stages()]
                devices = [str(device) for device in self.devices]
                self._core = _C.Pipeline(stages, devices, self.deferred_batch_norm)
                self._norms = [module for module in self.modules() if isinstance(module, DeferredBatchNorm)]
            return self._core
