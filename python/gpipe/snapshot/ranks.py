"""Snapshots of a pipeline over ranks."""

from __future__ import annotations

from gpipe import _C
from gpipe.pipeline import GPipe
from gpipe.snapshot.snapshot import Snapshot, from_file, to_file


def gather(pipe: GPipe, mine: Snapshot) -> Snapshot:
    """Joins the snapshots that all ranks capture from a pipeline and their optimizers. All ranks call it, as ``forward``.

        whole = snapshot.gather(pipe, mine)
        if ranks.rank == 0:
            snapshot.write("latest.snapshot", whole)

    Args:
        pipe: the pipeline.
        mine: the model and the optimizer of this rank. Its other fields count on rank 0 only.

    Returns:
        On rank 0 the snapshot that one process would have captured; on other ranks one without tensors. In one process
        ``mine``. An optimizer's group lists its parameters in the order of the model. A parameter that ranks share has its
        owner's value.

    Raises:
        RuntimeError: on all ranks, if the optimizers differ in their class, groups or options, or a rank has failed.
        TypeError, ValueError: for a snapshot that cannot be written, as :func:`write`, that is not of this rank's layers, or
            whose optimizer has a parameter that another rank owns; RuntimeError on the other ranks.
    """
    if pipe.ranks is None:
        return mine
    with pipe.refusing():
        file, core, names = to_file(mine), pipe._core.pipeline(), _names(pipe)
    return from_file(*_C.gather_snapshot(core, *file, *names))


def own_part(pipe: GPipe, whole: Snapshot) -> Snapshot:
    """Returns the part of a whole model's snapshot that :func:`restore_model` and :func:`restore_optimizer` accept on this
    rank. Leaves out only the state of layers on other ranks. In one process returns ``whole``.

    Each rank restores its part: an error on one rank leaves the others restored.
    """
    if pipe.ranks is None:
        return whole
    return from_file(*_C.part_of_snapshot(*to_file(whole), *_names(pipe)))


def _names(pipe: GPipe) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the names of the whole state, each with the first name of its tensor, and the names of this rank's state."""
    return list(pipe.whole_state.items()), list(pipe.state_dict())
