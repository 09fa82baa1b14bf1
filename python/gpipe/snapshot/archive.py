"""The format of a snapshot file: a zip archive with a pickle that torch.load(weights_only=True) and C++ read."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Dtypes that LibTorch and Python write in the same way.
_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}
_MAX_DEPTH = 16


def dump(value: Any) -> io.BytesIO:
    """Returns the content of a file. Builds it in memory because torch.save aborts the process when a write fails."""
    archive = io.BytesIO()
    torch.save(value, archive)
    return archive


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Converts a value to types that torch.load(weights_only=True) and C++ read.

    Args:
        value: tensors, numbers, ``str``, ``None``, and mappings, lists and tuples of these.
        where: the place of the value in the snapshot, for messages.
        depth: the level of nesting.

    Raises:
        TypeError, ValueError: if the value cannot be converted.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{where} is {value}, but integers in a snapshot have 64 bits; store it as a str")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Tensor):
        return _plain_tensor(value, where)
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(
        f"{where} is {type(value)}; a snapshot holds tensors, numbers, str, None, and dicts, lists and tuples"
    )


def _plain_tensor(value: Tensor, where: str) -> Tensor:
    if value.layout is not torch.strided or value.is_meta or value.dtype not in _DTYPES:
        raise ValueError(
            f"{where} is a tensor of {value.dtype} and {value.layout} on {value.device}; a snapshot holds dense "
            "tensors of floating, complex, signed integer, bool or uint8 type"
        )
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}, but keys in a snapshot are str")
    return _text(key)


def _text(value: str) -> str:
    """Returns the same object for equal strings, so that equal snapshots become equal files."""
    return sys.intern(str(value))
