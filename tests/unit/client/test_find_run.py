"""How commands find a run by its folder or name."""

from pathlib import Path

import pytest
from slipstream.client.cli import parse
from slipstream.client.requests import connect
from slipstream.client.run_folder import (
    FoundRun,
    begin_run,
    find_run,
    hold_run_folder,
    identified,
    write_config,
)
from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import journaled_run_id
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection
from slipstream.learner.controller.application import begin
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.run import ControlledRun
from support.fakes.small_configs import config_of

ADDRESS = "127.0.0.1:12345"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run with the name test below runs of the present folder."""
    monkeypatch.chdir(tmp_path)
    return config_of(Path("runs"))


def journal_of(config: Config) -> str:
    with Journal(config.run_dir / "journal") as journal:
        return begin(
            journal,
            config.run_dir / "journal",
            ControlledRun(config, config.run.id or "test-new"),
        ).run_id


def started(config: Config) -> str:
    with hold_run_folder(config):
        write_config(config, config.run_dir)
        return begin_run(config, ADDRESS)


def test_a_run_is_found_by_its_folder_its_name_or_because_it_is_alone(
    config: Config,
) -> None:
    run_id = started(config)
    config = identified(config, ADDRESS, run_id)
    assert journal_of(config) == run_id
    found_run = FoundRun(
        ADDRESS, SecuritySection(token_file=Path("runs/test/token")), run_id
    )
    assert [find_run(run) for run in ("runs/test", "test")] == [found_run, found_run]
    folder = Path("runs/test").resolve()
    token = SecuritySection(token_file=folder / "token")
    assert find_run(str(folder)) == FoundRun(ADDRESS, token, run_id)
    with pytest.raises(
        ConfigError, match="no run goes on in runs/: name a run, or give"
    ):
        find_run(None)
    with hold_run_folder(config):
        assert find_run(None) == found_run
        other = config.model_copy(
            update={"run": config.run.model_copy(update={"name": "other"})}
        )
        started(other)
        Path("runs/latest").symlink_to("test")
        assert find_run(None) == found_run, "a link is another name of the same run"
        with (
            hold_run_folder(other),
            pytest.raises(
                ConfigError, match="the runs test, other go on in runs/: name a run"
            ),
        ):
            find_run(None)


def test_a_run_of_an_earlier_version_is_found(config: Config) -> None:
    started(config)
    path = config.run_dir / "config.toml"
    text = path.read_text()
    path.write_text(
        text.replace("[security]\n", "[security]\nallow_public_addresses = false\n")
    )
    assert path.read_text() != text
    assert find_run("test").address == ADDRESS


def test_a_run_that_goes_on_keeps_its_id_and_a_new_one_has_its_own(
    config: Config,
) -> None:
    first = started(config)
    assert first.startswith("test-")
    assert started(config) != first, "nothing of it is journaled"
    journal_of(identified(config, ADDRESS, first))
    assert started(config) == first
    other = identified(config, ADDRESS, "test-of-others")
    with pytest.raises(
        ConfigError, match=f"run.id must stay {first} when a run goes on"
    ):
        started(other)
    with pytest.raises(
        ConfigError, match=f"holds run {first}, and run.id is test-of-others"
    ):
        journal_of(other)


def test_a_torn_first_line_has_no_id_and_the_next_log_has(config: Config) -> None:
    run_id = journal_of(config)
    folder = config.run_dir / "journal"
    journal = (folder / "journal.log").read_bytes()
    (folder / "journal-2.log").write_bytes(journal)
    (folder / "journal.log").write_bytes(journal[:40])
    assert journaled_run_id(config.run_dir) == run_id
    (folder / "journal-2.log").write_bytes(b"00000000 [3]\n")
    assert journaled_run_id(config.run_dir) is None


def test_the_settings_of_a_run_can_be_those_of_another_one(config: Config) -> None:
    started(config)
    text = (config.run_dir / "config.toml").read_text()
    assert "127.0.0.1:0" in text
    assert "\nid = " not in text


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ("missing", "missing: no such folder"),
        ("runs/missing", "runs/missing: no such folder"),
        (
            "runs",
            "runs is no run's folder: it has no config.toml; runs there are runs/test",
        ),
        (
            "test",
            "runs/test/controller.address: No such file or directory; give --controller",
        ),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(
    config: Config, run: str, line: str
) -> None:
    write_config(config, config.run_dir)
    with pytest.raises(ConfigError, match=line):
        find_run(run)


def test_a_command_takes_the_credentials_of_the_run_unless_it_is_told_others(
    config, tmp_path
):
    files = {name: tmp_path / name for name in ("first", "second", "ca")}
    for name, file in files.items():
        file.write_text(name * 10)
    security = SecuritySection(token_file=files["first"], tls_ca=files["ca"])
    started(config.model_copy(update={"security": security}))

    def of(*arguments: str) -> tuple[str | None, bytes | None]:
        credentials = connect(parse(["status", *arguments]))._credentials
        return credentials.token, credentials.ca

    assert of("test") == ("first" * 10, b"ca" * 10)
    assert of("test", "--token-file", str(files["second"])) == (
        "second" * 10,
        b"ca" * 10,
    )
    assert of("--controller", ADDRESS) == (None, None)
    own = SecuritySection(
        token_file=files["first"], tls_certificate=files["ca"], tls_key=files["ca"]
    )
    started(config.model_copy(update={"security": own}))
    assert of("test") == ("first" * 10, b"ca" * 10)
    with pytest.raises(
        ConfigError, match="give --controller or the run test, not both"
    ):
        of("test", "--controller", ADDRESS)
