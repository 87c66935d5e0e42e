"""The answers that a job gives to a setting: carried, adjusted, carried with less, or refused.

A table of settings is read at attach, by `elaswave doctor` and by docs/limits.md.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elaswave_plugin.errors import ConfigurationError

Values = Mapping[str, Any]


class Answer(StrEnum):
    """An answer to a setting, from the best to the worst."""

    CARRIED = "carried"
    ADJUSTED = "adjusted"
    LESS = "carried with less"
    REFUSED = "refused"


# A setting that is not set, and one to which the job assigns nothing.
UNSET = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting, the values of it that are carried, and the answer to any other value."""

    name: str
    """As the script's arguments, or the framework's configuration, name it."""
    carried: tuple[Any, ...]
    """Values with which all promises hold; the first is the one named to users."""
    says: str
    """Of what is refused, what to do; else what the job makes of it."""
    answer: Answer = Answer.REFUSED
    default: Any = UNSET
    """The value where nobody sets it, if that is not the first that is carried."""
    becomes: Any = UNSET
    """The value that the job assigns, where the answer is no refusal."""
    flag: str = ""
    """The option of the command line, if it is not the name with dashes."""
    where: Callable[[Values], bool] | None = None
    """The settings among which any of this matters; all where it is None."""
    of: str = ""
    """The configuration of the framework that has it."""
    since: str = "0.16"
    """The versions that have it."""

    @property
    def option(self) -> str:
        """The option of the command line."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def unset_value(self) -> Any:
        """The value where nobody sets it."""
        return self.carried[0] if self.default is UNSET else self.default

    def reply(self, values: Values, shown: str | None = None) -> "Reply | None":
        """Return the answer to the value among these; None where it is carried.

        ``shown``: the name to call it by.
        """
        seen = values.get(self.name, self.unset_value)
        # An empty list switches nothing on.
        if seen in self.carried or seen == [] or (self.where and not self.where(values)):
            return None
        name, wanted = shown or self.option, " or ".join(map(str, self.carried))
        sentence = f"{name} is {seen}: {self.says}"
        if self.answer is Answer.REFUSED:
            sentence = f"{name} is {seen}, and elaswave_plugin carries {wanted}: {self.says}"
        return Reply(setting=self, seen=seen, sentence=sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply of a job to one value of a setting."""

    setting: Setting
    seen: Any
    sentence: str

    @property
    def answer(self) -> Answer:
        """The answer."""
        return self.setting.answer


def replies(table: Iterable[Setting], values: Values) -> tuple[Reply, ...]:
    """Return the answers to all settings that are not simply carried."""
    found = (setting.reply(values) for setting in table)
    return tuple(reply for reply in found if reply is not None)


def worst(answers: Iterable[Answer]) -> Answer:
    """Return the worst of these, which is the answer to all together."""
    order = list(Answer)
    return max(answers, key=order.index, default=Answer.CARRIED)


def refuse(said: Iterable[str]) -> None:
    """Raise ConfigurationError with all refusals, if there are any."""
    sentences = list(said)
    if len(sentences) == 1:
        raise ConfigurationError(sentences[0])
    if sentences:
        numbered = "; ".join(f"({n}) {one}" for n, one in enumerate(sentences, 1))
        raise ConfigurationError(f"{len(sentences)} settings are refused: {numbered}")
