"""The section "elaswave" of a DeepSpeed configuration: the same keys as everywhere, and enabled."""

import os
from collections.abc import Mapping
from typing import Any

from elaswave_plugin.adapters.deepspeed.configuration import SECTION
from elaswave_plugin.config import ElasticConfig, from_section, in_the_launch_dir
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import QUIESCE, variable


def elastic_config(config: Mapping[str, Any]) -> ElasticConfig | None:
    """The settings of a configuration; None where it has no section, or one that is not enabled.

    ELASWAVE_DIR, which ``elaswave run --dir`` sets, is the default of ``dir``.
    Raises ConfigurationError for a wrong section, enabled or not.
    """
    section = config.get(SECTION)
    if section is None:
        return None
    source = f'section "{SECTION}" of the DeepSpeed configuration'
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{source} is {section!r}, wanted keys and values")
    values = dict(section)
    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"{source}: key 'enabled' is {enabled!r}, wanted true or false")
    if values.setdefault("consistency", "fast") != "fast":
        raise ConfigurationError(
            f"{source}: key 'consistency' is {values['consistency']!r}, wanted 'fast': in a loop "
            "that the script owns, shares change their size and sums their order"
        )
    settings = from_section(values, source=source)
    settings.check_without_stages()
    if "slow_workers" in values:
        raise ConfigurationError(
            f"{source}: key 'slow_workers' is {values['slow_workers']!r}, which is for jobs of"
            " Megatron-Core; the layers of an engine are not timed; leave it out"
        )
    told_s = os.environ.get(variable(QUIESCE))
    if QUIESCE in values and told_s is not None and float(told_s) != settings.quiesce_timeout_s:
        raise ConfigurationError(
            f"{source}: key '{QUIESCE}' is {settings.quiesce_timeout_s:g}, and the supervisors were"
            f" told {float(told_s):g}: they read the file of --deepspeed_config alone; set"
            f" {variable(QUIESCE)} where the configuration is made elsewhere"
        )
    return in_the_launch_dir(settings) if enabled else None
