"""The calls of a pipeline over ranks that train nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.ranks import Ranks

__all__ = ["Collectives"]

_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Collectives(nn.Module):
    """Over ranks, all ranks make these calls in the same order, as they call ``forward``. An error of one is an error of all.
    In one process the calls return at once."""

    _ranks: Ranks | None
    _core: _C.Pipeline | None

    def _pipeline(self) -> _C.Pipeline:
        raise NotImplementedError

    @property
    def ranks(self) -> Ranks | None:
        """The processes that run the pipeline together; ``None`` if this one has all workers."""
        return self._ranks

    def gather(self, data: bytes, what: str = "bytes") -> list[bytes]:
        """Returns the bytes that each rank gives, in order, on rank 0; an empty list on the other ranks. ``what`` they are
        must be the same on all ranks."""
        return self._pipeline().gather(data, what)

    def gather_timeline(self, timeline: _C.Timeline) -> _C.Timeline:
        """Returns the actions of all ranks on one axis of time, on rank 0; an empty timeline on the other ranks. Trace the same
        calls on all ranks."""
        return self._pipeline().gather_timeline(timeline)

    def largest(self, number: int) -> int:
        """Returns the largest of the numbers, from 0, that the ranks give. So ranks stop at the same step:
        ``if pipe.largest(stop): break``."""
        return self._pipeline().largest(number)

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
        parameters = list(self.parameters())
        gradients = [parameter.grad for parameter in parameters]
        if self._ranks is None:
            total = torch.nn.utils.get_total_norm([each for each in gradients if each is not None], norm_type)
        else:
            norms = [None if each is None else torch.linalg.vector_norm(each, norm_type) for each in gradients]
            values = self._of_all_parameters([-1.0 if norm is None else norm.item() for norm in norms])
            dtypes = self._of_all_parameters([-1.0 if norm is None else _DTYPES.index(norm.dtype) for norm in norms])
            total = torch.linalg.vector_norm(
                torch.stack(
                    [torch.tensor(value, dtype=_DTYPES[int(dtype)]) for value, dtype in zip(values, dtypes) if dtype >= 0]
                ),
                norm_type,
            )
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the total norm of the gradients is {total.item()}, so they cannot be clipped")
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _of_all_parameters(self, numbers: list[float]) -> list[float]:
        """Takes a number for each of this rank's parameters. Returns those of the whole model's."""
        return self._pipeline().of_all_parameters(numbers)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes the call that the other ranks begin raise an exception if the block, which prepares the same call, does."""
        try:
            yield
        except Exception as error:
            if self._ranks is not None and self._core is not None:
                self._core.withdraw(f"{type(error).__name__}: {error}")
            raise
