"""The end of a trainer that cannot go on: one sentence, said once for the whole job."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from elaswave_plugin.core.agreement.messages import Stop
from elaswave_plugin.errors import (
    CheckpointUnreadableError,
    ConfigurationError,
    ElasWaveError,
    JobStopped,
    LayoutError,
    PlanDigestError,
    SnapshotGapError,
    TooLittleMemoryError,
    WeightsDifferError,
)
from elaswave_plugin.ipc.environment import AGENT, INCARNATION, SLOT
from elaswave_plugin.trainer.control_link import AgentContact
from elaswave_plugin.words import check_words

EXIT_CONFIGURATION = 2
EXIT_FAILURE = 1
# Errors that every worker meets alike.
_OF_THE_JOB = (
    *(ConfigurationError, LayoutError, PlanDigestError, SnapshotGapError),
    *(WeightsDifferError, CheckpointUnreadableError, TooLittleMemoryError),
)

# What tells an error of the script from one that a line of ours, left out, has caused.
Explain = Callable[[BaseException], ConfigurationError | None]
# Set once, by the job that attaches; a process has one script.
_EXPLAIN: ContextVar[Explain] = ContextVar("explain", default=lambda error: None)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def ends_in_a_sentence(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """Turn an ElasWaveError that leaves ``function`` into a sentence and the process's end.

    What concerns all (bad input, lost state, a bad checkpoint, too little memory) stops
    the whole job, and its leader prints the reason once; anything else is the loss of this worker,
    and so is everything that ends one that comes later. Exit code 2 for bad input, also for
    a name that ``function`` does not have, 0 for a worker that has left as it was told to, 1 for
    the rest.
    """

    @wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except ElasWaveError as error:
            end_in_a_sentence(error)
        except TypeError:
            try:
                _check_names(function, kwargs)
            except ConfigurationError as error:
                end_in_a_sentence(error)
            raise

    return guarded


def _check_names(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Raise ConfigurationError where a call gives a name that the function does not have."""
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        known = [name for name in parameters if name != "self"]
        check_words(given, known, f"{function.__name__}: unknown name")


def explain_errors(explain: Explain) -> None:
    """Have ``explain(error)`` say what to write where an error of the script comes from that."""
    _EXPLAIN.set(explain)


def explained(error: BaseException) -> ConfigurationError | None:
    """Return what to write, where an error of the script comes from a line that is left out."""
    return _EXPLAIN.get()(error)


def end_in_a_sentence(error: ElasWaveError) -> NoReturn:
    """End this process, or the job, as ``ends_in_a_sentence`` does."""
    code = EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_FAILURE
    if isinstance(error, JobStopped):
        code = error.exit_code
    if AGENT not in os.environ or not isinstance(error, (*_OF_THE_JOB, JobStopped)):
        print(f"elaswave: {error}", file=sys.stderr)
    elif isinstance(error, _OF_THE_JOB) and os.environ[INCARNATION] != "0":
        print(f"elaswave: worker {os.environ[SLOT]}, started again: {error}", file=sys.stderr)
    elif isinstance(error, _OF_THE_JOB):
        contact = AgentContact.from_environment(os.environ)
        contact.say(Stop(reason=str(error), exit_code=code))
    raise SystemExit(code) from error
