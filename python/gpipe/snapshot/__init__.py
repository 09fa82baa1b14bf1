"""Saves a training state in a file and restores it, so that training continues as if it had not stopped.

    snapshot.write("latest.snapshot", snapshot.Snapshot(
        model=snapshot.capture_model(pipe),
        optimizer=snapshot.capture_optimizer(optimizer, pipe),
        epoch=epoch,
        random=torch.get_rng_state(),
    ))

    saved = snapshot.read("latest.snapshot")
    snapshot.restore_model(pipe, saved.model)
    snapshot.restore_optimizer(optimizer, pipe, saved.optimizer)
    torch.set_rng_state(saved.random)

Over ranks, all ranks capture, :func:`gather` joins their snapshots on rank 0, which writes, and each rank restores its
:func:`own_part`.

Parameters have the names of the unpartitioned model, so a snapshot fits the model at any balance. Python and C++ read
and write the same files, in the safetensors format: ``safetensors.torch.load_file(path)`` reads the weights. The names of
tensors that are not the model's begin with a dot.
"""

from __future__ import annotations

from gpipe.snapshot.model import capture_model, restore_model
from gpipe.snapshot.optimizer import OptimizerState, capture_optimizer, restore_optimizer
from gpipe.snapshot.ranks import gather, own_part
from gpipe.snapshot.snapshot import Snapshot, read, write

__all__ = [
    "OptimizerState",
    "Snapshot",
    "capture_model",
    "capture_optimizer",
    "gather",
    "own_part",
    "read",
    "restore_model",
    "restore_optimizer",
    "write",
]
