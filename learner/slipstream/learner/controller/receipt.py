"""Receipts: an ended run packed into one file, from which anybody can train the run again.

A receipt is a .tar.gz. Its first file, `receipt.json`, lists size and digest of each other file.
The archive holds the files that `CONTENTS` matches: settings, journal, trained batches, metrics and
summary. It holds no model: `receipt.json` records the name of each model folder and the digests of
its files. It holds no secret.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from slipstream.core.configuration.config_file import dump_config, load_config, with_first_line
from slipstream.core.configuration.roles import role_folders
from slipstream.core.errors import ConfigError, ProtocolError
from slipstream.core.run_folder import CONFIG, JOURNAL, JOURNAL_LOG, METRICS, SUMMARY
from slipstream.core.settings.config import Config
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import batch_path, encoded, read_records
from slipstream.protocol.bounds import one_line
from slipstream.protocol.checkpoints import DIGEST_BYTES, FileEntry, describe_file

NAME = "receipt.json"
CONTENTS = re.compile(
    r"config\.toml|metrics\.jsonl|summary\.json|journal/journal\.log"
    r"|journal/batches/step-[0-9]{6,18}(-[0-9]{1,9})?\.pb"
)
MAX_LIST_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
# Files of a model's folder from which weights, shape and tokens come.
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
# Folder of a commit in the hub's cache.
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
# Settings whose values are secrets, by the end of their names.
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:(?:api|access|secret|private|service|signing|openai|anthropic)[_-]?keys?"
    r"|secrets?|password|passwd|passphrase|pwd|credentials?|authorization"
    r"|(?:access|auth|api|hf|bearer|github|judge|service)[_-]?token)$|^token$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"://[^/@\s]+@")
_SECRET_VARIABLE = re.compile(r"(?:TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIALS)$")
# A shorter value may be in any text.
_MIN_SECRET_BYTES = 8
_MAX_SECRET_BYTES = 1 << 16


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelFolder(_Record):
    """The name of a model's folder and the digests of its files.

    A receipt holds this record but not the files.
    """

    # The setting that names the folder.
    setting: str
    # OWNER/NAME@COMMIT of a model of the hub, else the folder in the settings.
    name: str
    files: tuple[FileEntry, ...]

    @property
    def digest(self) -> str:
        """A digest over the names and digests of all files of the folder."""
        return _digest(json.dumps([entry.model_dump() for entry in self.files]).encode())


class Receipt(_Record):
    """The content of `receipt.json`, the first file of a receipt."""

    format: Literal[1] = 1
    run: str
    models: tuple[ModelFolder, ...]
    files: tuple[FileEntry, ...]

    @property
    def digest(self) -> str:
        """The digest of `receipt.json` and so of all listed files; it identifies a receipt."""
        return _digest(self.encoded())

    def encoded(self) -> bytes:
        """Returns the bytes of `receipt.json`."""
        return self.model_dump_json(indent=1).encode()


def pack(run: Path, out: Path) -> None:
    """Writes the receipt of the run in the folder `run` to the file `out`.

    The same run gives the same bytes. No process may write to the folder meanwhile. Raises
    ConfigError if a file is missing or contains a secret, if no step is journaled, or if `out`
    exists or cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already: remove it, or name another file by --out")
    config = load_config(run / CONFIG)
    secrets = list(_secrets(config))
    with tempfile.TemporaryDirectory(prefix="slipstream-receipt-") as changed:
        files = _collected(run, config, Path(changed))
        for name, path in files.items():
            data = path.read_bytes()
            for what, value in secrets:
                if _MIN_SECRET_BYTES <= len(value) <= _MAX_SECRET_BYTES and value in data:
                    raise ConfigError(
                        f"{run / name} has the value of {what} in it: no receipt is made of it"
                    )
        entries = [
            describe_file(path.parent, path.name).model_copy(update={"path": name})
            for name, path in sorted(files.items())
        ]
        receipt = Receipt(run=config.run.name, models=tuple(_models(config)), files=tuple(entries))
        partial = out.with_name(f"{out.name}.partial")
        try:
            write_receipt(partial, receipt, files)
            partial.rename(out)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"{out} cannot be written: {error.strerror}") from error


