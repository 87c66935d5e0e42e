"""Terms of a loss that weigh differently where workers have unequal shares of a micro-batch.

loss = elaswave_plugin.terms(tokens=cross_entropy, samples=distillation)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from elaswave_plugin.core.step.loss_parts import RULES
from elaswave_plugin.errors import ConfigurationError

Term = TypeVar("Term")
# What a job makes of the terms of the pass that runs: a process has one script, and no job to ask
# when the script computes its loss.
_WEIGH: ContextVar[Callable[[Mapping[str, object]], object] | None] = ContextVar(
    "weigh", default=None
)


def terms(**named: Term) -> Term:
    """Return the sum of a loss's terms, each weighed by what it is a mean of or is divided by.

    ``tokens``: by the labels, of its own batch or of all workers; ``samples``: a mean over samples;
    ``sum``: added up. What follows in the script may scale the whole. Without a job, and where all
    workers have equal shares, it is the plain sum. Raises ConfigurationError for other names.
    """
    for name in named:
        if name not in RULES:
            raise ConfigurationError(
                f"elaswave_plugin.terms got a term {name!r}, wanted {', '.join(RULES)}"
            )
    if not named:
        raise ConfigurationError(
            f"elaswave_plugin.terms got no term, wanted one or more of {', '.join(RULES)}: write"
            " terms(tokens=cross_entropy, samples=distillation)"
        )
    weigh = _WEIGH.get()
    return added(named) if weigh is None else weigh(named)  # type: ignore[return-value]


def added(named: Mapping[str, Term]) -> Term:
    """Return the plain sum."""
    first, *others = named.values()
    for one in others:
        first = first + one  # type: ignore[operator]
    return first


@contextmanager
def weighed_by(weigh: Callable[[Mapping[str, object]], object]) -> Iterator[None]:
    """Have ``weigh(terms)`` give what the script gets for its terms in this block."""
    undo = weigh_by(weigh)
    try:
        yield
    finally:
        undo()


def weigh_by(weigh: Callable[[Mapping[str, object]], object]) -> Callable[[], None]:
    """Have ``weigh(terms)`` give what the script gets for its terms; return what undoes that."""
    token = _WEIGH.set(weigh)
    return lambda: _WEIGH.reset(token)
