"""Hosts that compare themselves with a controller before a run, in one process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.launch.checks import check_setup
from slipstream.client.launch.scene import LEARNER, SERVER, Part, Scene
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.setup import describe_setup
from slipstream.v1 import status_pb2_grpc
from support.fakes.setup_answers import SetupAnswers
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import make_model_folder
from support.rigs.loopbacks import own_loopback
from support.rigs.waiting import LIMIT_S

ADDRESS = f"{own_loopback()}:7070"


def config_of(folder: Path, **changes: object) -> Config:
    tables: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "controller": {"address": ADDRESS},
        "learner": {"world_size": 2, "ranks_per_node": 1},
        "checkpoint": {"every_steps": 0},
    }
    for name, values in changes.items():
        tables.setdefault(name, {}).update(values)
    return small_config(**tables)


@contextlib.asynccontextmanager
async def answering(config: Config) -> AsyncIterator[None]:
    credentials = Credentials.load(config.security)
    server = create_server(credentials)
    answers = SetupAnswers(describe_setup(config, run_id="run-0", mark="none"))
    status_pb2_grpc.add_StatusServiceServicer_to_server(answers, server)
    bind(server, config.controller.address, credentials)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def compare(config: Config, parts: frozenset[Part]) -> str | None:
    return await check_setup(Scene(config, parts, connect_timeout_s=LIMIT_S))


@pytest.mark.parametrize("parts", [SERVER, LEARNER], ids=str)
async def test_servers_need_less_alike_than_ranks(
    parts: frozenset[Part], tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    other = config_of(tmp_path, learner={"grad_clip": 0.5})
    async with answering(config):
        if parts == SERVER:
            assert str(await compare(other, parts)).startswith(
                f"{ADDRESS} answers: same versions"
            )
        else:
            message = r"^learner\.grad_clip is 0\.5 here and 1\.0 at the controller"
            with pytest.raises(ConfigError, match=message):
                await compare(other, parts)


async def test_a_server_with_another_chat_template_is_refused(tmp_path: Path) -> None:
    hosts = [make_model_folder(tmp_path / name) for name in ("first", "second")]
    config, other = (config_of(tmp_path, model={"path": str(host)}) for host in hosts)
    async with answering(config):
        assert str(await compare(other, SERVER)).startswith(
            f"{ADDRESS} answers: same versions"
        )
        (hosts[1] / "chat_template.jinja").write_text("{{ messages }}")
        with pytest.raises(
            ConfigError, match="is not the controller's model: .* chat template"
        ):
            await compare(other, SERVER)


@pytest.mark.parametrize("parts", [SERVER, LEARNER], ids=str)
async def test_a_host_with_other_weights_of_equal_size_is_refused(
    parts: frozenset[Part], tmp_path: Path
) -> None:
    hosts = [make_model_folder(tmp_path / name) for name in ("first", "second")]
    config, other = (config_of(tmp_path, model={"path": str(host)}) for host in hosts)
    weights = hosts[1] / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    async with answering(config):
        with pytest.raises(
            ConfigError, match="is not the controller's model: .* or weights differ"
        ):
            await compare(other, parts)


@pytest.mark.parametrize(
    ("setting", "algorithm"),
    [
        ("reference.path", {"kl": {"coefficient": 0.1}}),
        ("critic.path", {"advantage": "gae"}),
        ("checkpoint.load", {}),
    ],
)
async def test_ranks_with_other_weights_of_another_model_are_refused(
    setting: str, algorithm: dict[str, object], tmp_path: Path
) -> None:
    hosts = [make_model_folder(tmp_path / name) for name in ("first", "second")]
    section, name = setting.split(".")
    more = {"critic": {"learning_rate": 1e-4}, "checkpoint": {"every_steps": 0}}.get(
        section, {}
    )
    config, other = (
        config_of(tmp_path, algorithm=algorithm, **{section: {name: str(host), **more}})
        for host in hosts
    )
    async with answering(config):
        assert str(await compare(other, LEARNER)).startswith(
            f"{ADDRESS} answers: same versions"
        )
        weights = hosts[1] / "model.safetensors"
        weights.write_bytes(bytes(weights.stat().st_size))
        with pytest.raises(
            ConfigError, match=f"{setting} is a folder of weights .* here and"
        ):
            await compare(other, LEARNER)
        assert str(await compare(other, SERVER)).startswith(
            f"{ADDRESS} answers: same versions"
        )


async def test_a_rollout_server_that_comes_first_waits_for_the_controller(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    came = asyncio.Event()

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        came.set()

    async with asyncio.timeout(LIMIT_S):
        async with await asyncio.start_server(hang_up, *ADDRESS.split(":")):
            waiting = asyncio.create_task(compare(config, SERVER))
            await came.wait()
        async with answering(config):
            message = await waiting
    assert str(message).startswith(f"{ADDRESS} answers: same versions")
