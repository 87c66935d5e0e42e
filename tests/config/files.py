"""The configuration that a TOML file gives to a script."""

import argparse
from pathlib import Path

from elaswave_plugin.command_line import add_arguments, from_namespace
from elaswave_plugin.config import ElasticConfig


def config_of(path: Path) -> ElasticConfig:
    """As a script reads it that is given the file and no other option."""
    argv = ["--elaswave", "--elaswave-config", str(path)]
    config = from_namespace(add_arguments(argparse.ArgumentParser()).parse_args(argv))
    assert config is not None
    return config
