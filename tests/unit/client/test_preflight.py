"""Checks before anything starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import tomli_w
from slipstream.client import preflight
from slipstream.client.launcher import run_learner
from slipstream.client.preflight import free_port
from slipstream.protocol.errors import ConfigError


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
