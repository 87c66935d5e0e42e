"""Options of ours that are misspelled, or stand before the script: said before anything starts."""

import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.launch.options import parse_run_args
from elaswave_plugin.launch.script_options import check_script_options


def test_every_setting_is_an_option_and_may_be_abbreviated() -> None:
    names = [name.replace("_", "-") for name in ElasticConfig.model_fields]
    check_script_options([f"--elaswave-{name}=1" for name in names])
    check_script_options(
        ["--elaswave", "--elaswave-config", "f.toml", "--elaswave-respa=3", "--lr"]
    )
    check_script_options(["--elaswave_data_timeout_s", "3"])


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--elaswave-respwan=3", "did you mean --elaswave-respawn?"),
        ("--elaswave_consistancy", "did you mean --elaswave-consistency?"),
        ("--elaswave-quantum-flux-capacity", "docs/settings.md lists the settings"),
    ],
)
def test_a_misspelled_one_is_told(option: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_run_args([__file__, "--elaswave", option])
    name = option.partition("=")[0]
    assert str(raised.value) == f"{name} is no option of elaswave_plugin; {meant}"


def test_one_before_the_script_is_told_where_it_goes() -> None:
    with pytest.raises(ConfigurationError, match="are the script's, and go behind it"):
        parse_run_args(["--elaswave", __file__])
