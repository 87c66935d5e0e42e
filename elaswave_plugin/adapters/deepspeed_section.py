"""The section "elaswave" of a DeepSpeed configuration, checked; `elaswave doctor` reads it as well.

Nothing of DeepSpeed is imported.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from elaswave_plugin.config import ElasticConfig, from_section
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import FLAG, NAME, check_options, option_of

# Options that the launcher reads among those of any script.
_OF_THE_LAUNCHER = ("dir", "quiesce_timeout_s", "require_secret")


def read_section(config: Mapping[str, Any]) -> ElasticConfig | None:
    """The settings of a configuration; None where it has no section, or one that is not enabled.

    Raises ConfigurationError for a wrong section, enabled or not.
    """
    section = config.get(NAME)
    if section is None:
        return None
    source = f'section "{NAME}" of the DeepSpeed configuration'
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{source} is {section!r}, wanted keys and values")
    values = dict(section)
    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"{source}: key 'enabled' is {enabled!r}, wanted true or false")
    values.setdefault("consistency", "fast")
    # A script's own means are not weighted by shares of unequal size.
    values.setdefault("slow_workers", "name")
    switch = {"enabled": "the switch of the section, true or false"}
    settings = from_section(values, source=source, elsewhere=switch)
    settings.check_without_stages()
    return settings if enabled else None


def check_command_line(words: Sequence[str]) -> None:
    """Raise ConfigurationError for an option of ours that no script of DeepSpeed's obeys."""
    check_options(words)
    obeyed = [option_of(key) for key in _OF_THE_LAUNCHER]
    for word in words:
        option = word.partition("=")[0]
        if option.startswith(f"{FLAG}-") and option not in obeyed:
            key = option.removeprefix(f"{FLAG}-").replace("-", "_")
            raise ConfigurationError(
                f"{option} is given to a script of DeepSpeed's, which has its settings in the"
                f' section "{NAME}" of its configuration: set {key!r} there'
            )
