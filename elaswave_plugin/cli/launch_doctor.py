"""`elaswave doctor LAUNCH`: what a job would say to each setting, and how a corpus is answered.

Nothing is run or imported of a framework. The tables are those that a job obeys.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from elaswave_plugin.adapters import deepspeed_settings
from elaswave_plugin.adapters.answers import Answer, replies, worst
from elaswave_plugin.adapters.megatron_lm_settings import settings, why_not
from elaswave_plugin.cli.launch_files import Launch, of_record
from elaswave_plugin.cli.launch_memory import Memory, memory_of
from elaswave_plugin.errors import ConfigurationError

# Drivers that have a training loop of their own, which no argument of Megatron-LM starts.
_OTHER_LOOPS = ("megatron-bridge", "ms-swift", "primus:megatron_bridge")
_ANOTHER_LOOP = "another loop, not counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The answer to one setting of a launch."""

    setting: str
    answer: Answer
    sentence: str


def answers_of(launch: Launch) -> tuple[Said, ...]:
    """Return the answers to whatever of a launch is not simply carried."""
    if launch.deepspeed is not None:
        return tuple(
            Said(setting=sentence.split(" is ")[0], answer=Answer.REFUSED, sentence=sentence)
            for sentence in deepspeed_settings.problems(launch.deepspeed)
        )
    said = [
        Said(setting=reply.setting.option, answer=reply.answer, sentence=reply.sentence)
        for reply in replies(settings(), launch.arguments)
    ]
    reason = why_not(launch.script, launch.arguments)
    if reason is not None:
        said.append(Said(setting=launch.script, answer=Answer.REFUSED, sentence=reason))
    return tuple(said)


def exit_code_of(answer: Answer) -> int:
    """Return the exit code of the command."""
    return {Answer.LESS: 1, Answer.REFUSED: 2}.get(answer, 0)


def show(launch: Launch, console: Console) -> int:
    """Print each answer, the worst one last; returns the exit code of the command."""
    said = answers_of(launch)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for title in ("setting", "answer", "what is done, or to do"):
        table.add_column(title, overflow="fold")
    order = list(Answer)
    for one in sorted(said, key=lambda one: order.index(one.answer), reverse=True):
        style = {Answer.REFUSED: "red", Answer.LESS: "yellow"}.get(one.answer)
        table.add_row(one.setting, str(one.answer), one.sentence, style=style)
    if said:
        console.print(table)
    if launch.unknown:
        console.print(f"not known without a run: {', '.join(launch.unknown)}")
    if launch.deepspeed is None:
        memory = _memory(launch)
        lines = memory.lines() if isinstance(memory, Memory) else (memory,)
        console.print("\n".join(lines), highlight=False)
    answer = worst(one.answer for one in said)
    number = sum(one.answer is answer for one in said)
    verdict = {
        Answer.CARRIED: "attaches as it is",
        Answer.ADJUSTED: "attaches; what is adjusted is said in one line at the start",
        Answer.LESS: f"attaches with less: {number} of its settings",
        Answer.REFUSED: f"is refused for {number} of its settings",
    }
    console.print(f"{launch.script or 'this launch'} {verdict[answer]}", highlight=False)
    return exit_code_of(answer)


def _memory(launch: Launch) -> Memory | str:
    return memory_of(launch.arguments, workers=launch.workers, nodes=launch.nodes)


def answer_of(launch: Launch) -> Answer:
    """Return the answer to the whole launch."""
    return worst(one.answer for one in answers_of(launch))


def as_json(launch: Launch) -> dict[str, Any]:
    """Return the answers, for programs."""
    said, memory = answers_of(launch), _memory(launch)
    return {
        "script": launch.script,
        "answer": str(worst(one.answer for one in said)),
        "memory_bytes": asdict(memory) if isinstance(memory, Memory) else None,
        "unknown": list(launch.unknown),
        "settings": [
            {"setting": one.setting, "answer": str(one.answer), "sentence": one.sentence}
            for one in said
        ],
    }


def read_corpus(path: Path) -> list[dict[str, Any]]:
    """Read records {"repo", "id", "driver", "script", "flags"} or {..., "config"}."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(records, list) or not all(
        isinstance(one, dict) and "repo" in one and ("flags" in one or "config" in one)
        for one in records
    ):
        raise ConfigurationError(
            f'{path} holds no list of records with "repo" and "flags" or "config"'
        )
    return records


def show_corpus(records: Sequence[Mapping[str, Any]], console: Console) -> int:
    """Print the share of each answer, every repository counting the same, and what refuses most."""
    ours = [one for one in records if one.get("driver") not in _OTHER_LOOPS]
    said = [answers_of(of_record(one)) for one in ours]
    weight = _weights(ours)
    console.print(
        f"{len(ours)} records of {len({one['repo'] for one in ours})} repositories; "
        f"{len(records) - len(ours)} {_ANOTHER_LOOP}",
        highlight=False,
    )
    answers = [worst(one.answer for one in each) for each in said]
    attaching = [answer is not Answer.REFUSED for answer in answers]
    for answer in Answer:
        _print_share(console, str(answer), [one is answer for one in answers], weight)
    _print_share(console, "attach (not refused)", attaching, weight)
    for answer in (Answer.REFUSED, Answer.LESS, Answer.ADJUSTED):
        console.print(f"\n{answer}: records, share, records with no other of this answer")
        _print_settings(console, answer, said, weight)
    return 0


def _weights(records: Sequence[Mapping[str, Any]]) -> list[float]:
    sizes = Counter(one["repo"] for one in records)
    return [1 / sizes[one["repo"]] / len(sizes) for one in records]


def _print_share(
    console: Console, name: str, holds: Iterable[bool], weight: Sequence[float]
) -> None:
    pairs = [part for held, part in zip(holds, weight, strict=True) if held]
    console.print(f"  {len(pairs):5d} {100 * sum(pairs):5.1f} %  {name}", highlight=False)


def _print_settings(
    console: Console,
    answer: Answer,
    said: Sequence[Sequence[Said]],
    weight: Sequence[float],
) -> None:
    names = [{one.setting for one in each if one.answer is answer} for each in said]
    count = Counter(name for each in names for name in each)
    alone = Counter(next(iter(each)) for each in names if len(each) == 1)
    share: Counter[str] = Counter()
    for each, part in zip(names, weight, strict=True):
        for name in each:
            share[name] += part  # type: ignore[assignment]
    for name, part in share.most_common():
        console.print(
            f"  {count[name]:5d} {100 * part:5.1f} % {alone[name]:5d}  {name}", highlight=False
        )
