"""Pipeline-parallel training with skip connections, for PyTorch.

    pipe = gpipe.GPipe(model, balance=[2, 2], chunks=8)
    loss = criterion(pipe(input), target)
    loss.backward()
"""

from importlib.metadata import version as _version

import torch as _torch  # which loads the libraries that the extension module needs

try:
    from gpipe import _C
except ImportError as error:
    raise ImportError(
        f"gpipe cannot be loaded beside torch {_torch.__version__}: {error}. "
        "Install it again, in an environment that has this torch: pip install --no-build-isolation ."
    ) from error

if _C.torch_version.split(".")[:2] != _torch.__version__.split(".")[:2]:
    raise ImportError(
        f"gpipe was built for torch {_C.torch_version}, but torch {_torch.__version__} is installed. "
        "Install it again, in an environment that has this torch: pip install --no-build-isolation ."
    )

from gpipe import balance, batchnorm, checkpoint, models, skip, snapshot
from gpipe._C import Timeline, reuse_cpu_memory
from gpipe.checkpoint import is_checkpointing, is_recomputing
from gpipe.pipeline import GPipe
from gpipe.randomness import RandomScope, reference

__all__ = [
    "GPipe",
    "RandomScope",
    "Timeline",
    "__version__",
    "balance",
    "batchnorm",
    "checkpoint",
    "is_checkpointing",
    "is_recomputing",
    "models",
    "reference",
    "reuse_cpu_memory",
    "skip",
    "snapshot",
]

__version__: str = _version("gpipe")
