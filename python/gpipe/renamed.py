"""Old names, which work with a warning and will go in the next release."""

import warnings
from typing import Any

NEW_NAMES = {
    "gpipe.GPipe.loss": "compute_loss",
    "gpipe.GradScaler": "PipelineGradScaler",
    "gpipe.checkpoint.is_checkpointing": "is_checkpointing",
    "gpipe.checkpoint.is_recomputing": "is_recomputing",
    "gpipe.reference": "run_unpartitioned",
}


def renamed(old: str, owner: Any) -> Any:
    """Returns the attribute of ``owner`` that an old name, such as ``'gpipe.reference'``, stands for. Warns the caller's
    caller. Raises AttributeError for a name that is not old."""
    if old not in NEW_NAMES:
        module, _, name = old.rpartition(".")
        raise AttributeError(f"module '{module}' has no attribute '{name}'", name=name, obj=owner)
    new = NEW_NAMES[old]
    message = f"{old} is now called {new}; the old name will go in the next release"
    warnings.warn(message, FutureWarning, stacklevel=3)
    return getattr(owner, new)
