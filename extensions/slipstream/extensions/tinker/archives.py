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
from slipstream.extensions.tinker.operations import Refused
from slipstream.extensions.tinker.store import OperationStore
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
    told: Body


class Archives:
    """Answers what is asked about training runs, checkpoints and their files."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = OperationStore(config.run_dir / "operations")
        self._checkpoints = config.run_dir / CHECKPOINTS
        self._exports: dict[int, asyncio.Task[int]] = {}
        # The folders whose files are served, by the secret part of their address.
        self._folders: dict[str, Path] = {}

    async def answer(self, path: str, query: Mapping[str, str], address: str) -> Body | None:
        """Returns the answer, or None if there is nothing at `path`; `address` is the server's.

        Raises Refused if a checkpoint cannot be exported, or while it is.
        """
        runs, checkpoints = await asyncio.to_thread(self._read)
        match path.split("/", 2):
            case ["weights_info"] if one := checkpoints.get(query["tinker_path"]):
                return {key: runs[one.run][key] for key in ("base_model", "is_lora", "lora_rank")}
            case ["training_runs"]:
                return _page("training_runs", [*runs.values()], query)
            case ["checkpoints"]:
                return _page("checkpoints", [one.told for one in checkpoints.values()], query)
            case ["training_runs", name]:
                return runs.get(name)
            case ["training_runs", name, "checkpoints"] if name in runs:
                return {"checkpoints": [c.told for c in checkpoints.values() if c.run == name]}
            case ["training_runs", name, rest]:
                saved, _, asked = rest.removeprefix("checkpoints/").rpartition("/")
                one = checkpoints.get(f"tinker://{name}/{saved}")
                if one and one.step and asked == "external_weights_urls":
                    return await self._addresses(one, address)
        return None

    def file(self, path: str) -> Path | None:
        """Returns the file of an address that `answer` has told, or None if there is none."""
        match path.split("/", 2):
            case ["files", secret, name] if folder := self._folders.get(secret):
                found = (folder / name).resolve()
                return found if found.is_file() and found.is_relative_to(folder) else None
        return None

    def _read(self) -> tuple[dict[str, Body], dict[str, _Checkpoint]]:
        """Returns training runs by their models' ids, and checkpoints by path, the newest last."""
        steps, lora = complete_steps(self._checkpoints), self._config.lora
        runs: dict[str, Body] = {}
        checkpoints: dict[str, _Checkpoint] = {}
        # By stream: its adapter, and the name of its newest publish.
        adapters: dict[str, str] = {}
        served: dict[str, str] = {}
        for _, operation, result, ended_s in self._store.read(only_ended=True):
            stream, name = operation.stream, result.name
            if result.error or operation.HasField("finish"):
                continue
            new = {
                "training_run_id": stream,
                "base_model": str(self._config.model.path),
                "model_owner": self._config.run.name,
                "is_lora": bool(lora.rank),
                "lora_rank": lora.rank or None,
                "user_metadata": {},
                "last_checkpoint": None,
                "last_sampler_checkpoint": None,
            }
            run = runs.setdefault(stream, new)
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
            adapter, until_s = adapters.get(stream, ""), operation.kept.until_unix_s
            is_there = result.step in steps or operation.HasField("publish")
            if kind == "external_weights":
                # Exported files outlive the checkpoint.
                is_there |= self._exported(result.step, adapter).exists()
            if operation.kept.is_deleted or is_there:
                checkpoints.pop(name, None)
            if is_there and not operation.kept.is_deleted:
                told = {
                    "checkpoint_id": checkpoint_id,
                    "checkpoint_type": _KINDS[kind],
                    "time": _time(ended_s),
                    "tinker_path": name,
                    "expires_at": _time(until_s) if until_s else None,
                }
                checkpoints[name] = _Checkpoint(stream, result.step, adapter, told)
        for one in checkpoints.values():
            if key := _NEWEST.get(one.told["checkpoint_type"]):
                runs[one.run][key] = one.told
        return runs, checkpoints

    def _exported(self, step: int, adapter: str) -> Path:
        whole = self._checkpoints / f"hf-{step:06d}"
        has_adapters = bool(self._config.lora.rank)
        return whole.with_name(f"{whole.name}-adapters") / adapter if has_adapters else whole

    async def _addresses(self, one: _Checkpoint, address: str) -> Body:
        """Returns the address of each file of a version: a Hugging Face folder, or PEFT's."""
        step, folder = one.step, self._exported(one.step, one.adapter)
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
                    # Its failure is told once; whoever asks again lets it be tried again.
                    self._exports.pop(step, None)
            if not folder.exists():
                raise Refused(f"version {step} has no rank of a client for adapter {one.adapter}")
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
