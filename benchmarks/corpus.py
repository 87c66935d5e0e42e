"""Counts how `elaswave doctor` answers the launches of many repositories; nothing is run."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import command
from elaswave_plugin.adapters.answers import Answer, worst
from elaswave_plugin.cli.launch_doctor import Said, answers_of
from elaswave_plugin.cli.launch_files import Launch, arguments_of
from elaswave_plugin.errors import ConfigurationError

# Drivers that have a training loop of their own, which no argument of Megatron-LM starts.
_OTHER_LOOPS = ("megatron-bridge", "ms-swift", "primus:megatron_bridge")
_ANOTHER_LOOP = "another loop, not counted"


def of_record(record: Mapping[str, Any]) -> Launch:
    """A record of a corpus: "flags" of Megatron-LM, or a "config" of DeepSpeed."""
    if "config" in record:
        return Launch(deepspeed=record["config"])
    script = str(record.get("script", "")).rpartition(":")[2]
    return Launch(script=script, arguments=arguments_of(record["flags"]))


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


def corpus(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="Records of launches.")],
) -> int:
    """Print the share of each answer to the launches of a file."""
    return show_corpus(read_corpus(file), Console())


def main(argv: Sequence[str]) -> int:
    """Count as the command line says."""
    return command.run(corpus, "corpus", argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
