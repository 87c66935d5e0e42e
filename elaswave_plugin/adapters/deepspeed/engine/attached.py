"""An engine in an elastic job, whichever loop drives it: its methods, its loader, its end."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
from elaswave_plugin.adapters.deepspeed.engine.loader import (
    ElasticLoader,
    GlobalOrder,
    Order,
    Reader,
)
from elaswave_plugin.adapters.deepspeed.engine.own_loops import OwnLoops
from elaswave_plugin.adapters.deepspeed.engine.reads import Reads
from elaswave_plugin.adapters.pass_hooks import PassHooks, evaluation_hooks
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.adapters.recording import Recording, tracker_of
from elaswave_plugin.adapters.torch_loader import no_places
from elaswave_plugin.adapters.unbound import Unbound
from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.trainer.fatal import ends_in_a_sentence

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def abandoning(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """End in a sentence, and do not wait for the others at the process's exit then."""
    guarded = ends_in_a_sentence(function)

    @wraps(function)
    def guarded_call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return guarded(*args, **kwargs)
        except SystemExit as end:
            if isinstance(end.__cause__, ElasWaveError):
                job: Any = getattr(function, "__self__", None) or args[0]
                job.abandon()
            raise

    return guarded_call


class AttachedEngine:
    """The parts that every kind of engine's job has."""

    def __init__(
        self,
        worker: Worker,
        engine: Any,
        framework: DeepSpeedFramework,
        *,
        width: int,
        patches: PatchSet,
        seed: int,
    ) -> None:
        """``width``: data-parallel replicas at launch."""
        self._worker = worker
        self._engine = engine
        self._framework = framework
        self._width = width
        self._seed = seed
        self._micro_batch_size = int(engine.train_micro_batch_size_per_gpu())
        self._hooks = PassHooks(engine.module)
        pieces = framework.named_pieces
        self._recording = Recording(worker, tracker_of(worker), pieces=pieces)
        self._unbound = Unbound(
            lambda optimizer: optimizer is engine.basic_optimizer,
            advice="put its model into that of the engine, as a module of it, with one optimizer",
            before_refusal=self.abandon,
        )
        # Called once everyone leaves.
        self.at_leave: list[Callable[[], None]] = [patches.undo, self._unbound.stop]
        # Called before that, while the others may go on.
        self.before_leaving: list[Callable[[], None]] = []
        self._left = self._working = False
        self.own_loops = OwnLoops(
            worker,
            engine.module,
            width=len(worker.launch_slots),
            absorbs=lambda: self._absorbs_losses,
        )
        self.at_leave.append(self.own_loops.end)
        if worker.config.last_checkpoint_dir is not None:
            worker.member.saves_last()

    @property
    def engine(self) -> Any:
        """The engine."""
        return self._engine

    def _take_over(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Each of the engine's ``methods`` goes through ours, which gets the native one first."""
        sizes = ("set_train_batch_size", "set_train_micro_batch_size")
        refused = dict.fromkeys(sizes, self._refuse_another_size)
        methods = {**methods, **refused, "compile": self._compile}
        for name, take in methods.items():
            native = getattr(self._engine, name)
            # Callers look at its signature, as HF's Trainer does before it saves.
            setattr(self._engine, name, wraps(native)(partial(abandoning(take), native)))

    def _compile(
        self,
        native: Callable[..., None],
        *args: Any,
        compiled_autograd_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        if compiled_autograd_enabled:
            raise ConfigurationError(
                "engine.compile was called with compiled_autograd_enabled=True, which compiles what"
                " the plugin does in a backward pass as well; leave it out"
            )
        native(*args, **kwargs)
        self._hooks.compiled()

    def _refuse_another_size(self, native: Callable[..., Any], size: int) -> NoReturn:
        raise ConfigurationError(
            f"engine.{native.__name__} was called with {size}, and the batch is fixed at launch;"
            " set it in the configuration"
        )

    def has_beside(self, models: Sequence[torch.nn.Module]) -> None:
        """Take models that all workers hold whole, and later ones are given."""
        self._framework.beside = models

    def _attached(self) -> None:
        module = self._engine.module
        self._hooks.add(module, *evaluation_hooks(module, self._worker.phases), always=True)
        self._hooks.compiled()
        self._recording.attached(
            num_microbatches=self._width * int(self._engine.gradient_accumulation_steps()),
            micro_batch_size=self._micro_batch_size,
        )

    # ---- the data -------------------------------------------------------------------------------

    def make_loader(
        self,
        dataset: Any,
        *,
        collate: Callable[[Sequence[Any]], Any] | None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sampler: "torch.utils.data.DistributedSampler[Any] | None" = None,
        reshuffles: bool = False,
        like: "torch.utils.data.DataLoader[Any] | None" = None,
    ) -> ElasticLoader:
        """The loader of the job in DeepSpeed's order; raises ConfigurationError."""
        return self.take_order(
            dataset,
            lambda: GlobalOrder(
                len(dataset),
                num_replicas=self._width,
                micro_batch_size=self._micro_batch_size,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                reshuffles=reshuffles,
            ),
            collate=collate,
            sampler=sampler,
            like=like,
        )

    def take_order(
        self,
        dataset: Any,
        order: Callable[[], Order],
        *,
        collate: Callable[[Sequence[Any]], Any] | None,
        sampler: "torch.utils.data.DistributedSampler[Any] | None" = None,
        like: "torch.utils.data.DataLoader[Any] | None" = None,
    ) -> ElasticLoader:
        """The loader of the job; raises ConfigurationError for a second one."""
        if self._framework.loader is not None:
            raise ConfigurationError(
                "the job has a training loader already, and a second one was asked for; train "
                "from one loader, over a concatenation of the datasets"
            )
        problem = no_places(dataset, named="the dataset")
        if problem is not None:
            raise ConfigurationError(problem)
        reads = Reads(counts=not self._worker.detached)
        loader = ElasticLoader(
            self._reader,
            dataset,
            order(),
            collate=collate,
            reads=reads,
            sampler=sampler,
            like=like,
            seed=self._seed,
        )
        self._framework.loader = loader
        self._took_loader(loader)
        return loader

    @property
    def _reader(self) -> Reader:
        """The reader that answers the loader's `next`."""
        raise NotImplementedError

    def run(self, work: Callable[[], Any], *, phase: str) -> Any:
        """Work between steps that every worker calls; it starts again after a loss."""
        raise NotImplementedError

    def mean(self, value: Any) -> torch.Tensor:
        """The mean over the samples of all workers, of which ``value`` is that of this one's."""
        raise NotImplementedError

    @property
    def _absorbs_losses(self) -> bool:
        """True if what runs now is made again after a loss."""
        return self._working

    def _took_loader(self, loader: ElasticLoader) -> None:
        """The job has its loader."""

    def _as_one(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Work that starts again as a whole: the modules in the modes that they are in now."""
        modes = [(module, module.training) for module in self._engine.module.modules()]

        def whole() -> Result:
            # A save inside of a save is a part of it.
            before, self._working = self._working, True
            try:
                return work()
            except BaseException:
                for module, training in modes:
                    module.training = training
                raise
            finally:
                self._working = before

        return whole

    # ---- after a loss ---------------------------------------------------------------------------

    def _told_recovery(self, record: dict[str, object]) -> None:
        self._recording.recovered(record)
        self.own_loops.recovered()

    # ---- the end --------------------------------------------------------------------------------

    def _end_where_all_leave(self) -> None:
        """With every worker told to leave: a last checkpoint, then the end of the script.

        Without a checkpoint after the last step of a job that stops early.
        """
        stop_after = self._worker.config.stop_after
        if stop_after is not None and self._worker.completed >= stop_after:
            self.leave()
            raise SystemExit(0)
        folder = self._worker.config.last_checkpoint_dir
        if folder is None or not self._worker.last_call:
            return
        completed = self._worker.completed
        saved = self._engine.save_checkpoint(str(folder))
        if saved is None and self._worker.completed < completed:
            return  # the step was rolled back, and the loop comes here again
        self.leave()
        raise SystemExit(0)

    @abandoning
    def leave(self) -> None:
        """Leave with the others, once."""
        if self._left:
            return
        self._left = True
        for check in self.before_leaving:
            check()
        if not self._worker.detached:
            self._leave_together()
        self._worker.groups.uninstall()
        for undo in self.at_leave:
            undo()

    def _leave_together(self) -> None:
        """Wait for the others, and tell them."""
        raise NotImplementedError

    def _dump_last(self) -> None:
        if self._worker.config.dump_state == "last" and self._worker.completed:
            self._recording.dump(self._worker.completed - 1)

    def abandon(self) -> None:
        """Leave without waiting for others, as the script fails."""
        self._left = True

    def _destroy(self, native: Callable[[], None]) -> None:
        self.leave()
        native()
