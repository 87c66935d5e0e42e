"""The dataset of one DataLoader, read in whatever order, alike on every worker."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from elaswave_plugin.adapters.host_draws import seed_host, undone_numbers
from elaswave_plugin.adapters.megatron.step.sample_draws import SampleDraws
from elaswave_plugin.adapters.read_ahead import read_in_processes
from elaswave_plugin.core.step.rng import draw_key


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of a batch; ``moment``: of the draws."""

    source: int
    moment: int
    indices: Any


class Source:
    """The dataset of a loader, what collates its samples, and its processes."""

    def __init__(self, loader: Any, dataset: Any, collate: Any) -> None:
        """``loader``: a DataLoader, or the iterator of one."""
        self._dataset, self._collate = dataset, collate
        self._has_batches = loader._auto_collation
        named = {name.lstrip("_"): value for name, value in vars(loader).items()}
        self.settings: Any = SimpleNamespace(
            num_workers=named["num_workers"],
            prefetch_factor=named.get("prefetch_factor"),
            worker_init_fn=named.get("worker_init_fn"),
            multiprocessing_context=getattr(loader, "multiprocessing_context", None),
            timeout=named["timeout"],
        )
        """As `ReadAhead` takes them from a loader."""

    @cached_property
    def _draws(self) -> SampleDraws:
        return SampleDraws(self._dataset, 0)

    def read(self, request: Request) -> Any:
        """Read a batch, collated as the loader does it."""
        indices = request.indices if self._has_batches else [request.indices]
        samples = self._draws.read(indices, request.moment)
        with undone_numbers():
            seed_host(draw_key(request.moment))
            return self._collate(samples if self._has_batches else samples[0])

    def read_all(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Read batches in turn, ahead of who takes them where the loader does that."""
        if not self.settings.num_workers:
            return map(self.read, requests)
        return iter(read_in_processes(self.read, lambda: iter(requests), like=self.settings))
