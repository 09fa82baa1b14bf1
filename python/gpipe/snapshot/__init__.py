"""All that a training needs to go on as if it had never stopped, in one file: the one that the C++ programs write.

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

Everything goes by the names that the unpartitioned model gives its parameters, so that a snapshot fits the model at any
balance, in Python and in C++. The file is a zip pickle of a plain dict, with a key for each field of :class:`Snapshot`:
``torch.load(path, weights_only=True)`` reads it without this package.
"""

from __future__ import annotations

from gpipe.snapshot.model import capture_model, restore_model
from gpipe.snapshot.optimizer import OptimizerState, capture_optimizer, restore_optimizer
from gpipe.snapshot.snapshot import Snapshot, read, write

__all__ = [
    "OptimizerState",
    "Snapshot",
    "capture_model",
    "capture_optimizer",
    "read",
    "restore_model",
    "restore_optimizer",
    "write",
]