def unpack(path: Path, folder: Path) -> Receipt:
    """Writes the files of the receipt `path` into `folder`, and returns its `receipt.json`.

    Raises ProtocolError unless the archive holds exactly the listed files, with the listed digests
    and with names that match `CONTENTS`. Never writes more bytes than are listed.
    """
    try:
        with tarfile.open(path, "r:gz") as archive:
            return _unpack(archive, folder)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError) as error:
        cause = one_line(str(error), 200)
        raise ProtocolError(f"{path} is no whole receipt: {cause}") from error


def describe_model(setting: str, path: Path) -> ModelFolder:
    """Returns the name of the model folder `path` and the digests of its files.

    `setting` is the setting that names the folder. `files` is empty if the folder is missing.
    """
    found = _SNAPSHOT.search(str(path))
    name = f"{found[1]}/{found[2]}@{found[3]}" if found else str(path)
    files = {file for pattern in _MODEL_FILES for file in path.glob(pattern) if file.is_file()}
    entries = [describe_file(path, file.name) for file in sorted(files)]
    return ModelFolder(setting=setting, name=name, files=tuple(entries))


def _collected(run: Path, config: Config, changed: Path) -> dict[str, Path]:
    """Returns the path of each file of the receipt, by its name in the receipt.

    Writes to `changed` the journal without the run's key, and the settings without Redis's login.
    Raises ConfigError if a file is missing, if no step was trained, or if another setting contains
    a secret.
    """
    records = list(read_records(run / JOURNAL))
    history = read_history(records)
    for name, spec in history.submitted.items():
        _check_settings(json.loads(spec), ("submitted", name))
    if not history.steps:
        raise ConfigError(f"{run} has no step that could be trained again")
    (changed / JOURNAL).mkdir()
    # The key signs deliveries of servers; a run that is resumed from a receipt makes a new key.
    kept = [{name: record[name] for name in record if name != "key"} for record in records]
    log = b"".join(encoded(number, record) for number, record in enumerate(kept, start=1))
    (changed / JOURNAL / JOURNAL_LOG).write_bytes(log)
    (changed / CONFIG).write_bytes(with_first_line(dump_config(_without_password(config))))
    paths = [
        *(changed / JOURNAL / JOURNAL_LOG, changed / CONFIG, run / METRICS, run / SUMMARY),
        *(batch_path(run / JOURNAL, each.step, each.attempt) for each in history.batches.values()),
    ]
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"{path} is not there: a receipt is of a run that has ended, with all of its "
                "batches (checkpoint.keep_batches)"
            )
    roots = {path: changed if path.is_relative_to(changed) else run for path in paths}
    return {str(path.relative_to(root)): path for path, root in roots.items()}


def _without_password(config: Config) -> Config:
    """Returns the settings without Redis's login; raises ConfigError for any other secret."""
    if config.queue.redis_url is not None:
        url = re.sub(r"//[^/?#]*@", "//", config.queue.redis_url.partition("?")[0])
        queue = config.queue.model_copy(update={"redis_url": url})
        config = config.model_copy(update={"queue": queue})
    _check_settings(config.model_dump(mode="json", exclude_none=True), ())
    return config


def _models(config: Config) -> Iterator[ModelFolder]:
    folders = [("model", config.model.path), *role_folders(config)]
    for name, path in folders:
        described = describe_model(f"{name}.path", path)
        if not described.files:
            raise ConfigError(
                f"{name}.path: {path} is not there, whose digest belongs into the receipt; call "
                "`slipstream receipt` in the folder in which the run was started"
            )
        yield described


