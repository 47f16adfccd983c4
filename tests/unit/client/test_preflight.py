"""Checks before anything starts."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
import tomli_w
from slipstream.client import preflight
from slipstream.client.launcher import run_learner
from slipstream.client.preflight import (
    check_environments,
    check_port,
    check_run_folder,
    free_port,
    make_run_folder,
)
from slipstream.client.session import write_config
from slipstream.learner.controller.records.journal import Journal
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import Config, EnvironmentSection
from small_configs import config_of


def test_a_free_port_is_none_that_the_kernel_gives_to_others() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for _ in range(20):
        port = free_port("127.0.0.1")
        assert port < int(first)
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port("127.0.0.1")
    monkeypatch.setattr(preflight, "UNASSIGNED_PORTS", range(taken, taken + 1))
    monkeypatch.setattr(preflight, "FREE_PORT_ATTEMPTS", 1)
    with (
        socket.create_server(("127.0.0.1", taken)),
        pytest.raises(ConfigError, match=r"no free port on 127\.0\.0\.1"),
    ):
        free_port("127.0.0.1")


def test_the_controller_has_a_port_that_others_can_know() -> None:
    with pytest.raises(
        ConfigError, match=r"must name a port that others can know, got 127\.0\.0\.1:0"
    ):
        check_port("127.0.0.1:0")


@pytest.mark.parametrize(("node_rank", "is_refused"), [(0, True), (1, False)])
async def test_only_the_controllers_node_needs_the_password_of_the_queue(
    node_rank: int, is_refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2})
    )
    table = {
        "run": {"name": "test", "steps": 10, "dir": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "environments": [{"name": "echo", "reference": "slipstream.client.builtin.echo:Echo"}],
        "algorithm": {"group_size": 4, "groups_per_step": 8, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 64},
        "learner": {"world_size": 2, "ranks_per_node": 1, "master": "127.0.0.1:29500"},
        "queue": {
            "kind": "redis",
            "redis_url": "redis://user@127.0.0.1:1",
            "redis_password_file": str(tmp_path / "missing"),
        },
    }
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(table))
    run = run_learner(path, [], node_rank=node_rank, master=None, dry_run=True)
    if is_refused:
        with pytest.raises(ConfigError, match="queue.redis_password_file"):
            await run
    else:
        assert await run == 0
        assert "# 2 ranks" in capsys.readouterr().out


SPY = """
import os
from slipstream.client.builtin.echo import Echo

class Spy(Echo):
    def __init__(self):
        super().__init__()
        seen = sorted(set(os.environ) - {"PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV"})
        raise ValueError(f"it sees {' '.join(seen)}.")
"""


async def test_an_environment_sees_no_secrets_when_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    spy = EnvironmentSection(name="spy", reference="spy:Spy")
    config = config_of(tmp_path).model_copy(update={"environments": (spy,)})
    with pytest.raises(ConfigError) as caught:
        await check_environments(config, tmp_path / "logs" / "preflight.log")
    # Python sets the last one itself.
    seen = str(caught.value).partition("it sees ")[2].partition(".")[0].split()
    assert set(seen) <= {"LC_CTYPE"}, caught.value


def test_the_folder_of_a_run_is_for_its_owner_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path / "runs")
    make_run_folder(config)
    assert config.run_dir.stat().st_mode & 0o777 == 0o700
    config.run_dir.chmod(0o750)
    make_run_folder(config)
    assert config.run_dir.stat().st_mode & 0o777 == 0o750


HANGING = """
import ctypes, os, subprocess, sys
from slipstream.client.builtin.echo import Echo

class Leaving(Echo):
    '''Leaves a process behind that keeps its stderr open.'''
    def reset(self, task):
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("helper", "w").write(str(helper.pid))
        return super().reset(task)

class Frozen(Echo):
    '''Holds the interpreter, so that no thread of its own can say so.'''
    def reset(self, task):
        ctypes.PyDLL(None).pause()
"""


def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Config:
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.chdir(tmp_path)
    section = EnvironmentSection(name="e", reference=f"hanging:{name}", timeout_s=20.0)
    return config_of(tmp_path).model_copy(update={"environments": (section,)})


async def test_a_check_does_not_wait_for_what_an_environment_leaves_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hanging(tmp_path, monkeypatch, "Leaving")
    async with asyncio.timeout(60):
        await check_environments(config, tmp_path / "logs" / "preflight.log")
    helper = int((tmp_path / "helper").read_text())
    async with asyncio.timeout(10):
        # Its parent is gone; whoever adopts it has to notice.
        while Path(f"/proc/{helper}/status").exists() and " Z " not in (
            Path(f"/proc/{helper}/stat").read_text()
        ):
            await asyncio.sleep(0.01)


async def test_an_environment_that_holds_its_process_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "WORKER_GRACE_S", -15.0)
    config = hanging(tmp_path, monkeypatch, "Frozen")
    with pytest.raises(ConfigError, match="environment e: no answer within 20 s"):
        async with asyncio.timeout(60):
            await check_environments(config, tmp_path / "logs" / "preflight.log")


def test_a_folder_that_another_command_writes_is_refused_until_that_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with Journal(config.run_dir / "journal"):
        write_config(config, config.run_dir)
        with pytest.raises(ConfigError, match="is written by a run that goes on"):
            check_run_folder(config)
    assert check_run_folder(config)
