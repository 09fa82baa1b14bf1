"""The form of a file: a zip pickle of plain values, which torch.load(weights_only=True) and C++ read."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor


def dump(value: Any) -> io.BytesIO:
    """The file's content. In memory first: torch.save does not come through a write that fails."""
    archive = io.BytesIO()
    torch.save(value, archive)
    return archive


def load(archive: BinaryIO) -> Any:
    """The value. Raises ValueError for a file that is damaged, cut short, or none of torch.save's."""
    if archive.read(4) != b"PK\3\4":
        raise ValueError("it is no snapshot: no zip file")
    # torch.load does not look at checksums, and takes a flipped bit for a weight.
    try:
        with zipfile.ZipFile(archive) as records:
            broken = records.testzip()
    except Exception as error:  # the kinds are as many as the ways to be damaged
        raise ValueError(f"it is damaged or cut short: {error}") from error
    if broken:
        raise ValueError(f"it is damaged: the checksum of '{broken}' is wrong")
    archive.seek(0)
    try:
        return torch.load(archive, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"it is no snapshot, but something else in a zip file: {error}") from error


def plain(value: Any, where: str) -> Any:
    """The same of types that torch.load(weights_only=True) and C++ read."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{where} is {value}; integers have 32 bits in LibTorch's reader, so make it a str")
        return int(value)
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone()
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{where} is {type(value)}; a snapshot holds tensors, numbers, str, and dicts and lists of them")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; make it a str")
    return str(key)
