"""The C++ pipeline behind a :class:`gpipe.GPipe`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from torch import nn

from gpipe import _C
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.caller import prepare_compilation
from gpipe.checks import Workers
from gpipe.partition import Partition, Stages, borrowed_across_ranks, layers_of, split
from gpipe.ranks import Ranks


class Core:
    """Cuts a model into stages, and makes the C++ pipeline that runs them when first needed. A copy makes its own. Stages of
    other ranks lose their layers when the C++ pipeline is made."""

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
        rank = 0 if ranks is None else ranks.rank
        self.ranks = ranks
        self.devices, self.placement = workers.devices, workers.placement
        self._is_here = [workers.ranks[worker] == rank for worker in self.placement]
        own_devices = [device for device, at in zip(self.devices, workers.ranks) if at == rank]
        native_ranks = None if ranks is None else ranks._core
        self._schedule = schedule
        self._options = own_devices, self.placement, deferred_batch_norm, keep_memory, native_ranks
        of_stages = [self.devices[worker] for worker in self.placement]
        self.stages = Stages(split(module, balance, of_stages, self._is_here))
        self.borrowed = borrowed_across_ranks(list(self.stages), self._is_here)  # parameters of this rank's layers
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._pipeline: _C.Pipeline | None = None
        self._layers: list[nn.Module] = []  # of the C++ pipeline
        self.norms: list[DeferredBatchNorm] = []  # of these layers

    def pipeline(self) -> _C.Pipeline:
        """Returns the C++ pipeline. Makes a new one if layers were replaced, or if stages share other parameters."""
        prepare_compilation()
        with self._lock:
            layers = self.stages.layers().values()
            replaced = any(a is not b for a, b in zip_longest(layers, self._layers))
            if self._pipeline is not None and not replaced and self._pipeline.refresh():
                return self._pipeline
            if self._pipeline is not None and self.ranks is not None:
                raise RuntimeError(
                    "layers or shared parameters of this pipeline were replaced; over ranks, make a new pipeline "
                    "on all ranks"
                )
            stages = [(stage, layers_of(stage)) for stage in self.stages]
            self._pipeline = _C.Pipeline(stages, self.schedule, *self._options)
            if self.ranks is not None:
                self.ranks.add(self._pipeline)
                for index, stage in enumerate(self.stages):
                    if not self._is_here[index]:
                        self.stages[index] = Partition().train(stage.training)
            self._layers = list(self.stages.layers().values())
            self.norms = [module for module in self.stages.modules() if isinstance(module, DeferredBatchNorm)]
            return self._pipeline

    @property
    def schedule(self) -> str:
        """The schedule of steps, which ``'auto'`` becomes in the first one."""
        if self._pipeline is not None:
            self._schedule = self._pipeline.schedule()
        return self._schedule

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes the other ranks' call raise an exception if the block, which prepares the same call, does."""
        try:
            yield
        except Exception as error:
            if self.ranks is not None and self._pipeline is not None:
                self._pipeline.withdraw(f"{type(error).__name__}: {error}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks is not None:
            raise TypeError("a pipeline over ranks cannot be copied or pickled; save its state_dict()")
        made = ("_lock", "_pipeline", "_layers", "norms")  # by _forget()
        return {name: value for name, value in self.__dict__.items() if name not in made} | {"_schedule": self.schedule}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
