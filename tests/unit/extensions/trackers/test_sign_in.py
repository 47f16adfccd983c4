"""A run with Weights & Biases is refused where nobody is signed in."""

from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.extensions.trackers.sign_in import check_wandb

VARIABLES = (
    "WANDB_MODE",
    "WANDB_API_KEY",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_DIR",
    "NETRC",
)
REFUSAL = (
    "tracking.trackers has 'wandb', and nobody is signed in at api.wandb.ai: run `wandb login`, "
    "set WANDB_API_KEY, or keep the files here with WANDB_MODE=offline"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nobody_is_signed_in_without_any_key() -> None:
    with pytest.raises(ConfigError) as caught:
        check_wandb()
    assert str(caught.value) == REFUSAL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_MODE", "offline"),
        ("WANDB_MODE", "disabled"),
        ("WANDB_API_KEY", "x" * 40),
        ("WANDB_IDENTITY_TOKEN_FILE", "token"),
    ],
)
def test_a_variable_is_enough(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    check_wandb()


def write_key(path: Path, host: str) -> None:
    path.write_text(f"machine {host}\n  login user\n  password {'x' * 40}\n")
    path.chmod(0o600)


def test_a_key_of_the_service_is_enough_and_one_of_another_host_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(home / ".netrc", "api.wandb.ai")
    check_wandb()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443/x")
    with pytest.raises(ConfigError, match=r"signed in at wandb\.example\.org: run"):
        check_wandb()
    elsewhere = home / "keys"
    write_key(elsewhere, "wandb.example.org")
    monkeypatch.setenv("NETRC", str(elsewhere))
    check_wandb()


@pytest.mark.parametrize("line", ["mode = offline", "disabled = true", "api_key = x"])
@pytest.mark.parametrize("place", [".config/wandb/settings", "wandb/settings"])
def test_the_package_s_files_of_settings_are_read(
    home: Path, line: str, place: str
) -> None:
    path = home / place
    path.parent.mkdir(parents=True)
    path.write_text("[default]\nentity = me\n")
    with pytest.raises(ConfigError):
        check_wandb()
    path.write_text(f"[default]\n{line}\n")
    check_wandb()


def test_a_damaged_file_of_settings_is_no_login(home: Path) -> None:
    path = home / "wandb" / "settings"
    path.parent.mkdir()
    path.write_text("mode = offline")
    with pytest.raises(ConfigError, match="nobody is signed in"):
        check_wandb()
