"""Downloads files from the Hugging Face hub, and reports a failure in one line."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.core.errors import ConfigError
from slipstream.core.machine.description import installed

# Prefix of a data set's name in the arguments of an environment.
DATA_PREFIX = "hf:"
# Form of a commit, which always names the same state of a repository.
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFiles:
    """A repository on the hub; a `revision` of None means the newest commit of the main branch."""

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None = None
    # Name of the repository in errors; "" means `name`.
    shown: str = ""

    def bring(self, patterns: Sequence[str], *, without: Sequence[str] = ()) -> Path:
        """Downloads the files that match `patterns` but not `without`; returns their folder's path.

        The folder is in the hub's cache and has the name of the commit. Files already in the cache
        are not downloaded again. Raises ConfigError with one line if the hub's client is not
        installed or a download fails.
        """
        if not installed(["huggingface_hub"]):
            raise ConfigError(f"{self} needs the hub's client: pip install huggingface_hub")
        import huggingface_hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import disable_progress_bars

        if self.kind == "dataset" or not sys.stderr.isatty():
            disable_progress_bars()
        place = "" if self.kind == "model" else f"{self.kind}s/"
        page = f"{constants.ENDPOINT}/{place}{self.name}"
        try:
            folder = huggingface_hub.snapshot_download(
                self.name,
                repo_type=self.kind,
                revision=self.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(without),
            )
        except errors.HFValidationError as error:
            raise ConfigError(f"{self}: a name is owner/name: {_first_line(error)}") from error
        except errors.GatedRepoError as error:
            raise ConfigError(
                f"{self} is gated: accept its terms at {page}, then let `hf auth login` put your "
                f"token into {constants.HF_TOKEN_PATH}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ConfigError(f"{self} has no revision {self.revision!r}") from error
        except errors.HfHubHTTPError as error:
            is_missing = isinstance(error, errors.RepositoryNotFoundError)
            if not is_missing and error.response.status_code not in (401, 403):
                raise ConfigError(f"{self}: {_first_line(error)}") from error
            raise ConfigError(
                f"{self} is not at {page}, or is private: `hf auth login` puts your token into "
                f"{constants.HF_TOKEN_PATH}"
            ) from error
        except OSError as error:
            # Offline mode, no answer, and nothing in the cache are all errors of the system.
            cause = (
                "HF_HUB_OFFLINE keeps it from being asked for"
                if constants.HF_HUB_OFFLINE
                else f"{constants.ENDPOINT} gives no answer: {_first_line(error)}"
            )
            raise ConfigError(f"{self} is not in {constants.HF_HUB_CACHE}, and {cause}") from error
        return Path(folder)

    def holds(self, folder: Path) -> bool:
        """Whether `folder` is in the hub's cache of this repository, where `bring` puts files."""
        cached = f"{self.kind}s--{self.name.replace('/', '--')}"
        return folder.parts[-3:-1] == (cached, "snapshots")

    def __str__(self) -> str:
        return self.shown or self.name


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
