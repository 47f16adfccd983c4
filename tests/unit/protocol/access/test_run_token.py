"""The token of a run on loopback: who makes it, who finds it, and what a call without it learns."""

import os
import stat
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection
from slipstream.protocol.access.run_token import (
    make_run_token,
    run_credentials,
    run_security,
)
from support.rigs.controller_runs import make_config

REMOTE = {"controller__address": "10.0.0.5:7070"}


def token_of(config: Config) -> Path:
    return config.run_dir / "token"


def test_a_run_on_loopback_makes_a_token_for_its_owner_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    umask = os.umask(0)
    try:
        make_run_token(config)
    finally:
        os.umask(umask)
    path = token_of(config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    token = path.read_text().strip()
    assert len(token) == 64
    assert run_credentials(config).token == token


def test_a_run_that_goes_on_keeps_its_token_and_takes_it_from_others(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    make_run_token(config)
    token = token_of(config).read_text()
    # As in a copy of the folder.
    token_of(config).chmod(0o644)
    make_run_token(config)
    assert token_of(config).read_text() == token
    assert stat.S_IMODE(token_of(config).stat().st_mode) == 0o600


def test_two_runs_have_two_tokens(tmp_path: Path) -> None:
    configs = [make_config(tmp_path / name) for name in ("a", "b")]
    for config in configs:
        make_run_token(config)
    assert len({run_credentials(config).token for config in configs}) == 2


@pytest.mark.parametrize("changes", [{"security__token_file": "secret"}, REMOTE])
def test_settings_with_a_token_and_other_addresses_have_none_in_the_folder(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    config = make_config(tmp_path, **changes)
    make_run_token(config)
    assert not token_of(config).exists()
    # A token that lies there from an earlier start is not sent to another machine.
    config.run_dir.mkdir(parents=True, exist_ok=True)
    token_of(config).write_text("t" * 40)
    address = config.controller.address
    assert run_security(config.security, address, config.run_dir) == config.security


def test_a_folder_without_a_token_gives_none(tmp_path: Path) -> None:
    section = SecuritySection()
    assert run_security(section, "127.0.0.1:7070", tmp_path) == section
    # An empty file: the run that makes the token has not written it yet.
    (tmp_path / "token").touch()
    assert run_security(section, "127.0.0.1:7070", tmp_path) == section


def test_a_link_in_place_of_the_token_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("other text")
    token_of(config).symlink_to(elsewhere)
    with pytest.raises(
        ConfigError, match=r"r/token cannot be written: Too many levels of symb"
    ):
        make_run_token(config)
    assert elsewhere.read_text() == "other text"
