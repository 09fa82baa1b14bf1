"""Values as JSON can hold them: see gpipe/snapshot/folder.h. Part of :mod:`gpipe.snapshot`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

_MOST_LEVELS = 100
# Containers that JSON lacks. A dict is a list of pairs.
_CONTAINERS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "counter": Counter, "dict": dict}


def packed(value: Any, path: str, tensors: dict[str, Tensor], level: int = 0) -> Any:
    """Returns a value as JSON can hold it. Its tensors become their names in ``tensors``, which begin with the path.
    Raises TypeError for what is no number, text, tensor or container of them."""
    if level > _MOST_LEVELS:
        raise ValueError(f"cannot save '{path[1:100]}...': it has more than {_MOST_LEVELS} levels")
    if isinstance(value, Tensor):
        while path in tensors:
            path += "'"
        tensors[path] = value
        return {"$": "tensor", "of": path}
    if value is None or isinstance(value, (bool, str)):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    if isinstance(value, Integral):
        return int(value) if abs(int(value)) < 2**63 else {"$": "int", "of": str(int(value))}
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else {"$": "float", "of": str(float(value))}

    def inner(each: Any, name: object) -> Any:
        return packed(each, f"{path}/{name}", tensors, level + 1)

    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        if kind == "dict" and "$" not in value and all(isinstance(key, str) for key in value):
            return {key: inner(each, key) for key, each in value.items()}
        return {"$": kind, "of": [[inner(key, "key"), inner(each, key)] for key, each in value.items()]}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [inner(each, index) for index, each in enumerate(value)]
        tag = next((name for name, kind in _CONTAINERS.items() if isinstance(value, kind)), None)
        return items if tag is None else {"$": tag, "of": items}
    what = "a snapshot holds numbers, texts, tensors and containers of them"
    raise TypeError(f"cannot save '{path[1:]}', which is {type(value)}: {what}")


def unpacked(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Returns the value that :func:`packed` got. ``read`` returns its tensors by their names."""
    if isinstance(value, list):
        return [unpacked(each, read) for each in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: unpacked(each, read) for key, each in value.items()}
    tag, of = value["$"], value["of"]
    if tag == "tensor":
        return read(of)
    if tag in ("int", "float"):
        return int(of) if tag == "int" else float(of)
    items = unpacked(of, read)
    return _CONTAINERS[tag](dict(items) if tag in ("counter", "dict") else items)
