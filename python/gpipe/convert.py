"""Files of torch.save. ``python -m gpipe convert weights.pth weights.safetensors`` writes weights as a safetensors file."""

import os

import torch
from torch import Tensor

from gpipe import _C


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Writes the tensors of a file that ``torch.save`` wrote: a ``state_dict``, or the weights of a snapshot of gpipe 0.1.
    Returns their number. Executes nothing from the file. Raises OSError, with the path and the reason, and ValueError if
    the file has no dict of tensors, or a tensor cannot be saved."""
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        name = os.fspath(source)
        raise ValueError(f"'{name}' is not a file of torch.save with tensors only; save the model's state_dict()") from error
    if isinstance(content, dict) and content.get("format") == "gpipe snapshot":
        content = content["model"]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"'{os.fspath(source)}' does not hold a dict of tensors; save the model's state_dict()")
    if hidden := [name for name in content if name.startswith(".")]:
        raise ValueError(f"'{hidden[0]}' in '{os.fspath(source)}' begins with a dot, which readers skip; rename it")
    _C.write_weights(os.fsencode(target), dict(content), "")
    return len(content)


def refuse_file_of_torch(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a file that ``torch.save`` wrote, where a snapshot is expected."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start in (b"PK\3\4", b"\x80\2\x8a\n"):  # as torch writes it now, and wrote it once
        name = os.fsdecode(path)
        raise ValueError(
            f"'{name}' is not a snapshot, but a file of torch.save(); read it with torch.load(), or write its weights as "
            f"safetensors: python -m gpipe convert {name} weights.safetensors"
        ) from None
