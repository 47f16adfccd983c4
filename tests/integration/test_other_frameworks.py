"""Environments of verifiers, and by it of OpenEnv, with a Python of their own.

They are no dependencies: `make test-tools` installs verifiers and the environments of its own
tests, and `SLIPSTREAM_FRAMEWORKS` names another folder with both.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.core.machine.address import free_port
from support.fakes.chat_models import make_chat_model
from support.fakes.framework_episode import MARK
from support.fakes.page_reader import BLOCK
from support.rigs import run_processes, tools
from support.rigs.completed import completed

FOLDER = tools.folder("frameworks")
LIMIT_S = 300.0
RUN_LIMIT_S = 1200.0
VERIFIERS = "slipstream.environments.frameworks.verifiers:Verifiers"
FAKES = run_processes.ROOT / "tests" / "support" / "fakes"


def python_of(framework: str) -> Path:
    return FOLDER / framework / "bin" / "python"


WHY = f"no verifiers here: {tools.HOW}"
pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("nothing_survives"),
    pytest.mark.skipif(not python_of("verifiers").exists(), reason=WHY),
]


def play(
    python: Path | str,
    reference: str,
    args: dict,
    *episodes: dict,
    folder: Path = FAKES,
) -> list[dict]:
    """Plays episodes in another interpreter and in `folder`, with scripted replies."""
    request = {"reference": reference, "args": args, "search_path": str(folder)}
    paths = [
        str(run_processes.ROOT / part)
        for part in ("client", "core", "environments", "protos", "tests")
    ]
    words = json.dumps({**request, "episodes": episodes})
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    program = [python, FAKES / "framework_episode.py", words]
    ended = completed(program, cwd=folder, env=environ, timeout=LIMIT_S)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    assert lines, ended.stdout + ended.stderr
    return json.loads(lines[0].removeprefix(MARK))


def verifiers_episodes(args: dict, *episodes: dict) -> list[dict]:
    return play(python_of("verifiers"), VERIFIERS, args, *episodes)


def test_rewards_of_verifiers_are_those_of_its_taskset() -> None:
    taskset = {"taskset": {"id": "echo-v1", "phrases": ["one", "two"]}}
    right, wrong = verifiers_episodes(
        taskset, {"task": 1, "replies": ["two"]}, {"task": 0, "replies": ["two"]}
    )
    assert (right["failure"], right["reward"], wrong["reward"]) == ("", 1.0, 0.0)
    assert right["metrics"] == {"echoed": 1.0, "turns": 1.0, "truncated": 0.0}
    assert [message["role"] for message in right["requests"][0]["messages"]] == [
        "system",
        "user",
    ]


def test_verifiers_selects_tasks_as_its_own_commands_do() -> None:
    args = {"taskset": "echo-v1", "select": {"include": {"idx": ["2:"]}}}
    (episode,) = verifiers_episodes(args, {"replies": ["verifiers"]})
    assert (episode["failure"], episode["reward"]) == ("", 1.0)


def test_a_scripted_user_of_verifiers_leads_several_turns() -> None:
    args = {"taskset": "echo-user-sim-v1"}
    (episode,) = verifiers_episodes(args, {"replies": ["hello world", "no"]})
    assert (episode["failure"], episode["reward"]) == ("", 0.5)
    first, second = (request["messages"] for request in episode["requests"])
    # The second request continues the first one.
    assert second[: len(first)] == first
    assert episode["metrics"]["turns"] == 2.0


def test_each_agent_of_verifiers_is_a_branch_and_an_untrained_one_has_no_share() -> (
    None
):
    (episode,) = verifiers_episodes(
        {"taskset": "duet-v1"}, {"task": 1, "replies": ["ping"]}
    )
    assert (episode["failure"], episode["reward"]) == ("", 1.0)
    assert {request["branch"] for request in episode["requests"]} == {"a", "b"}
    assert episode["shares"] == {"b": 0.0}
    assert episode["metrics"]["a_duet"] == 1.0


def test_tools_of_verifiers_are_called_and_keep_their_state() -> None:
    bump = {"name": "counter_bump", "arguments": {}}
    two, single = verifiers_episodes(
        {"taskset": "counter-tool-v1"},
        {"replies": [bump, bump, "done"]},
        {"replies": [{"name": "no_tool", "arguments": {}}, bump, "done"]},
    )
    assert (two["failure"], two["reward"], single["reward"]) == ("", 1.0, 0.0)
    results = [
        m["content"] for m in two["requests"][-1]["messages"] if m["role"] == "tool"
    ]
    assert results == ["count=1", "count=2"]
    assert "unknown tool 'no_tool'" in str(single["requests"][1]["messages"])


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"taskset": "nothing-v1"}, "taskset 'nothing-v1' not found"),
        (
            {"taskset": {"id": "echo-v1", "words": 3}},
            "verifiers refuses taskset.words: Extra inputs are not permitted, got 3",
        ),
        (
            {"taskset": "echo-v1", "select": {"limit": 0}},
            "verifiers refuses limit: Input should be greater than or equal to 1, got 0",
        ),
    ],
)
def test_what_verifiers_refuses_is_one_line(args: dict, cause: str) -> None:
    (refused,) = verifiers_episodes(args)
    assert cause in refused["failure"]


def shown(folder: Path, framework: str) -> dict:
    """Saves the file of a section of the guide; returns the args of its first environment."""
    page = (run_processes.ROOT / "docs" / "guides" / "frameworks.md").read_text()
    section = page.partition(f"## {framework}\n")[2].partition("\n## ")[0]
    blocks = [(block[1], block[2]) for block in BLOCK.finditer(section)]
    for name in re.findall(r"`(\w+\.py)`", section)[:1]:
        (folder / name).write_text(
            next(text for kind, text in blocks if kind == "python")
        )
    table = tomllib.loads(next(text for kind, text in blocks if kind == "toml"))
    (folder / "venvs").symlink_to(FOLDER)
    return (table.get("environments") or table["evaluations"])[0]["args"]


def test_the_taskset_of_the_guide_trains(tmp_path: Path) -> None:
    args = shown(tmp_path, "verifiers")
    (episode,) = play(
        python_of("verifiers"),
        VERIFIERS,
        args,
        {"task": 1, "replies": ["edcb"]},
        folder=tmp_path,
    )
    assert (episode["failure"], episode["reward"]) == ("", 1.0)


@contextlib.contextmanager
def echoing(folder: Path, *, places: int = 100) -> Iterator[str]:
    """Yields the address of the server that `openenv init` makes, for sessions at `places`."""
    command = [FOLDER / "verifiers" / "bin" / "openenv", "init", "echoing"]
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, timeout=LIMIT_S
    )
    app = folder / "echoing" / "server" / "app.py"
    text = app.read_text()
    assert "max_concurrent_envs=1," in text
    app.write_text(
        text.replace("max_concurrent_envs=1,", f"max_concurrent_envs={places},")
    )
    port = free_port("127.0.0.1")
    options = ["--port", str(port), "--log-level", "warning"]
    program = [
        python_of("verifiers"),
        "-m",
        "uvicorn",
        "echoing.server.app:app",
        *options,
    ]
    process = subprocess.Popen(program, cwd=folder)
    try:
        until_it_listens(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def until_it_listens(port: int, process: subprocess.Popen) -> None:
    end_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < end_s:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.1)
    raise AssertionError("the server of OpenEnv does not listen")


def test_verifiers_plays_environments_of_openenv(tmp_path: Path) -> None:
    with echoing(tmp_path) as address:
        taskset = {
            "id": "openenv",
            "base_url": address,
            "resets": [{"seed": 0}, {"seed": 1}],
        }
        (episode,) = verifiers_episodes(
            {"taskset": taskset}, {"task": 1, "replies": ['{"message": "hi"}', ""]}
        )
    assert episode["failure"] == ""
    assert "Echoing environment ready!" in str(episode["requests"][0]["messages"])
    assert episode["reward"] == pytest.approx(0.2)


def test_a_server_of_openenv_with_one_place_is_refused_by_a_check(
    tmp_path: Path,
) -> None:
    with echoing(tmp_path, places=1) as address:
        args = json.dumps({"taskset": {"id": "openenv", "base_url": address}})
        options = ["--args", args, "--python", str(python_of("verifiers"))]
        ended = run_processes.run_command("check", VERIFIERS, *options, cwd=tmp_path)
    assert ended.returncode == 2
    message = (
        "of two episodes at once one fails, and a run plays many: "
        "RuntimeError: EnvError: OpenEnv"
    )
    assert message in ended.stderr
    assert (
        "a server of OpenEnv closes sessions beyond the max_concurrent_envs"
        in ended.stderr
    )


@pytest.mark.slow
async def test_environments_of_verifiers_train_twenty_steps(tmp_path: Path) -> None:
    names = ["echo-v1", "echo-user-sim-v1", "duet-v1", "counter-tool-v1"]
    settings = {
        "reference": VERIFIERS,
        "python": str(python_of("verifiers")),
        "timeout_s": 120.0,
    }
    entries = [settings | {"name": name, "args": {"taskset": name}} for name in names]
    # A tiny model plays twenty steps within minutes.
    run_processes.write_config(
        tmp_path,
        make_chat_model(tmp_path / "model"),
        environments=entries,
        evaluations=[],
        run__steps=20,
        algorithm__group_size=2,
        algorithm__groups_per_step=4,
        sampling__max_reply_tokens=12,
        sampling__max_turns=4,
        sampling__max_episode_tokens=2000,
        sampling__max_total_tokens=4000,
        learner__micro_batch_tokens=4096,
        rollout_server__max_episodes=16,
        rollout_server__tool_parser="hermes",
    )
    async with run_processes.command(
        tmp_path, "run", "config.toml", cwd=tmp_path
    ) as run:
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = run_processes.checked(tmp_path / "run")
    assert summary["steps"] == 20
    assert summary["ledger"]["failed"] == 0
    trained = run_processes.trained_trajectories(tmp_path / "run")
    assert {trajectory.environment for trajectory in trained} == set(names)
