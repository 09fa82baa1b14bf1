"""Pipeline-parallel training with skip connections, for PyTorch.

pipe = gpipe.GPipe(model, balance=[2, 2], chunks=8, schedule="1f1b")
loss = pipe.step(input, target, criterion)
"""

from importlib.metadata import version as _version
from pathlib import Path as _Path

import torch as _torch  # loads the libraries that the extension module needs

_cores = {core.name: str(core) for folder in __path__ for core in _Path(folder).glob("cores/*")}  # by torch's version
if not _cores:
    _package = _Path(__file__).resolve().parent
    raise ImportError(
        f"gpipe is not built: run pip install . in {_package.parents[1]}, then start Python outside {_package.parent} "
        "and without that folder in PYTHONPATH"
    )
_INSTALL = "run pip install . in a clone of gpipe, in an environment with this torch"
_version_of_torch = ".".join(_torch.__version__.split(".")[:2])
if _version_of_torch not in _cores:
    raise ImportError(
        f"gpipe was built for torch {', '.join(sorted(_cores))}, but torch {_torch.__version__} is installed; {_INSTALL}"
    )
__path__.append(_cores[_version_of_torch])  # gpipe._C lies there
try:
    from gpipe import _C
except ImportError as error:
    raise ImportError(f"gpipe cannot be loaded with torch {_torch.__version__}: {error}; {_INSTALL}") from error

from gpipe import balance, checkpoint, data, skip, snapshot
from gpipe._C import Timeline, is_checkpointing, is_recomputing
from gpipe.balance import plan
from gpipe.exported.conversion import to_sequential
from gpipe.exported.model_file import export_model
from gpipe.losses import Loss
from gpipe.pipeline import SCHEDULES, GPipe
from gpipe.ranks import Ranks
from gpipe.verification import verify

__all__ = [
    "SCHEDULES",
    "GPipe",
    "Loss",
    "Ranks",
    "Timeline",
    "balance",
    "export_model",
    "is_checkpointing",
    "is_recomputing",
    "plan",
    "skip",
    "snapshot",
    "to_sequential",
    "verify",
]

__version__: str = _version("gpipe")
