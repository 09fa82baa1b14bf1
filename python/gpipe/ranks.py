"""The processes that run a pipeline together."""

from __future__ import annotations

import atexit
import sys
import traceback
from datetime import timedelta
from types import TracebackType

from torch.distributed import ProcessGroup

from gpipe import _C
from gpipe.checks import check_number

__all__ = ["Ranks", "core_of", "ranks_of"]


class Ranks:
    """The processes of a job, which run one pipeline together. Each process, a *rank*, holds one or more workers, and the
    parameters of their stages. ``torchrun`` starts the processes.

        with gpipe.Ranks.from_environment() as ranks:
            pipe = gpipe.GPipe(model, [4, 3], chunks=8, group=ranks)

    Traffic between ranks is neither encrypted nor authenticated. It belongs on a private network.

    Make pipelines and ``Ranks`` on one thread at a time, in the same order on all ranks.

    Args:
        group: the processes, as a process group of torch.distributed, such as one of a ``DeviceMesh``. Only its store is
            used, so its back-end does not matter. The group may be destroyed afterwards.
        timeout: the longest wait for a message within a call, in seconds. A rank that stops or hangs is reported after
            this time.
        join_timeout: the longest wait for a rank to join, in seconds: when a pipeline is made, and at the start of each call.
        interface: the network interface that accepts connections, such as ``"eth0"``. Default: ``GLOO_SOCKET_IFNAME`` in
            the environment, or else the interface that reaches the store: the loopback interface on one host.

    Raises:
        TypeError: if ``group`` is not a process group of which this process is a member.
        ValueError: for a time-out that is not positive, or an interface that other hosts cannot reach.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        timeout: float | timedelta = 300.0,
        join_timeout: float | timedelta = 1800.0,
        interface: str = "",
    ) -> None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"group must be a process group of which this process is a member, but is {group!r}")
        self._core = _C.Ranks.from_group(group, _seconds(timeout), _seconds(join_timeout), interface)
        _unfinished.append(self)

    @classmethod
    def from_environment(
        cls,
        *,
        timeout: float | timedelta = 300.0,
        join_timeout: float | timedelta = 1800.0,
        interface: str = "",
    ) -> Ranks:
        """Joins the job that torchrun describes in the environment: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
        ``MASTER_PORT``. Needs no process group. Arguments as for the constructor.

        Raises:
            ValueError: for a variable that is missing or not valid.
            RuntimeError: if the store cannot be served or reached.
        """
        ranks = cls.__new__(cls)
        ranks._core = _C.Ranks.from_environment(_seconds(timeout), _seconds(join_timeout), interface)
        _unfinished.append(ranks)
        return ranks

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._core.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._core.size

    def share(self, text: str) -> str:
        """Returns rank 0's text on all ranks, which wait for it. All ranks call it in the same order. The texts of the other
        ranks are ignored. Serves short texts, before pipelines are made.

        Raises:
            RuntimeError: if a rank has failed, or rank 0 does not come within ``join_timeout``.
        """
        return self._core.share(text)

    def finish(self) -> None:
        """Leaves the job. Pipelines cannot be used afterwards, and calls that other ranks begin raise an exception. Waits until
        the other ranks have left too, for at most ``timeout``.

        Called at the end of a ``with`` block, and at the end of the program. After an exception these do not wait: they tell
        the other ranks, whose calls raise an exception that quotes it.
        """
        self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        if self in _unfinished:
            _unfinished.remove(self)
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        self._core.finish("".join(traceback.format_exception_only(error)).strip() if failed else "")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(error)

    def __reduce__(self) -> str:
        raise TypeError("Ranks belong to this process, so they cannot be copied or pickled")


def _seconds(time: float | timedelta) -> float:
    return time.total_seconds() if isinstance(time, timedelta) else check_number(time, "a time-out")


_unfinished: list[Ranks] = []
_of_groups: dict[str, Ranks] = {}


def ranks_of(group: ProcessGroup | Ranks) -> Ranks:
    """Returns the ranks of a process group: the same for all pipelines of the group.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(group, Ranks):
        return group
    name = getattr(group, "group_name", "")
    if name not in _of_groups or _of_groups[name] not in _unfinished:
        _of_groups[name] = Ranks(group)
    return _of_groups[name]


def core_of(ranks: Ranks | None) -> _C.Ranks | None:
    """Returns the part of ranks that the extension module takes."""
    return None if ranks is None else ranks._core


@atexit.register
def _finish_all() -> None:
    """Leaves all jobs. Tells the other ranks if an exception ends the program."""
    interactive = hasattr(sys, "ps1")
    error = None if interactive else getattr(sys, "last_exc", getattr(sys, "last_value", None))
    for ranks in list(_unfinished):
        ranks._finish(error)
