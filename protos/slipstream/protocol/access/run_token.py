"""The token of a run on loopback: a file in the run's folder that its owner alone may read.

Every account and every program of a machine reaches loopback. Whoever may read the folder finds the
token there: the command's own processes, commands that name the run, `Client.of_run`. Settings with
`security.token_file`, which other addresses need, have no such file.
"""

import fcntl
import os
import secrets
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import TOKEN
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection
from slipstream.protocol.access.security import Credentials, is_loopback

_RANDOM_BYTES = 32
_OWNER_ONLY = 0o600


def make_run_token(config: Config) -> None:
    """Makes the token of a run that needs one; a token that is there stays.

    Raises ConfigError if the file cannot be written.
    """
    if config.security.token_file is not None or not is_loopback(config.controller.address):
        return
    path = config.run_dir / TOKEN
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, _OWNER_ONLY), "r+b") as file:
            # Two commands of a run may start at one time.
            fcntl.flock(file, fcntl.LOCK_EX)
            # A copy of the folder may have other rights.
            os.fchmod(file.fileno(), _OWNER_ONLY)
            if not file.read(1):
                file.write(f"{secrets.token_hex(_RANDOM_BYTES)}\n".encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def run_security(security: SecuritySection, address: str, folder: Path) -> SecuritySection:
    """Returns the section with the token of the run's `folder`, if there is one to be used.

    `address` is the controller's.
    """
    if security.token_file is not None or not is_loopback(address):
        return security
    path = folder / TOKEN
    try:
        has_token = path.stat().st_size > 0
    except OSError:
        return security
    return security.model_copy(update={"token_file": path}) if has_token else security


def run_credentials(config: Config, address: str | None = None) -> Credentials:
    """Reads the files of a run's settings, and the token of its folder, if it has one.

    `address` is the controller's, by default that of the settings. Raises ConfigError for a missing
    file or an invalid token.
    """
    address = address or config.controller.address
    return Credentials.load(run_security(config.security, address, config.run_dir))
