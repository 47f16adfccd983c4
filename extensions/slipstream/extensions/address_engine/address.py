"""What a vLLM server at an address must be, asked before anything is sent to it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.machine.files import read_regular
from slipstream.core.settings.config import Config

# Beginning of the versions with which the option was tried. Others may name requests otherwise.
TRIED = "0.32."
_LIMIT_S = 30.0
_MOST_BYTES = 16 << 20
GENERATE = "/inference/v1/generate"


@dataclass(frozen=True)
class Served:
    """What the server at an address says of itself."""

    url: str
    version: str
    max_model_len: int


def token_headers(path: Path | None) -> dict[str, str]:
    """Returns the header with the key in the file `path`; raises ConfigError without a key."""
    if path is None:
        return {}
    name = f"rollout_server.engine_token_file {path}"
    try:
        key = read_regular(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{name} must hold the server's key, in printable ASCII")
    return {"Authorization": f"Bearer {key}"}


def check_server(config: Config) -> Served:
    """Asks the server at `rollout_server.engine_url` for its settings; blocks for seconds.

    Raises ConfigError with all that it lacks, each with the flag that gives it.
    """
    url = str(config.rollout_server.engine_url).rstrip("/")
    asking = _Asking(url, token_headers(config.rollout_server.engine_token_file))
    status, answer = asking.ask("/server_info?config_format=json")
    start = f"the server at rollout_server.engine_url = {url}"
    if status != 200:
        raise ConfigError(
            f"{start} answers {status} to /server_info: start it with the environment variable "
            "VLLM_SERVER_DEV_MODE=1, or correct the address"
        )
    settings = answer.get("vllm_config")
    if not isinstance(settings, dict):
        raise ConfigError(f"{start} gives no vllm_config at /server_info: is it vLLM's?")
    lacks = list(_wrong_settings(settings, config))
    version = str(asking.ask("/version")[1].get("version", "unknown"))
    if not version.startswith(TRIED):
        lacks.append(f"vLLM {TRIED}x, got {version}")
    # A request without tokens is refused by whatever would sample.
    status, _ = asking.ask(GENERATE, body={})
    if status == 401:
        lacks.append("the key of its --api-key, in rollout_server.engine_token_file")
    elif status in (403, 404):
        lacks.append(f"--enable-scale-out, {GENERATE} answers {status}")
    elif status not in (400, 422):
        lacks.append(f"{GENERATE} to refuse a request without tokens, it answers {status}")
    if lacks:
        raise ConfigError(f"{start} needs {'; '.join(lacks)}")
    room = _setting(settings, "model_config.max_model_len")
    assert isinstance(room, int), "it was compared above"
    return Served(url, version, room)


def _wrong_settings(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yields a phrase for each setting of the server that must be another."""
    dtype = _setting(settings, "model_config.dtype")
    rows: tuple[tuple[str, object, str], ...] = (
        (
            "model_config.logprobs_mode",
            "processed_logprobs",
            "--logprobs-mode processed_logprobs",
        ),
        ("model_config.generation_config", "vllm", "--generation-config vllm"),
        ("model_config.quantization", None, "no --quantization"),
        ("parallel_config.data_parallel_size", 1, "--data-parallel-size 1"),
        ("speculative_config", None, "no --speculative-config"),
        ("lora_config", None, "no --enable-lora"),
        ("kv_transfer_config", None, "no --kv-transfer-config"),
    )
    for name, value, flag in rows:
        actual = _setting(settings, name)
        if actual != value:
            yield f"{flag}, {name} is {actual!r}"
    if str(dtype).removeprefix("torch.") != config.model.dtype:
        yield f"--dtype {config.model.dtype} (model.dtype), got {dtype}"
    room = _setting(settings, "model_config.max_model_len")
    most = config.sampling.max_episode_tokens
    if not isinstance(room, int) or room < most:
        yield f"--max-model-len {most} (sampling.max_episode_tokens) or more, got {room}"


def _setting(settings: Mapping[str, Any], name: str) -> object:
    value: Any = settings
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


class _Asking:
    """Questions to one server, none of which goes through a proxy."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = headers
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Returns the status and the object that came, {} if none came.

        Raises ConfigError if nothing answers.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        try:
            try:
                with self._opener.open(request, timeout=_LIMIT_S) as reply:
                    status = int(reply.status)
                    content = reply.read(_MOST_BYTES)
            except urllib.error.HTTPError as error:
                status = error.code
                content = error.read(_MOST_BYTES)
        except OSError as error:
            cause = getattr(error, "reason", error)
            raise ConfigError(
                f"no server answers at rollout_server.engine_url = {self._url}: {cause}"
            ) from error
        try:
            answer = json.loads(content)
        except ValueError:
            answer = {}
        return status, answer if isinstance(answer, dict) else {}
