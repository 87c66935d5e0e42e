"""The samples of a torch DataLoader by number, in its order, one pass after the other."""

from typing import Any

import torch

from elaswave_plugin.adapters.torch_loader import batches_of


class LoaderOrder:
    """A dataset without an end: sample i is what the loader's i-th draw gives, over all workers.

    Shuffled as torch's DistributedSampler shuffles each of its epochs.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any], *, micro_batch_size: int) -> None:
        """Raises ConfigurationError for a loader whose batches are others than ours would be."""
        given = batches_of(loader, micro_batch_size=micro_batch_size, named="args.micro_batch_size")
        self._dataset, self._shuffle, self._seed = given.dataset, given.shuffle, given.seed or 0
        self.collate_fn = given.collate_fn
        self._size = len(given.dataset)
        self._cached: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, number: int) -> Any:
        epoch, place = divmod(number, self._size)
        if not self._shuffle:
            return self._dataset[place]
        if self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._cached = epoch, torch.randperm(self._size, generator=generator).tolist()
        return self._dataset[self._cached[1][place]]
