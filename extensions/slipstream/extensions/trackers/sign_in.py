"""Says whether somebody is signed in to Weights & Biases, without importing its package.

The places are those in which the package itself looks, in its own order: variables of the process,
its files of settings, and the file in which `wandb login` keeps keys.
"""

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.core.errors import ConfigError

# Modes in which nothing is sent.
_APART = ("offline", "disabled", "dryrun")
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SERVICE = "https://api.wandb.ai"


def check_wandb() -> None:
    """Raises ConfigError where a run could send nothing, for want of a key."""
    if sends_nothing():
        return
    settings = _settings()
    if any(os.environ.get(name) for name in _KEYS) or settings.get("api_key"):
        return
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or _SERVICE
    host = urlsplit(address).hostname or address
    if not _has_key(host):
        raise ConfigError(
            f"tracking.trackers has 'wandb', and nobody is signed in at {host}: run `wandb login`, "
            "set WANDB_API_KEY, or keep the files here with WANDB_MODE=offline"
        )


def sends_nothing() -> bool:
    """Whether the package is told to keep its files on this machine, or to do nothing."""
    settings = _settings()
    mode = os.environ.get("WANDB_MODE") or settings.get("mode", "")
    return mode in _APART or settings.get("disabled", "").lower() == "true"


def _settings() -> Mapping[str, str]:
    """Returns the package's settings of the user and of this folder, which go before."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    own_folder = Path(os.environ.get("WANDB_DIR") or ".")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(
            [
                Path(folder) / "settings",
                own_folder / "wandb" / "settings",
                own_folder / ".wandb" / "settings",
            ]
        )
    except (configparser.Error, UnicodeDecodeError):
        # The package says what is wrong with the file.
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _has_key(host: str) -> bool:
    named = os.environ.get("NETRC")
    home = Path.home()
    paths = [Path(named)] if named else [home / ".netrc", home / "_netrc"]
    for path in paths:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except netrc.NetrcParseError:
            # The package reads what it can of such a file.
            return True
        except OSError:
            continue
    return False
