"""Data for replicas: each reads only its own part of every mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, Sampler, default_collate

from gpipe.ranks import Ranks

__all__ = ["PartSampler", "collate_part"]


class PartSampler(Sampler[list[int]]):
    """Yields this replica's part of each mini-batch of another sampler, so an epoch is the same for any number of replicas.

        batches = BatchSampler(RandomSampler(dataset, generator=generator), batch_size=64, drop_last=False)
        loader = DataLoader(
            dataset, batch_sampler=gpipe.data.PartSampler(batches, ranks), collate_fn=gpipe.data.collate_part(dataset)
        )

    Args:
        batches: the indices of the samples of each mini-batch, the same on all ranks: seed its generator alike.
        ranks: the ranks, with ``replicas``.
    """

    def __init__(self, batches: Iterable[list[int]], ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[self._ranks.part(len(batch))]

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def collate_part(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate
) -> Callable[[list[Any]], Any]:
    """Returns a function for ``DataLoader(collate_fn=...)`` that also makes mini-batches without samples: the last one of an
    epoch can have fewer samples than there are replicas. ``dataset[0]`` gives their shapes. ``collate`` makes the others."""
    return partial(_collate_part, dataset, collate)  # can be pickled, for a loader's worker processes


def _collate_part(dataset: Dataset[Any], collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    if samples:
        return collate(samples)
    return tree_map(lambda value: value[:0] if isinstance(value, Tensor) else value, collate([dataset[0]]))
