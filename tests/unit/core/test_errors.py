"""Names that become paths stay inside their folder."""

from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError, check_server_id
from support.fakes.small_configs import config_of

OUTSIDE = [
    "",
    ".",
    "..",
    "../x",
    "a/../../b",
    "/etc",
    "a/b",
    "a\\b",
    "a\nb",
    "a\n",
    "\x1b[2J",
    "a b",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_run_cannot_be_named_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run.name"):
        config_of(tmp_path, name=name)


@pytest.mark.parametrize("name", [*OUTSIDE, "-x", "s" * 101, "größe"])
def test_a_server_cannot_be_named_out_of_its_folder(name: str) -> None:
    with pytest.raises(
        ConfigError, match="the id of a rollout server has up to 100 letters"
    ):
        check_server_id(name)


@pytest.mark.parametrize("name", ["server-0", "node7.rack_2-a1b2c3", "S" * 100])
def test_usual_names_are_taken(name: str, tmp_path: Path) -> None:
    assert check_server_id(name) == name
    assert config_of(tmp_path, name=name).run_dir == tmp_path / name
