"""The REST calls of the Tinker API: training runs, their checkpoints, and files of these.

Consumes: the run's folder, in which only an export writes. Produces: answers, exported folders.
Waits for: an export, at most `HOLD_S`. Unblocked by: its end; the SDK then asks again.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client.launch.launcher import run_export
from slipstream.core.errors import SlipstreamError
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker.operations import NotReady, Refused
from slipstream.extensions.tinker.store import Ended, OperationStore
from slipstream.protocol.checkpoints import complete_steps

# Seconds for which an answer is held back until files are exported.
HOLD_S = 20.0
# How long the addresses of files are said to hold; then the SDK asks for others.
ADDRESS_LIFE = timedelta(hours=1)
FILES = "files"
_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

Body: TypeAlias = dict[str, Any]


@dataclass
class _Run:
    """The model of a client, with what can be loaded or sampled of it by its path."""

    stream: str
    adapter: str = ""
    rank: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    ended_s: float = 0.0
    # Version and JSON by path; of publishes the newest alone, since engines hold one.
    checkpoints: dict[str, tuple[int, Body]] = field(default_factory=dict)


class Archives:
    """Answers what is asked about training runs, checkpoints and their files."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._operations = config.run_dir / "operations"
        self._checkpoints = config.run_dir / CHECKPOINTS
        # The operations that have ended, which one request at a time brings up to date.
        self._ended: dict[str, Ended] = {}
        self._reading = asyncio.Lock()
        self._exports: dict[int, asyncio.Task[int]] = {}
        # The folders whose files are served, by the secret part of their address.
        self._folders: dict[str, Path] = {}

    async def answer(self, path: str, query: Mapping[str, str], address: str) -> Body | None:
        """Returns the answer, or None if there is nothing at `path`; `address` is the server's.

        Raises Refused if a checkpoint cannot be exported, NotReady while it is.
        """
        async with self._reading:
            runs = await asyncio.to_thread(self._runs)
        match path.split("/", 2):
            case ["weights_info"]:
                run = runs.get(query["tinker_path"].removeprefix("tinker://").partition("/")[0])
                if run is not None and query["tinker_path"] in run.checkpoints:
                    told = self._told(run)
                    return {key: told[key] for key in ("base_model", "is_lora", "lora_rank")}
            case ["training_runs"]:
                return _page("training_runs", [self._told(run) for run in runs.values()], query)
            case ["checkpoints"]:
                found = [one for run in runs.values() for _, one in run.checkpoints.values()]
                return _page("checkpoints", found, query)
            case ["training_runs", name, *rest] if run := runs.get(name):
                if not rest:
                    return self._told(run)
                if rest == ["checkpoints"]:
                    return {"checkpoints": [one for _, one in run.checkpoints.values()]}
                saved, _, asked = rest[0].removeprefix("checkpoints/").rpartition("/")
                step, _ = run.checkpoints.get(f"tinker://{name}/{saved}", (0, None))
                if step and asked == "external_weights_urls":
                    return await self._addresses(step, run.adapter, address)
        return None

    def forget(self, name: str) -> None:
        """Reads again what gave a checkpoint its name: it holds for another time, or is deleted."""
        for number, (_, _, result) in list(self._ended.items()):
            if result.name == name:
                del self._ended[number]

    def file(self, path: str) -> Path | None:
        """Returns the file of an address that `answer` has told, or None if there is none."""
        match path.split("/", 2):
            case ["files", secret, name] if folder := self._folders.get(secret):
                found = (folder / name).resolve()
                return found if found.is_file() and found.is_relative_to(folder) else None
        return None

    def _runs(self) -> dict[str, _Run]:
        steps = complete_steps(self._checkpoints)
        runs: dict[str, _Run] = {}
        OperationStore.read_ended(self._operations, self._ended)
        for _, (ended_s, operation, result) in sorted(self._ended.items()):
            if result.error or not operation.number and operation.HasField("finish"):
                continue
            stream = operation.stream
            run = runs.setdefault(stream, _Run(stream))
            run.ended_s = ended_s
            if result.HasField("adapter"):
                run.adapter, run.rank = result.adapter.name, result.adapter.rank or None
            if not operation.number:
                run.user_metadata = dict(operation.user_metadata)
            is_there = result.step in steps
            if operation.HasField("publish"):
                is_there = True
                for name, (_, one) in list(run.checkpoints.items()):
                    if one["checkpoint_type"] == "sampler":
                        del run.checkpoints[name]
            kind, _, _ = result.name.removeprefix(f"tinker://{stream}/").partition("/")
            if kind == "external_weights":
                # Exported files outlive the checkpoint.
                is_there |= self._exported(result.step, run.adapter).exists()
            # A load has the name of what another model may have saved.
            is_there &= not operation.HasField("load")
            if operation.kept.is_deleted:
                run.checkpoints.pop(result.name, None)
            elif kind in _KINDS and is_there:
                until_s = operation.kept.until_unix_s
                told = {
                    "checkpoint_id": result.name.removeprefix(f"tinker://{stream}/"),
                    "checkpoint_type": _KINDS[kind],
                    "time": _time(ended_s),
                    "tinker_path": result.name,
                    "expires_at": _time(until_s) if until_s else None,
                }
                # The newest is the last.
                run.checkpoints.pop(result.name, None)
                run.checkpoints[result.name] = result.step, told
        return runs

    def _told(self, run: _Run) -> Body:
        lora = self._config.lora
        newest = {one["checkpoint_type"]: one for _, one in run.checkpoints.values()}
        return {
            "training_run_id": run.stream,
            "base_model": str(self._config.model.path),
            "model_owner": self._config.run.name,
            "is_lora": bool(lora.rank),
            "lora_rank": run.rank or lora.rank or None,
            "user_metadata": run.user_metadata,
            "last_request_time": _time(run.ended_s),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
        }

    def _exported(self, step: int, adapter: str) -> Path:
        whole = self._checkpoints / f"hf-{step:06d}"
        has_adapters = bool(self._config.lora.rank)
        return whole.with_name(f"{whole.name}-adapters") / adapter if has_adapters else whole

    async def _addresses(self, step: int, adapter: str, address: str) -> Body:
        """Returns the address of each file of a version: a Hugging Face folder, or PEFT's."""
        folder = self._exported(step, adapter)
        if not folder.exists():
            if step not in self._exports:
                export = run_export(self._config.run_dir, step, None)
                self._exports[step] = asyncio.ensure_future(export)
            task = self._exports[step]
            try:
                await asyncio.wait_for(asyncio.shield(task), HOLD_S)
            except TimeoutError as error:
                raise NotReady(f"version {step} is exported") from error
            except SlipstreamError as error:
                raise Refused(str(error)) from error
            finally:
                if task.done():
                    # Its failure is told once; whoever asks again lets it be tried again.
                    self._exports.pop(step, None)
            if not folder.exists():
                raise Refused(f"version {step} has no rank of a client for adapter {adapter}")
        folder = folder.resolve()
        known = {found: secret for secret, found in self._folders.items()}
        secret = known.get(folder) or secrets.token_urlsafe(24)
        self._folders[secret] = folder
        names = [one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()]
        urls = {name: f"{address}/{FILES}/{secret}/{name}" for name in sorted(names)}
        return {"urls": urls, "expires": (datetime.now(UTC) + ADDRESS_LIFE).isoformat()}


def _page(name: str, found: list[Body], query: Mapping[str, str]) -> Body:
    cursor = {"total_count": len(found)}
    for key, default in (("offset", "0"), ("limit", "100")):
        text = query.get(key, default)
        if not re.fullmatch("[0-9]{1,18}", text):
            raise Refused(f"{key} is a whole number from 0, got {text[:40]}")
        cursor[key] = int(text)
    begin = cursor["offset"]
    return {name: found[begin : begin + cursor["limit"]], "cursor": cursor}


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
