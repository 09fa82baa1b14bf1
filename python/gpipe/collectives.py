"""The calls of a pipeline over ranks that train nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gpipe import _C
from gpipe.checks import check_number, check_whole, shown
from gpipe.ranks import Ranks

__all__ = ["Collectives"]

_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _read_all(scalars: list[Tensor]) -> list[float]:
    """Reads scalars of any devices. The host waits once per device."""
    values = [0.0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        places = [place for place, scalar in enumerate(scalars) if scalar.device == device]
        read: list[float] = torch.stack([scalars[place].double() for place in places]).tolist()
        for place, value in zip(places, read, strict=True):
            values[place] = value
    return values


class Collectives(nn.Module):
    """Over ranks, all ranks make these calls in the same order, as they call ``forward``. An error of one is an error of all.
    In one process the calls return at once."""

    _ranks: Ranks | None
    _core: _C.Pipeline | None
    whole_state: dict[str, str]

    def _pipeline(self) -> _C.Pipeline:
        raise NotImplementedError

    @property
    def ranks(self) -> Ranks | None:
        """The processes that run the pipeline together; ``None`` if this one has all workers."""
        return self._ranks

    def gather(self, data: bytes, what: str = "bytes") -> list[bytes]:
        """Returns the bytes that each rank gives, in order, on rank 0; an empty list on the other ranks. ``what`` they are
        must be the same on all ranks."""
        with self.refusing():
            pipeline = self._pipeline()
            if not isinstance(data, bytes) or not isinstance(what, str):
                raise TypeError(f"gather takes bytes and what they are, a str, but got {type(data)} and {type(what)}")
        return pipeline.gather(data, what)

    def gather_timeline(self, timeline: _C.Timeline) -> _C.Timeline:
        """Returns the actions of all ranks on one axis of time, on rank 0; an empty timeline on the other ranks. Trace the same
        calls on all ranks."""
        with self.refusing():
            pipeline = self._pipeline()
            if not isinstance(timeline, _C.Timeline):
                raise TypeError(f"timeline must be a gpipe.Timeline, but is {shown(timeline)}")
        return pipeline.gather_timeline(timeline)

    def largest(self, number: int) -> int:
        """Returns the largest of the numbers, from 0 to 2**64 - 1, that the ranks give. So ranks stop at the same step:
        ``if pipe.largest(stop): break``."""
        with self.refusing():
            pipeline = self._pipeline()
            number = check_whole(number, "number", bits=64)
            if number < 0:
                raise ValueError(f"number must be from 0 to 2**64 - 1, but is {number}")
        return pipeline.largest(number)

    def sum_over_replicas(self, numbers: Iterable[float]) -> list[float]:
        """Returns the sums over replicas of the numbers that the first rank of each gives. Adds in the order of replicas, so
        all ranks get the same bits. Use it for scores that each replica knows in part. All ranks give as many
        numbers."""
        with self.refusing():
            pipeline = self._pipeline()
            own = [check_number(number, "each of the numbers") for number in numbers]
        return pipeline.sum_over_replicas(own)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of the whole model by their total norm, as ``torch.nn.utils.clip_grad_norm_`` does in one
        process, with the same bits.

        Args:
            max_norm: the largest norm.
            norm_type: the type of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: whether a total norm that is not finite is an error.

        Returns:
            The total norm before clipping.

        Raises:
            RuntimeError: for a total norm that is not finite, if asked for. The gradients are then unchanged.
        """
        with self.refusing():
            max_norm, norm_type = check_number(max_norm, "max_norm"), check_number(norm_type, "norm_type")
        gradients = {name: each.grad for name, each in self.named_parameters() if each.grad is not None}
        if self._ranks is None:
            total = get_total_norm(list(gradients.values()), norm_type)
        else:
            total = self._total_norm(self._ranks, gradients, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the total norm of the gradients is {total.item()}, so they cannot be clipped")
        clip_grads_with_norm_(list(self.parameters()), max_norm, total)
        return total

    def _total_norm(self, ranks: Ranks, gradients: dict[str, Tensor], norm_type: float) -> Tensor:
        """Returns the total norm of the gradients of all ranks, on all ranks."""
        with self.refusing():
            of_gradients = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients.values()]
            types = [_DTYPES.index(norm.dtype) for norm in of_gradients]
            norms = list(zip(gradients, _read_all(of_gradients), types, strict=True))
        gathered = self.gather(json.dumps(norms).encode(), f"norms of type {norm_type} of all gradients")
        bits = dtype = 0
        if ranks.rank == 0:
            places = {name: place for place, name in enumerate(self.whole_state)}
            of_all = [norm for each in gathered[:: ranks.replicas] for norm in json.loads(each)]
            of_all.sort(key=lambda norm: places.get(norm[0], len(places)))
            # A vector of one element has the norm of its element.
            total = get_total_norm([torch.tensor([value], dtype=_DTYPES[index]) for _, value, index in of_all], norm_type)
            (bits,) = struct.unpack("<Q", struct.pack("<d", total.item()))
            dtype = _DTYPES.index(total.dtype)
        # The others give 0, so the largest is rank 0's.
        (value,) = struct.unpack("<d", struct.pack("<Q", self.largest(bits)))
        return torch.tensor(value, dtype=_DTYPES[self.largest(dtype)])

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes the call that the other ranks begin raise an exception if the block, which prepares the same call, does."""
        try:
            yield
        except Exception as error:
            if self._ranks is not None and self._core is not None:
                self._core.withdraw(f"{type(error).__name__}: {error}")
            raise
