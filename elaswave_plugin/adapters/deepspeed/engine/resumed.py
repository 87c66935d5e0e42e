"""The place at which a loop that the script owns begins in the data, in a job that is resumed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker

_PAGE = "docs/deepspeed.md"


class Resumed:
    """The samples of the steps before a checkpoint, and whether the first step follows them."""

    def __init__(
        self,
        trained: int,
        *,
        batch: int = 1,
        per_step: int = 1,
        speaks: bool = False,
        is_placed: bool = False,
    ) -> None:
        """``trained``: those samples, of steps that are all alike; ``batch``: samples of a batch.

        ``per_step``: batches of a step, where a pass ends with a step as Accelerate has it, else 1;
        ``speaks``: whether this worker tells of another place; ``is_placed``: the loader has them
        before its own, and the loop passes over no batches.
        """
        self.trained = trained
        self._batches = trained // batch
        self._per_step = per_step
        # Batches of the steps that the script has passed over, as of steps that are alike.
        self._made = 0
        self._speaks = speaks
        self._is_placed = is_placed
        # Batches that the script read before the first step and made no pass of the model with.
        self._passed_over = 0
        # Writes the batch that was read last to the ledger, once it is used.
        self._unused: Callable[[], None] | None = None
        self._begun = False

    @classmethod
    def behind(cls, engine: Any, worker: Worker, *, whole: bool) -> "Resumed":
        """Of the checkpoint that an engine has loaded; ``whole``: a pass ends with a step."""
        count = int(engine.gradient_accumulation_steps())
        return cls(
            int(engine.global_samples),
            batch=engine.train_batch_size() // count,
            per_step=count if whole else 1,
            speaks=worker.owns_rank_0,
        )

    def serve(
        self,
        loader: ElasticLoader,
        items: Sequence[int],
        ids: Sequence[int],
        consume: Callable[..., None],
        *,
        begins: bool,
    ) -> None:
        """A batch of the first step was read, which the script may pass over.

        ``items``: of all workers; ``consume(samples=..., trained=...)`` has the worker's ``ids`` in
        the ledger; ``begins``: none of the step is before it.
        """
        self._begun = self._is_placed or (self._begun and not begins)

        def use() -> None:
            more = 0 if self._begun else self.begin(loader, items, are_read=True)
            self._begun = True
            consume(samples=[one + more for one in ids], trained=self.trained)

        self._unused = use
        if self._is_placed:
            self.use()

    def told(self, step: int) -> dict[str, int]:
        """Return what the ledger says of a step beside its samples."""
        return {} if step else {"trained": self.trained}

    def use(self) -> None:
        """The model has a pass with the batch that was read last."""
        use, self._unused = self._unused, None
        if use is not None:
            use()

    def passes_over(self, loader: ElasticLoader) -> bool:
        """The next batch is asked for: return whether the last one had no pass, and is none."""
        passed, self._unused = self._unused is not None, None
        self._passed_over += passed
        self._made += passed
        if passed and loader.at_end:
            self._made = self._whole(self._made)
        return passed

    def begin(self, loader: ElasticLoader, items: Sequence[int], *, are_read: bool) -> int:
        """Return how much more the ledger's numbers of the first items are than the loader's.

        ``are_read``: whether the loader has read them last, or reads them next. They follow the
        samples of the checkpoint if the run without it reads the same ones there; others are told,
        once, and those that were trained on are repeated.
        """
        here, count = loader.position, len(items) if are_read else 0
        begun = here.served - count
        follows, wanted = self._made + loader.skipped == self._batches, "the one behind them"
        if not (follows or loader.streams):
            there, size = self._batches // self._per_step, len(loader)
            number, iteration = divmod(there, self._whole(size) // self._per_step)
            iteration *= self._per_step
            wanted = f"batch {iteration} of pass {number}"
            follows = loader.items_at(number, iteration) == [*items]
        if follows:
            loader.position = replace(here, served=self.trained + count)
            return self.trained - begun
        if self._speaks:
            self._speaks = False
            say(
                f"the checkpoint was written behind {self.trained} samples, and the first step"
                f" begins at batch {here.iteration - are_read} of pass {here.epoch} of the training"
                f" data as the loader has it, wanted {wanted}: samples are trained on again, and"
                " the ledger counts them as repeated; read the batches before that place without a"
                f" pass of the model, unless the dataset itself begins there ({_PAGE})"
            )
        return 0

    def _whole(self, batches: int) -> int:
        return -(-batches // self._per_step) * self._per_step

    def check_redo(self, step: int) -> None:
        """Raise ConfigurationError for a first step that cannot be begun again where it began."""
        if self._passed_over and not step:
            raise ConfigurationError(
                f"a worker was lost in the first step, before which the script passed over"
                f" {self._passed_over} batches to go on behind a checkpoint, and the step that is"
                " redone would begin before them: start the job again from the checkpoint"
            )
