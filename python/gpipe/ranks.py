"""The processes that run a pipeline together."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.distributed import ProcessGroup

from gpipe import _C
from gpipe.checks import check_is, check_number, checks_arguments

_MOST_SECONDS = 1e9
_ENVIRONMENT: Any = object()  # stands for the group that the environment describes


class Ranks:
    """The processes of a job, the *ranks*, which run one pipeline together, or several equal ones, the *replicas*. Each holds
    one or more workers, and the parameters of their stages. ``torchrun`` starts the processes.

        with gpipe.Ranks.from_environment() as ranks:
            pipe = gpipe.GPipe(model, [4, 3], chunks=8, group=ranks)

    Traffic is not encrypted, and whoever can read the store can join: use a private network. Make pipelines and
    ``Ranks`` on one thread at a time, in the same order on all ranks.

    Args:
        group: a process group of torch.distributed, which may be destroyed afterwards. If its back-end for GPUs is NCCL,
            pipelines on GPUs send tensors from GPU to GPU by NCCL: all workers must have GPUs then, and no two ranks the same
            one. Otherwise tensors between ranks pass through the memory of the hosts.
        timeout: the longest wait for a message within a call, in seconds. A rank that hangs is reported after this time.
        join_timeout: the longest wait for a rank, in seconds, when this or a pipeline is made and at the start of each call.
        interface: the network interface that accepts connections, such as ``"eth0"``. Default: ``GLOO_SOCKET_IFNAME`` in
            the environment, or else the interface that reaches the store.
        replicas: the number of equal pipelines, a divisor of the number of processes. Each trains on its own part of the
            mini-batch, and their gradients are summed.
        share_outputs: whether the outputs of ``forward()`` and of ``step(..., return_output=True)`` go to all ranks of their
            replica. Otherwise only the rank of the last stage has their values. On the others they are on the ``meta`` device:
            they have shapes, and a ``backward()``. The same on all ranks.

    Raises:
        TypeError: if ``group`` is not a process group that this process belongs to.
        ValueError: for a time-out that is not positive, an interface that other hosts cannot reach, or a wrong number of
            replicas.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
        replica: the replica that this process belongs to, from 0. ``ranks.part(len(x))`` is its part of a mini-batch.
        replicas: the number of replicas.
    """

    @checks_arguments
    def __init__(
        self,
        group: ProcessGroup,
        *,
        timeout: float | timedelta = 300.0,
        join_timeout: float | timedelta = 1800.0,
        interface: str = "",
        replicas: int = 1,
        share_outputs: bool = False,
    ) -> None:
        given: Any = None
        if group is not _ENVIRONMENT:
            given = check_is(group, "group", ProcessGroup, "a process group that this process belongs to")
        times = _seconds(timeout, "timeout"), _seconds(join_timeout, "join_timeout")
        join_devices = None if given is None else _join_by_nccl(given, timedelta(seconds=times[1]))
        self._core = core = _C.Ranks(given, *times, interface, replicas, share_outputs, join_devices)
        self.rank, self.size, self.replica, self.replicas = core.rank, core.size, core.replica, core.replicas
        self._pipelines: WeakSet[_C.Pipeline] = WeakSet()
        _unfinished.append(self)
        # Processes that multiprocessing has forked do not run atexit's functions.
        multiprocessing.util.Finalize(None, _finish_all, exitpriority=100)

    @classmethod
    def from_environment(
        cls,
        *,
        timeout: float | timedelta = 300.0,
        join_timeout: float | timedelta = 1800.0,
        interface: str = "",
        replicas: int = 1,
        share_outputs: bool = False,
    ) -> Ranks:
        """Joins the job that torchrun describes in the environment: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
        ``MASTER_PORT``. Needs no process group. Tensors pass through the memory of the hosts. Options and errors as for the
        constructor; also raises ValueError for a variable that is missing or not valid, and RuntimeError if the store cannot
        be served or reached."""
        return cls(
            _ENVIRONMENT,
            timeout=timeout,
            join_timeout=join_timeout,
            interface=interface,
            replicas=replicas,
            share_outputs=share_outputs,
        )

    def part(self, samples: int, replica: int | None = None) -> slice:
        """Returns the part of a mini-batch that belongs to a replica, by default this process's. The first replica's part is
        the largest. The last one's has at most one sample less, and can be empty."""
        return slice(*self._core.part(samples, self.replica if replica is None else replica))

    @checks_arguments
    def share(self, text: str) -> str:
        """Returns rank 0's text on all ranks, which call it in the same order and wait for it. For short texts, before
        pipelines are made. Raises RuntimeError if a rank has failed, or rank 0 does not come in ``join_timeout``."""
        return self._core.share(text)

    def finish(self) -> None:
        """Leaves the job: pipelines cannot be used afterwards. Waits until the other ranks have left too, for at most
        ``timeout``. The end of a ``with`` block, or of the program, calls it. After an exception these do not wait: they tell
        the other ranks, whose calls raise an exception that quotes it."""
        self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        if self in _unfinished:
            _unfinished.remove(self)
        text = ""
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            text = "".join(traceback.format_exception_only(error)).strip()
        elif any(pipeline.busy for pipeline in self._pipelines):
            text = "it ended during a call"
        self._core.finish(text)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._finish(error)

    def __reduce__(self) -> str:
        raise TypeError("Ranks belong to this process, so they cannot be copied or pickled")


