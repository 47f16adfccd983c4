"""Agents in a run with all parts: hosted, any program, served from here, and broken ones."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from slipstream.core.machine.address import free_port
from support.fakes import letter_agents
from support.rigs.run_processes import (
    LONG_RUN,
    checked,
    command,
    connection,
    trained_trajectories,
    until_step,
    write_config,
)
from support.rigs.smallest_run import SMALLEST

pytestmark = [*LONG_RUN, pytest.mark.timeout(700)]

RUN_LIMIT_S = 500.0
SIZES = {
    "evaluations": [],
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 6,
    "sampling__max_episode_tokens": 64,
    "rollout_server__max_episodes": 64,
}
# A program that calls the model once, and whose score another program gives.
PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]})
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body.encode(), key)) as answer:
    reply = json.load(answer)["choices"][0]["message"]["content"]
open("reply.txt", "w").write(reply)
"""
SCORE = "import sys; print(open('reply.txt').read().split()[:1] == [sys.argv[1]] and 1 or 0)"


def agents_folder(folder: Path) -> Path:
    shutil.copy(letter_agents.__file__, folder / "user_agents.py")
    return folder


async def test_agents_of_every_kind_train_the_model_with_every_default(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's shell does not set it; `make test` does.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    asks = [sys.executable, "-c", PROGRAM, "{letters}"]
    score = [sys.executable, "-c", SCORE, "{first}"]
    tasks = [{"letters": "b a c", "first": "a"}, {"letters": "d f e", "first": "d"}]
    entries = [
        {"name": "smallest", "reference": "user_agents:Smallest", "timeout_s": 60.0},
        {"name": "plainly", "reference": "user_agents:Plainly", "timeout_s": 60.0},
        {
            "name": "program",
            "reference": "slipstream.environments.command:Command",
            "args": {"command": asks, "tasks": tasks, "score_command": score},
            "timeout_s": 60.0,
            "weight": 0.5,
        },
    ]
    config = write_config(
        agents_folder(tmp_path),
        tiny_model,
        base=SMALLEST,
        # Enough for the agents that are served from the first step on.
        run__steps=16,
        environments=entries,
        algorithm={"group_size": 4, "groups_per_step": 6, "learning_rate": 1e-4},
        sampling={"max_reply_tokens": 8, "max_episode_tokens": 64},
    )
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        async with connection(config, run) as client:
            await until_step(client, 1, limit_s=RUN_LIMIT_S)
            served = letter_agents.Smallest(length=2)
            await client.serve(served, name="served", weight=4.0, timeout_s=60.0)
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = checked(tmp_path / "run")
    assert summary["steps"] == 16
    assert summary["ledger"]["failed"] == 0
    trajectories = trained_trajectories(tmp_path / "run")
    assert {t.environment for t in trajectories} == {
        "smallest",
        "plainly",
        "program",
        "served",
    }
    # The second call of an episode continues the tokens of the first one.
    twice = [t for t in trajectories if t.metrics.get("attempts") == 2.0]
    assert twice
    assert all(len(t.run_lengths) == 4 and len(t.branches) <= 1 for t in twice)


# It also leaves the address by which it called.
REMOTE_PROGRAM = f"{PROGRAM}open(sys.argv[2], 'a').write(url + chr(10))\n"


async def test_programs_from_elsewhere_train_by_one_port_that_two_servers_share(
    tmp_path: Path, tiny_model: Path
) -> None:
    urls = tmp_path / "urls"
    asks = [sys.executable, "-c", REMOTE_PROGRAM, "{letters}", str(urls)]
    listen = f"127.0.0.1:{free_port('127.0.0.1')}"
    entry = {
        "name": "program",
        "reference": "slipstream.environments.command:Command",
        "args": {
            "command": asks,
            "tasks": [{"letters": "b a c", "first": "a"}],
            "score_command": [sys.executable, "-c", SCORE, "{first}"],
            "remote": True,
        },
        "timeout_s": 60.0,
    }
    config = write_config(
        tmp_path,
        tiny_model,
        base=SMALLEST,
        run__steps=2,
        environments=[entry],
        agents={"listen": listen},
        rollout_server={"count": 2},
        algorithm={"group_size": 4, "groups_per_step": 6, "learning_rate": 1e-4},
        sampling={"max_reply_tokens": 8, "max_episode_tokens": 64},
    )
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        async with connection(config, run) as client:
            await until_step(client, 1, limit_s=RUN_LIMIT_S)
        host, port = listen.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = checked(tmp_path / "run")
    assert summary["ledger"]["failed"] == 0
    # The kernel gives some connections to the server whose worker is not called.
    for url in urls.read_text().split():
        assert url.startswith(f"http://{listen}/")
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert "has refused 1 call of agents at agents.listen" in log