def _check_settings(value: JsonValue, keys: tuple[str, ...]) -> None:
    """Raises ConfigError for a setting that is a secret by its name, or a URL with a password.

    `keys` is the path of `value` in the settings.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_settings(inner, (*keys, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_settings(inner, (*keys, str(number)))
    elif isinstance(value, str) and (
        value and any(map(_SECRET_NAME.search, keys)) or _URL_PASSWORD.search(value)
    ):
        raise ConfigError(
            f"{'.'.join(keys)} looks like a secret, and all settings are in a receipt: read it "
            "from a file or from the environment, or remove it from the run's config.toml"
        )


def _secrets(config: Config) -> Iterator[tuple[str, bytes]]:
    """Yields (name, value) of each secret in secret files, the Redis URL and the environment."""
    security, queue = config.security, config.queue
    files = {
        "security.token_file": security.token_file,
        "security.metrics_token_file": security.metrics_token_file,
        "security.tls_key": security.tls_key,
    }
    for end in ("controller", "rollout_server"):
        user = queue.user_of(end)
        files[f"queue.{end}.password_file"] = None if user is None else user.password_file
    for setting, path in files.items():
        if path is not None and Path(path).is_file():
            # The file has one token per line, or a key in PEM format.
            lines = Path(path).read_bytes().splitlines()
            yield from ((setting, line.strip()) for line in lines if not line.startswith(b"-----"))
    if queue.redis_url is not None and (password := urlsplit(queue.redis_url).password):
        yield "the password in queue.redis_url", password.encode()
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name):
            yield f"${name}", value.strip().encode()


def write_receipt(path: Path, receipt: Receipt, files: Mapping[str, Path]) -> None:
    """Writes the archive; `files` maps the name of each listed file to its path."""
    with (
        path.open("wb") as file,
        # The archive contains neither the time nor its file name.
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        first = receipt.encoded()
        archive.addfile(_member(receipt.run, NAME, len(first)), io.BytesIO(first))
        for entry in receipt.files:
            with files[entry.path].open("rb") as content:
                archive.addfile(_member(receipt.run, entry.path, entry.num_bytes), content)


def _member(run: str, name: str, num_bytes: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"{run}/{name}")
    member.size, member.mode = num_bytes, 0o600
    return member


def _unpack(archive: tarfile.TarFile, folder: Path) -> Receipt:
    members = iter(archive)
    first = next(members, None)
    if first is None or not first.isreg() or not first.name.endswith(f"/{NAME}"):
        raise ValueError(f"its first file is not {NAME}")
    if first.size > MAX_LIST_BYTES:
        raise ValueError(f"{NAME} has {first.size} bytes, {MAX_LIST_BYTES} at most are read")
    data = _content(archive, first).read()
    try:
        receipt = Receipt.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{NAME} is none: {error.errors()[0]['msg']}") from None
    if data != receipt.encoded():
        raise ValueError(f"{NAME} is not written as a receipt is")
    waiting = {entry.path: entry for entry in receipt.files}
    size, free = sum(each.num_bytes for each in receipt.files), shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(f"it needs {size} bytes of disk, and {folder} has {free} free")
    for member in members:
        name = member.name.removeprefix(f"{receipt.run}/")
        entry = waiting.pop(name, None)
        if entry is None or not CONTENTS.fullmatch(name) or not member.isreg():
            raise ValueError(f"{name!r} is not listed in {NAME}, or twice in it")
        if member.size != entry.num_bytes:
            raise ValueError(f"{name} has {member.size} bytes instead of {entry.num_bytes}")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            shutil.copyfileobj(_content(archive, member), file, _BLOCK_BYTES)
        if describe_file(folder, name) != entry:
            raise ValueError(f"{name} is not what was packed, by its digest")
    if waiting:
        raise ValueError(f"{min(waiting)} is missing")
    return receipt


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BufferedIOBase:
    content = archive.extractfile(member)
    assert isinstance(content, io.BufferedIOBase)
    return content


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