def _seconds(time: float | timedelta, name: str) -> float:
    seconds = time.total_seconds() if isinstance(time, timedelta) else check_number(time, name)
    if not 0 < seconds < _MOST_SECONDS:
        raise ValueError(f"{name} must be positive and below {_MOST_SECONDS:g} seconds, but is {seconds:g}")
    return seconds


def _join_by_nccl(group: ProcessGroup, limit: timedelta) -> Callable[[str, int, int], Any] | None:
    """Returns what makes groups of ranks with a GPU each, whose transfers take at most ``limit``. ``None`` if the process group
    has another back-end for GPUs than NCCL."""
    try:
        if group._get_backend(torch.device("cuda")).name() != "nccl":
            return None
    except RuntimeError:  # it has none
        return None
    store = group.get_group_store().clone()  # a wait blocks the connection to the store, so these groups have their own

    from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupNCCL  # not in a PyTorch without CUDA

    def join(name: str, rank: int, size: int) -> ProcessGroupNCCL:
        # Streams of another pool than a pipeline's, so that no computation waits behind a transfer.
        options: Any = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout, options.group_name, options.config.blocking = limit, name, 1
        return ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)

    return join


_unfinished: list[Ranks] = []
_of_groups: WeakKeyDictionary[ProcessGroup, Ranks] = WeakKeyDictionary()


def ranks_of(group: ProcessGroup | Ranks | None) -> Ranks | None:
    """Returns the ranks of a process group, one object per group. Returns ``None`` for ``None``, with a warning in a job of
    several processes. Raises TypeError for anything else."""
    if group is None and os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the pipeline gets no group, so each process trains a whole pipeline "
            "of its own; pass group=gpipe.Ranks.from_environment(), or wrap each pipeline in DistributedDataParallel"
        )
    if group is None or isinstance(group, Ranks):
        return group
    ranks = _of_groups.get(group) if isinstance(group, ProcessGroup) else None
    if ranks is None or ranks not in _unfinished:
        ranks = _of_groups[group] = Ranks(group)
    return ranks


def on_rank_0(ranks: Ranks | None, work: Callable[[], str]) -> str:
    """Returns on all ranks what ``work`` returns on rank 0. Raises its exception there, RuntimeError elsewhere."""
    if ranks is None:
        return work()
    if ranks.rank == 0:
        try:
            text = work()
        except Exception as error:
            ranks.share(f"-{type(error).__name__}: {error}")
            raise
        return ranks.share(f"+{text}")[1:]
    text = ranks.share("")
    if text.startswith("-"):
        raise RuntimeError(f"rank 0 failed: {text[1:]}")
    return text[1:]


@atexit.register
def _finish_all() -> None:
    """Leaves all jobs. Tells the other ranks if an exception ends the program."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_exc", getattr(sys, "last_value", None))
    for ranks in list(_unfinished):
        ranks._finish(error)
