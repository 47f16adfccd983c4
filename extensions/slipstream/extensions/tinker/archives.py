"""The REST calls of the Tinker API: training runs, their checkpoints, and files of these.

Consumes: the run's folder, in which only an export writes. Produces: answers, exported folders.
Waits for: an export, at most `HOLD_S`. Unblocked by: its end; the SDK then asks again.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from slipstream.client.launch.launcher import run_export
from slipstream.core.errors import SlipstreamError
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker.operation_store import StoredOperations
from slipstream.extensions.tinker.owners import is_of
from slipstream.extensions.tinker.request_fields import Refused
from slipstream.protocol.checkpoints import complete_steps

# Seconds for which an answer is held back until files are exported.
HOLD_S = 20.0
# How long the addresses of files are said to hold; then the SDK asks for others.
ADDRESS_LIFE = timedelta(hours=1)
FILES = "files"
_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
# The key of a training run for its newest checkpoint of a type.
_NEWEST = {"training": "last_checkpoint", "sampler": "last_sampler_checkpoint"}

Body: TypeAlias = dict[str, Any]


class _Checkpoint(NamedTuple):
    """What can be loaded, sampled or downloaded by its path."""

    run: str
    step: int
    adapter: str
    record: Body


class Archives:
    """Answers what is asked about training runs, checkpoints and their files."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = StoredOperations(config.run_dir / "operations")
        self._checkpoints = config.run_dir / CHECKPOINTS
        self._exports: dict[int, asyncio.Task[int]] = {}
        # The folders whose files are served, by the secret part of their address.
        self._folders: dict[str, Path] = {}

    async def answer(
        self,
        path: str,
        query: Mapping[str, str],
        address: str,
        owner: str,
    ) -> Body | None:
        """Returns the answer, or None if `owner` has nothing at `path`; `address` is the server's.

        Raises Refused if a checkpoint cannot be exported, or while it is.
        """
        runs, checkpoints = await asyncio.to_thread(self._read, owner)
        match path.split("/", 2):
            case ["weights_info"] if checkpoint := checkpoints.get(query["tinker_path"]):
                run = runs[checkpoint.run]
                return {key: run[key] for key in ("base_model", "is_lora", "lora_rank")}
            case ["training_runs"]:
                return _page("training_runs", list(runs.values()), query)
            case ["checkpoints"]:
                records = [checkpoint.record for checkpoint in checkpoints.values()]
                return _page("checkpoints", records, query)
            case ["training_runs", name]:
                return runs.get(name)
            case ["training_runs", name, "checkpoints"] if name in runs:
                of_run = [entry.record for entry in checkpoints.values() if entry.run == name]
                return {"checkpoints": of_run}
            case ["training_runs", name, rest]:
                saved, _, part = rest.removeprefix("checkpoints/").rpartition("/")
                checkpoint = checkpoints.get(f"tinker://{name}/{saved}")
                if checkpoint and checkpoint.step and part == "external_weights_urls":
                    return await self._addresses(checkpoint, address)
        return None

    def file(self, address: str) -> Path | None:
        """Returns the file of an address that `answer` has told, or None if there is none."""
        match address.split("/", 2):
            case ["files", secret, name] if folder := self._folders.get(secret):
                path = (folder / name).resolve()
                return path if path.is_file() and path.is_relative_to(folder) else None
        return None

    def _new_run(self, stream: str) -> Body:
        """Returns a training run before its first operation."""
        lora = self._config.lora
        return {
            "training_run_id": stream,
            "base_model": str(self._config.model.path),
            "model_owner": self._config.run.name,
            "is_lora": bool(lora.rank),
            "lora_rank": lora.rank or None,
            "user_metadata": {},
            "last_checkpoint": None,
            "last_sampler_checkpoint": None,
        }

    def _read(self, owner: str) -> tuple[dict[str, Body], dict[str, _Checkpoint]]:
        """Returns training runs of `owner` by their models' ids, and checkpoints by path.

        The newest come last.
        """
        steps = complete_steps(self._checkpoints)
        runs: dict[str, Body] = {}
        checkpoints: dict[str, _Checkpoint] = {}
        # By stream: its adapter, and the name of its newest publish.
        adapters: dict[str, str] = {}
        served: dict[str, str] = {}
        for _, operation, result, ended_s in self._store.read(only_ended=True):
            stream = operation.stream
            name = result.name
            if result.error or operation.HasField("finish") or not is_of(stream, owner):
                continue
            run = runs.setdefault(stream, self._new_run(stream))
            run["last_request_time"] = _time(ended_s)
            if result.HasField("adapter"):
                adapters[stream] = result.adapter.name
                run["lora_rank"] = result.adapter.rank or run["lora_rank"]
            if not operation.number:
                run["user_metadata"] = dict(operation.user_metadata)
            if operation.HasField("publish"):
                # Engines hold the newest one.
                checkpoints.pop(served.get(stream, ""), None)
                served[stream] = name
            checkpoint_id = name.removeprefix(f"tinker://{stream}/")
            kind, _, _ = checkpoint_id.partition("/")
            # A load has the name of what another model may have saved.
            if kind not in _KINDS or operation.HasField("load"):
                continue
            adapter = adapters.get(stream, "")
            until_s = operation.kept.until_unix_s
            is_there = result.step in steps or operation.HasField("publish")
            if kind == "external_weights":
                # Exported files outlive the checkpoint.
                is_there |= self._exported(result.step, adapter).exists()
            if operation.kept.is_deleted or is_there:
                checkpoints.pop(name, None)
            if is_there and not operation.kept.is_deleted:
                record = {
                    "checkpoint_id": checkpoint_id,
                    "checkpoint_type": _KINDS[kind],
                    "time": _time(ended_s),
                    "tinker_path": name,
                    "expires_at": _time(until_s) if until_s else None,
                    "user_metadata": dict(operation.user_metadata) or None,
                }
                checkpoints[name] = _Checkpoint(stream, result.step, adapter, record)
        for checkpoint in checkpoints.values():
            if key := _NEWEST.get(checkpoint.record["checkpoint_type"]):
                runs[checkpoint.run][key] = checkpoint.record
        return runs, checkpoints

    def _exported(self, step: int, adapter: str) -> Path:
        folder = self._checkpoints / f"hf-{step:06d}"
        has_adapters = bool(self._config.lora.rank)
        return folder.with_name(f"{folder.name}-adapters") / adapter if has_adapters else folder

    async def _addresses(self, checkpoint: _Checkpoint, address: str) -> Body:
        """Returns the address of each file of a version: a Hugging Face folder, or PEFT's."""
        step = checkpoint.step
        folder = self._exported(step, checkpoint.adapter)
        if not folder.exists():
            if step not in self._exports:
                export = run_export(self._config.run_dir, step, None)
                self._exports[step] = asyncio.ensure_future(export)
            task = self._exports[step]
            try:
                await asyncio.wait_for(asyncio.shield(task), HOLD_S)
            except TimeoutError as error:
                raise Refused(f"version {step} is exported", 503) from error
            except SlipstreamError as error:
                raise Refused(str(error)) from error
            finally:
                if task.done():
                    # A failure is told once; whoever asks again lets the export be tried again.
                    self._exports.pop(step, None)
            if not folder.exists():
                raise Refused(
                    f"version {step} has no rank of a client for adapter {checkpoint.adapter}"
                )
        folder = folder.resolve()
        secrets_of = {path: secret for secret, path in self._folders.items()}
        secret = secrets_of.get(folder) or secrets.token_urlsafe(24)
        self._folders[secret] = folder
        files = [path for path in folder.rglob("*") if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        urls = {name: f"{address}/{FILES}/{secret}/{name}" for name in sorted(names)}
        return {"urls": urls, "expires": (datetime.now(UTC) + ADDRESS_LIFE).isoformat()}


def _page(name: str, records: list[Body], query: Mapping[str, str]) -> Body:
    cursor = {"total_count": len(records)}
    for key, default in (("offset", "0"), ("limit", "100")):
        text = query.get(key, default)
        if not re.fullmatch("[0-9]{1,18}", text):
            raise Refused(f"{key} is a whole number from 0, got {text[:40]}")
        cursor[key] = int(text)
    begin = cursor["offset"]
    return {name: records[begin : begin + cursor["limit"]], "cursor": cursor}


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
