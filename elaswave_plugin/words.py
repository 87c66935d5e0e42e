"""Words of ours that a user writes: one that nobody reads is refused, and the nearest is named.

Standard library only: a launcher checks what its script is given before anything starts.
"""

import ast
import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError

NAME = "elaswave"
FLAG = f"--{NAME}"
# Likeness, as difflib has it, of names of which one is the other with a letter or two wrong.
_SAME_NAME, _NEAR_VARIABLE = 0.8, 0.7
# So many letters tell which word they begin.
_BEGINNING = 4


def check_words(
    given: Mapping[str, object],
    known: Collection[str],
    what: str,
    *,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raise ConfigurationError for the first word that is not known, with its value unless None.

    ``what``: the words' kind and place, as "section elaswave: unknown key". ``elsewhere``: words
    that are known in another place, and how they are given there.
    """
    elsewhere = elsewhere or {}
    for word, value in given.items():
        if word in known:
            continue
        near = nearest(word, dict.fromkeys([*known, *elsewhere]))
        meant = f"wanted one of {', '.join(known)}" if near is None else f"did you mean {near!r}?"
        if near is not None and near not in known:
            meant = f"{near!r} is {elsewhere[near]}"
        seen = "" if value is None else f" (value {value!r})"
        raise ConfigurationError(f"{what} {word!r}{seen}; {meant}")


def nearest(word: str, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word that is most like this one; letters with which all begin do not count.

    Nor does it count whether letters are capitals. A word of which this one is the beginning is
    most like it. ``cutoff``: the least likeness, as `difflib` has it.
    """
    first, last = min(known), max(known)
    others = (at for at in range(len(first)) if not last.startswith(first[: at + 1]))
    start = first[: next(others, len(first))].lower() if first != last else ""
    word = word.lower()
    begin = len(start) if word.startswith(start) else 0
    tails = {one[begin:].lower(): one for one in known}
    longer = [tail for tail in tails if tail.startswith(word[begin:])]
    if longer and len(word) - begin >= _BEGINNING:
        return tails[min(longer, key=len)]
    near = difflib.get_close_matches(word[begin:], tails, n=1, cutoff=cutoff)
    return tails[near[0]] if near else None


def check_options(words: Sequence[str]) -> None:
    """Raise ConfigurationError for an option of a script's that is nearly one of ours.

    Each is written whole and with dashes, as the launcher, which reads some of them, has it.
    """
    given = {name: value for name, value in _options(words).items() if _is_ours(name)}
    if given.keys() - {FLAG}:
        known = [FLAG, option_of("config"), *map(option_of, setting_names())]
        check_words(given, known, "unknown option")


def check_keys(config: Mapping[str, object]) -> None:
    """Raise ConfigurationError for a key of a DeepSpeed configuration that nearly names ours."""
    near = {key: None for key in config if isinstance(key, str) and key != NAME and _is_ours(key)}
    if near:
        keys = {f"{NAME}_{key}": f"{key!r} in the section {NAME!r}" for key in setting_names()}
        check_words(near, [NAME], "the DeepSpeed configuration: unknown key", elsewhere=keys)


def check_variables(environ: Iterable[str], known: Collection[str], own: Collection[str]) -> None:
    """Raise ConfigurationError for a variable that is nearly a ``known`` one, or a setting's.

    ``own``: those that processes of a job have, and no user sets.
    """
    names = [name for name in environ if "_" in name and _is_ours(name) and name not in own]
    keys = ("config", *setting_names()) if names else ()
    settings = {variable(key): given_as(key) for key in keys}
    for name in names:
        # Others may have variables of such names: a service of Kubernetes that is called so.
        tail = name.partition("_")[2]
        if nearest(variable(tail), {*known, *settings}, cutoff=_NEAR_VARIABLE) is not None:
            # Without its value, which may be a secret.
            check_words({name: None}, known, "unknown variable", elsewhere=settings)


def option_of(key: str) -> str:
    """The command line option of a key: snapshot_copies -> --elaswave-snapshot-copies."""
    return f"{FLAG}-{key.replace('_', '-')}"


def given_as(key: str) -> str:
    """Say how a setting is given to a script that is no DeepSpeed script."""
    return f"the option {option_of(key)}, behind the script"


def variable(name: str) -> str:
    """The environment variable of a launcher's option, as ELASWAVE_NOTICE_TIMEOUT_S."""
    return f"ELASWAVE_{name.upper()}"


def setting_names() -> list[str]:
    """The names of the settings: the fields of ElasticConfig, read from its source."""
    tree = ast.parse((Path(__file__).parent / "config.py").read_text("utf-8"))
    (settings,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ElasticConfig"
    )
    return [
        node.target.id
        for node in settings.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _options(words: Sequence[str]) -> dict[str, str | None]:
    """The options among the words, each with the value that stands behind it, if one does."""
    found: dict[str, str | None] = {}
    for word, after in zip(words, (*words[1:], "-"), strict=False):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else None if after.startswith("-") else after
    return found


def _is_ours(word: str) -> bool:
    """Return whether an option, key or variable begins with our name, or nearly so."""
    first, *_ = re.split("[-_.]", word.lstrip("-"))
    return word.startswith(FLAG) or nearest(first, [NAME], cutoff=_SAME_NAME) is not None
