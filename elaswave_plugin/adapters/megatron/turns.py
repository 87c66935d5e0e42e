"""The models that are bound, the verb of the job that runs now, and the calls it may be made of."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from elaswave_plugin.adapters.megatron.state.optimizer_of import chunks_of
from elaswave_plugin.errors import ConfigurationError

TRAIN, EVALUATE, RUN = "train", "evaluate", "run"
_OUTSIDE = "is called outside of job.train, job.evaluate and job.run, where no loss is survived"


class Turns:
    """The verb that runs now, None between them; refuses what has no place there."""

    def __init__(self) -> None:
        self._verb: str | None = None
        # The chunks of each model that is bound, its optimizer, and what is said of their run.
        self._models: list[tuple[Any, ...]] = []
        self._optimizers: list[Any] = []
        self._run: dict[str, Any] = {}
        # The verb that came first, behind which nothing more is bound.
        self._first: str | None = None
        self._begun = False
        # What each call of forward_backward in the verb has returned, and whether one trained.
        self.returned: list[list[Any]] = []
        self.trains = self.has_trained = False

    def bind(self, chunks: Sequence[Any], optimizer: Any, **run: Any) -> None:
        """``bind`` is called; raises ConfigurationError for what it cannot take, or not any more.

        ``run``: what it is told of the run, which is one for all models.
        """
        if self._first is not None:
            raise ConfigurationError(
                f"job.bind is called behind job.{self._first}, by when the state of all models is "
                "sealed: bind every model before the first job.run, job.evaluate or job.train"
            )
        if any(chunk is one for chunk in chunks for model in self._models for one in model):
            raise ConfigurationError(
                "job.bind got a model that is bound already: call it once for each model"
            )
        if any(optimizer is one for one in self._optimizers):
            raise ConfigurationError(
                "job.bind got an optimizer that is bound already, with another model: give each "
                "model an optimizer of its own, write get_megatron_optimizer(config, [model])"
            )
        if self._models:
            _check_width()
        shared = _trained(chunks) & _trained([one for model in self._models for one in model])
        if shared:
            raise ConfigurationError(
                f"job.bind got a model that shares {len(shared)} trained weights with one that is "
                "bound already, and Megatron-Core's DDP keeps a weight in one model: share weights "
                "that are not trained, or put both models into one"
            )
        self._run = self._run or run
        for name, value in run.items():
            if value != self._run[name]:
                raise ConfigurationError(
                    f"job.bind got {name}={value!r}, and {name}={self._run[name]!r} with the model "
                    "before: all models train in one run, give the same in every call"
                )
        self._models.append(tuple(chunks))
        self._optimizers.append(optimizer)

    def check_bound(self, verb: str) -> bool:
        """Return whether ``verb`` is the first; raises ConfigurationError before ``bind``."""
        if not self._models:
            raise ConfigurationError(
                f"job.{verb} is called before job.bind: write job.bind(model, optimizer, "
                "scheduler, train_iters=...) behind the lines that build the three"
            )
        is_first, self._first = self._first is None, self._first or verb
        return is_first

    def begin_training(self) -> None:
        """``train`` is called; raises ConfigurationError before ``bind``, and the second time."""
        self.check_bound(TRAIN)
        if self._begun:
            raise ConfigurationError(
                "job.train is called twice, and the first call makes all steps: put both loops "
                "into one"
            )
        self._begun = True

    @contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """Inside, the verb runs an attempt of the script's function."""
        if self._verb is not None:
            raise ConfigurationError(
                f"job.{verb} is called inside of job.{self._verb}: call it in the body of "
                "`for iteration, report in job.train(train_step):`"
            )
        self._verb, self.returned, self.has_trained = verb, [], False
        try:
            yield
            if verb == TRAIN and not self.has_trained:
                raise ConfigurationError(
                    "train_step did not train by what job.forward_backward returned, so that "
                    "nothing of this step is known: write forward_backward = "
                    "job.forward_backward(get_forward_backward_func()), and call that in it, at "
                    "least once without forward_only"
                )
        finally:
            self._verb = None

    def forward_backward(self, *, forward_only: bool) -> None:
        """The wrapped function is called; raises ConfigurationError where it has no place."""
        if self._verb is None and forward_only:
            raise ConfigurationError(
                f"forward_backward(forward_only=True) {_OUTSIDE}: write loss = "
                "job.evaluate(evaluate), with `evaluate` the function that calls it"
            )
        if self._verb is None:
            raise ConfigurationError(
                f"forward_backward {_OUTSIDE}: write `for iteration, report in "
                "job.train(train_step):`, with `train_step` the function that calls it, not called"
            )
        if self._verb != TRAIN and not forward_only:
            raise ConfigurationError(
                f"forward_backward trains inside of job.{self._verb}, whose work is no step and is "
                "not kept: give it forward_only=True there"
            )
        self.trains = not forward_only

    def check_saves(self) -> None:
        """Raise ConfigurationError for a ``name_newest`` outside of the work of ``run``."""
        if self._verb != RUN:
            raise ConfigurationError(
                'job.name_newest is called outside of job.run(save, phase="save"): call it in '
                "`save`, behind dist_checkpointing.save, on every worker"
            )

    def check_trained(self, model: Any) -> None:
        """Raise ConfigurationError for a model that a call is to train and that is not bound."""
        if chunks_of(model) not in self._models:
            raise ConfigurationError(
                "forward_backward trains a model that is not bound: call job.bind with it and its "
                "optimizer before the first step, or give it forward_only=True"
            )

    def gave(self, losses: list[Any]) -> None:
        """The call that began last has returned these."""
        self.returned.append(losses)
        self.has_trained |= self.trains

    @property
    def is_working(self) -> bool:
        """True while work of ``run`` does."""
        return self._verb == RUN

    @property
    def is_training(self) -> bool:
        """True while a training step runs."""
        return self._verb == TRAIN


def _trained(chunks: Sequence[Any]) -> set[int]:
    """The identities of weights that are trained; what is no model is refused elsewhere."""
    modules = (chunk for chunk in chunks if isinstance(chunk, torch.nn.Module))
    return {id(one) for module in modules for one in module.parameters() if one.requires_grad}


def _check_width() -> None:
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    for kind, size in sizes.items():
        if size > 1:
            raise ConfigurationError(
                f"job.bind is called for a second model, and {kind}_model_parallel_size is {size}:"
                " several models are carried in data-parallel jobs; set it to 1, or put both "
                "models into one that Megatron-Core wraps, with one optimizer"
            )
