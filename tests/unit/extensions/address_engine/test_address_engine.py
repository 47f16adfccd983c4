"""An engine at an address, against a scripted server: what it asks, reads and refuses."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from slipstream.core.configuration.config_file import ConfigError
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.extensions.address_engine.address import check_server
from slipstream.extensions.address_engine.server import connection as connections
from slipstream.extensions.address_engine.server.connection import Connection
from slipstream.extensions.address_engine.server.pauses import AddressPauses
from slipstream.extensions.address_engine.server.requests import AddressRequests
from slipstream.extensions.address_engine.server.stamps import Stamps
from slipstream.extensions.address_engine.settings import OF_ANY_ENGINE, problems
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    FinishReason,
    GenerationFailed,
    RequestRefused,
    Sampling,
)
from support.fakes.address_server import AddressServer, address_server
from support.fakes.small_configs import config_with, refusal_of

SAMPLING = Sampling(1.0, 1.0, 0, 8, max_turns=1, max_episode_tokens=64)
VERSION = PolicyVersion(1, 7)
ON = {
    "rollout_server.engine_url": "http://127.0.0.1:8000",
    "weights.transport": "gloo",
    "weights.verify_every": 1,
    "controller.turns": "off",
}
GENERATE = "/inference/v1/generate"


@pytest.fixture
def server() -> Iterator[AddressServer]:
    with address_server() as server:
        yield server


@dataclasses.dataclass
class Parts:
    pauses: AddressPauses
    requests: AddressRequests
    stamps: Stamps


@pytest_asyncio.fixture
async def parts(server: AddressServer) -> AsyncIterator[Parts]:
    connection = Connection(server.url, {})
    stamps = Stamps("run")
    pauses = AddressPauses(connection, stamps)
    requests = AddressRequests(connection, pauses, stamps, vocabulary=32)
    async with contextlib.aclosing(connection):
        await pauses.claim()
        yield Parts(pauses, requests, stamps)


async def test_a_claimed_server_is_paused_under_a_name_of_ours(server, parts) -> None:
    assert server.is_paused
    assert server.version == parts.stamps.unserved
    await parts.pauses.look()


async def test_tokens_carry_the_version_of_the_last_resume(server, parts) -> None:
    await parts.pauses.resume(VERSION)
    reply = await parts.requests.generate("r", [1, 2], SAMPLING, 3)
    assert reply.token_ids.tolist() == [5, 6, 7]
    assert reply.logprobs.tolist() == [-0.5] * 3
    assert reply.version_spans == (VersionSpan(3, VERSION),)
    assert reply.finish_reason is FinishReason.LENGTH
    use = parts.requests.use()
    assert (use.generated_tokens, use.returned_tokens, use.open_requests) == (3, 3, 0)


async def test_a_probe_is_read_and_counts_no_token(server, parts) -> None:
    await parts.pauses.resume(VERSION)
    scoring = dataclasses.replace(SAMPLING, prompt_logprobs=True)
    reply = await parts.requests.generate("probe/0", [1, 2, 3], scoring, 1)
    assert reply.prompt_logprobs is not None
    assert np.array_equal(reply.prompt_logprobs, [-1.0, -2.0])
    assert parts.requests.use().generated_tokens == 0


@pytest.mark.parametrize("version", ["default", "other-0011:0:7", "0:7", "", "run:x:y"])
async def test_a_reply_of_foreign_weights_ends_the_engine(
    server, parts, version
) -> None:
    await parts.pauses.resume(VERSION)
    server.version = version
    with pytest.raises(EngineDied, match="started again, or another program"):
        await parts.requests.generate("r", [1], SAMPLING, 3)
    assert parts.requests.use().generated_tokens == 0


async def test_a_restart_is_seen_without_a_reply(server, parts) -> None:
    await parts.pauses.resume(VERSION)
    await parts.pauses.look()
    server.version = "default"
    with pytest.raises(EngineDied, match="'default'"):
        await parts.pauses.look()


async def test_a_strangers_resume_is_seen(server, parts) -> None:
    server.is_paused = False
    with pytest.raises(EngineDied, match="another program has resumed"):
        await parts.pauses.look()


async def test_a_strangers_resume_between_load_and_label_is_refused(
    server, parts
) -> None:
    server.is_paused = False
    with pytest.raises(EngineDied, match="another program has resumed"):
        await parts.pauses.resume(VERSION)
    assert server.version == parts.stamps.unserved


async def test_a_strangers_pause_is_seen(server, parts) -> None:
    await parts.pauses.resume(VERSION)
    server.is_paused = True
    with pytest.raises(EngineDied, match="another program has paused"):
        await parts.pauses.look()


async def test_a_cancelled_request_ends_by_the_id_that_the_server_gave_it(
    server, parts
) -> None:
    await parts.pauses.resume(VERSION)
    server.waits_for_abort = True
    async with asyncio.timeout(30):
        reply = asyncio.create_task(parts.requests.generate("e/1", [1], SAMPLING, 3))
        while not server.aborted:
            await asyncio.sleep(0.01)
        await parts.requests.cancel("e/1")
        await parts.requests.cancel("unknown")
        generation = await reply
    assert generation.finish_reason is FinishReason.CANCELLED
    assert generation.token_ids.tolist() == [5, 6, 7]
    assert parts.requests.use().open_requests == 0


async def test_a_request_that_is_cancelled_before_it_arrives_is_aborted_again(
    server, parts
) -> None:
    await parts.pauses.resume(VERSION)
    server.waits_for_abort = True
    async with asyncio.timeout(30):
        reply = asyncio.create_task(parts.requests.generate("e/1", [1], SAMPLING, 3))
        await asyncio.sleep(0)
        await parts.requests.cancel("e/1")
        assert not server.aborted
        assert (await reply).finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_route_that_is_shut_ends_the_engine(server, parts, status) -> None:
    await parts.pauses.resume(VERSION)
    server.statuses[GENERATE] = status
    with pytest.raises(EngineDied, match=f"answered {status} to {GENERATE}"):
        await parts.requests.generate("r", [1], SAMPLING, 3)


@pytest.mark.parametrize(
    ("status", "error"), [(400, RequestRefused), (500, GenerationFailed)]
)
async def test_a_request_that_fails_fails_alone(server, parts, status, error) -> None:
    await parts.pauses.resume(VERSION)
    server.statuses[GENERATE] = status
    with pytest.raises(error) as caught:
        await parts.requests.generate("r", [1], SAMPLING, 3)
    assert type(caught.value) is error
    server.statuses.clear()
    await parts.requests.generate("r", [1], SAMPLING, 3)


@pytest.mark.parametrize(
    "reply",
    [
        {"token_ids": [5, 6]},
        {"logprobs": None},
        {"logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}] * 3}},
        {"logprobs": {"content": [{"token_id": 9, "logprob": -0.5}] * 3}},
        {"weight_versions": None},
        {"token_ids": "abc"},
    ],
)
async def test_a_reply_that_lacks_something_fails(server, parts, reply) -> None:
    await parts.pauses.resume(VERSION)
    server.reply = reply
    with pytest.raises(GenerationFailed):
        await parts.requests.generate("r", [1], SAMPLING, 3)
    assert parts.requests.use().generated_tokens == 0


async def test_what_an_address_cannot_do_is_refused_unsent(server, parts) -> None:
    await parts.pauses.resume(VERSION)
    num_calls = len(server.calls)
    for changes in ({"adapter": "a"}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        sampling = dataclasses.replace(SAMPLING, **changes)
        with pytest.raises(RequestRefused):
            await parts.requests.generate("r", [1], sampling, 3)
    with pytest.raises(RequestRefused, match="token 32"):
        await parts.requests.generate("r", [1, 32], SAMPLING, 3)
    assert len(server.calls) == num_calls


async def test_a_server_that_does_not_answer_is_dead(server, parts) -> None:
    server.silent.add("/weight_info")
    connection = Connection(server.url, {})
    async with contextlib.aclosing(connection):
        with pytest.raises(
            EngineDied, match=r"did not answer /weight_info within 0\.2"
        ):
            await connection.control("GET", "/weight_info", limit_s=0.2)


async def test_a_server_that_is_lost_is_dead() -> None:
    with address_server() as server:
        url = server.url
    connection = Connection(url, {})
    async with contextlib.aclosing(connection):
        with pytest.raises(EngineDied, match="was lost at /weight_info"):
            await connection.control("GET", "/weight_info", limit_s=5.0)


async def test_connections_end_before_vllm_closes_them() -> None:
    assert connections._KEEP_ALIVE_S < 5.0


def config_at(server: AddressServer, **changes: object):
    return config_with(
        {**ON, "model.dtype": "float32", "rollout_server.engine_url": server.url}
        | {name.replace("__", "."): value for name, value in changes.items()}
    )


def test_a_server_with_all_flags_is_accepted(server) -> None:
    served = check_server(config_at(server))
    assert (served.url, served.version, served.max_model_len) == (
        server.url,
        "0.32.0",
        4096,
    )


@pytest.mark.parametrize(
    ("section", "name", "value", "flag"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed"),
        ("model_config", "generation_config", "auto", "--generation-config vllm"),
        ("model_config", "quantization", "fp8", "no --quantization"),
        ("model_config", "dtype", "torch.bfloat16", "--dtype float32"),
        ("model_config", "max_model_len", 8, "--max-model-len"),
        ("parallel_config", "data_parallel_size", 2, "--data-parallel-size 1"),
    ],
)
def test_a_flag_that_is_missing_is_named(server, section, name, value, flag) -> None:
    server.settings[section][name] = value
    with pytest.raises(ConfigError, match=flag):
        check_server(config_at(server))


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("speculative_config", "no --speculative-config"),
        ("lora_config", "no --enable-lora"),
        ("kv_transfer_config", "no --kv-transfer-config"),
    ],
)
def test_a_feature_that_must_be_off_is_named(server, name, flag) -> None:
    server.settings[name] = {"a": 1}
    with pytest.raises(ConfigError, match=flag):
        check_server(config_at(server))


def test_shut_routes_and_other_versions_are_named(server) -> None:
    server.statuses[GENERATE] = 403
    server.release = "0.31.2"
    with pytest.raises(ConfigError, match="enable-scale-out") as caught:
        check_server(config_at(server))
    assert r"vLLM 0.32.x, got 0.31.2" in str(caught.value)
    server.statuses["/server_info"] = 404
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        check_server(config_at(server))


def test_the_key_is_sent_and_a_wrong_one_is_told(server, tmp_path: Path) -> None:
    server.key = "Bearer secret"
    with pytest.raises(ConfigError, match="engine_token_file"):
        check_server(config_at(server))
    file = tmp_path / "key"
    file.write_text("secret\n")
    path = str(file)
    check_server(config_at(server, rollout_server__engine_token_file=path))
    file.write_text("")
    with pytest.raises(ConfigError, match="must hold the server's key"):
        check_server(config_at(server, rollout_server__engine_token_file=path))


def test_no_server_at_the_address_is_told() -> None:
    with address_server() as server:
        config = config_at(server)
    with pytest.raises(ConfigError, match="no server answers"):
        check_server(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_server.count", 2),
        ("rollout_server.tensor_parallel_size", 2),
        ("rollout_server.pipeline_parallel_size", 2),
        ("rollout_server.gpu_memory_utilization", 0.5),
        ("rollout_server.threads", 2),
        ("rollout_server.enforce_eager", True),
        ("rollout_server.recompute_context", False),
        ("rollout_server.tool_parser", "hermes"),
        ("rollout_server.reasoning_parser", "qwen3"),
        ("rollout_server.engine", {"block_size": 16}),
        ("rollout_server.engine_url", "http://engine.example:8000"),
        ("weights.transport", "auto"),
        ("weights.verify_every", 10),
        ("controller.turns", "auto"),
        ("agents.listen", "127.0.0.1:9100"),
        ("lora.rank", 4),
        ("sampling.max_images", 1),
        ("sampling.top_p", 0.9),
        ("sampling.top_k", 4),
        ("sampling.min_p", 0.1),
        ("algorithm.router_replay", "policy"),
    ],
)
def test_settings_that_exclude_an_address_are_named(name, value) -> None:
    config_with(ON)
    with pytest.raises(ConfigError) as caught:
        config_with({**ON, name: value})
    assert name in str(caught.value)


def test_a_key_without_an_address_and_an_address_with_a_path_are_refused() -> None:
    assert "needs engine_url" in refusal_of({"rollout_server.engine_token_file": "k"})
    for url in ("127.0.0.1:8000", "http://u:p@h:1", "http://h:1/v1", "ftp://h:1"):
        assert "engine_url" in refusal_of({"rollout_server.engine_url": url})


def test_every_setting_of_a_server_is_of_any_engine_or_refused() -> None:
    fields = RolloutServerSection.model_fields
    assert fields.keys() > OF_ANY_ENGINE
    changed: dict[str, object] = {
        name: object() for name in fields.keys() - OF_ANY_ENGINE
    }
    changed["engine"] = {"max_num_seqs": 4}
    with address_server() as server:
        config = config_at(server)
    stated = config.rollout_server.model_copy(update=changed)
    lines = list(problems(config.model_copy(update={"rollout_server": stated})))
    assert len(lines) == len(changed)
    for name, line in zip(sorted(changed), sorted(lines), strict=True):
        assert line.startswith(f"rollout_server.{name} must be left out ")
