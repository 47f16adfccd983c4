"""Tasks of Harbor with a Python of their own: agents on the host and in sandboxes without network.

Harbor is no dependency: these tests are skipped without it. `make test-harbor` installs it in
the folder `harbor` of the one that `SLIPSTREAM_FRAMEWORKS` names.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from slipstream.core.errors import EPISODE_LIMIT
from slipstream.core.machine.files import remove_abandoned
from support.fakes.framework_episode import MARK
from support.rigs import run_processes, tools
from support.rigs.completed import completed
from support.rigs.waiting import wait_until

# The beginning of the line by which `harbor_agents.Sleeps` tells its program.
SLEEPS = "SLEEPS "
FOLDER = tools.folder("frameworks")
PYTHON = FOLDER / "harbor" / "bin" / "python"
FAKES = run_processes.ROOT / "tests" / "support" / "fakes"
HARBOR = "slipstream.environments.frameworks.harbor:Harbor"
NAMESPACES = "slipstream.environments.frameworks.harbor_namespaces:Namespaces"
LIMIT_S = 600.0

WHY = "Harbor is not installed here: make test-harbor has it"
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--", "true"]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("nothing_survives"),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY),
]
TASK = """
version = "1.0"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 120.0
[environment]
build_timeout_sec = 120.0
"""
# The reward is 1 if the answer is right; what the verifier could read is told beside it.
VERIFIER = """#!/bin/bash
right=0.25
[ "$(cat /app/answer.txt)" != 7 ] || right=1.0
knows=0.0
! env | grep -q OPENAI || knows=1.0
echo "{\\"reward\\": $right, \\"knows_endpoint\\": $knows}" > /logs/verifier/reward.json
"""


def make_task(
    folder: Path, name: str, *, solution: str, verifier: str = VERIFIER
) -> None:
    files = {
        "task.toml": TASK,
        "instruction.md": "Write 7 to /app/answer.txt",
        "environment/Dockerfile": "FROM debian",
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": verifier,
    }
    for path, text in files.items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)


def variables() -> dict[str, str]:
    parts = ("client", "core", "environments", "protos", "tests")
    paths = [str(run_processes.ROOT / part) for part in parts]
    paths.append(str(FAKES))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def program(args: dict[str, Any], *episodes: dict[str, Any]) -> list[str]:
    if subprocess.run(NAMESPACE, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    words = {
        "reference": HARBOR,
        "args": {"environment": NAMESPACES, **args},
        "search_path": str(FAKES),
        "episodes": episodes,
    }
    return [str(PYTHON), str(FAKES / "framework_episode.py"), json.dumps(words)]


def play(args: dict[str, Any], *episodes: dict[str, Any]) -> list[dict[str, Any]]:
    ended = completed(
        program(args, *episodes), cwd=FAKES, env=variables(), timeout=LIMIT_S
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    assert lines, ended.stdout + ended.stderr
    (line,) = lines
    played: list[dict[str, Any]] = json.loads(line.removeprefix(MARK))
    return played


def test_rewards_are_the_verifiers_and_exceptions_are_failures(tmp_path: Path) -> None:
    make_task(
        tmp_path,
        "a_right",
        solution="echo 7 > /app/answer.txt",
    )
    make_task(
        tmp_path,
        "b_wrong",
        solution="echo 8 > /app/answer.txt",
    )
    make_task(
        tmp_path,
        "c_silent",
        solution="true",
        verifier="#!/bin/bash\nexit 3\n",
    )
    by_another_name = 'echo "{\\"score\\": 1}" > /logs/verifier/reward.json'
    make_task(
        tmp_path,
        "d_other",
        solution="true",
        verifier=f"#!/bin/bash\n{by_another_name}\n",
    )
    episodes = [{"task": number, "replies": ["no call"]} for number in range(4)]
    args = {"tasks": str(tmp_path), "agent": "oracle"}
    right, wrong, silent, unnamed = play(args, *episodes)
    assert right["reward"] == 1.0
    assert wrong["reward"] == 0.25
    assert right["metrics"] == {"reward_knows_endpoint": 0.0, "ended_by_limit": 0.0}
    assert not right["requests"]
    assert "Harbor's trial ended by RewardFileNotFoundError" in silent["failure"]
    assert (
        "the verifier gave no reward 'reward'; its rewards: score" in unnamed["failure"]
    )


def test_an_agent_inside_calls_its_model_without_network_and_its_verifier_is_not_told(
    tmp_path: Path,
) -> None:
    make_task(tmp_path, "task", solution="true")
    episodes = [{"replies": ["It is 7."]}, {"replies": ["It is 8."]}]
    args = {"tasks": str(tmp_path / "task"), "agent": "harbor_agents:Inside"}
    right, wrong = play(args, *episodes)
    assert right["reward"] == 1.0, right
    assert wrong["reward"] == 0.25, wrong
    assert len(right["requests"]) == 1
    assert len(wrong["requests"]) == 1
    assert right["metrics"]["reward_knows_endpoint"] == 0.0


def test_an_agent_on_the_host_calls_its_model(tmp_path: Path) -> None:
    make_task(tmp_path, "task", solution="true")
    args = {"tasks": str(tmp_path / "task"), "agent": "harbor_agents:OnHost"}
    (played,) = play(args, {"replies": ["It is 7."]})
    assert played["reward"] == 1.0, played
    assert len(played["requests"]) == 1


def test_terminus_calls_its_model_from_the_host_and_types_in_the_sandbox(
    tmp_path: Path,
) -> None:
    if shutil.which("tmux") is None:
        pytest.skip(
            "Terminus-2 needs tmux in its sandbox, which has the programs of the host"
        )
    make_task(tmp_path, "task", solution="true")
    keys = {"keystrokes": "echo 7 > /app/answer.txt\n", "duration": 0.1}
    step = {
        "analysis": "",
        "plan": "",
        "commands": [keys],
        "task_complete": True,
    }
    args = {"tasks": str(tmp_path / "task"), "agent": "terminus-2"}
    (played,) = play(args, {"replies": [json.dumps(step)]})
    assert played["reward"] == 1.0, played
    # Terminus asks once more whether the task is complete.
    assert len(played["requests"]) == 2


def refusal(code: str, message: str) -> dict[str, Any]:
    error = {
        "code": code,
        "message": message,
        "type": "invalid_request_error",
    }
    return {"error": error}


def test_an_agent_that_meets_a_limit_of_the_episode_is_scored(tmp_path: Path) -> None:
    make_task(tmp_path, "task", solution="true")
    turns = refusal("max_turns_exceeded", f"{EPISODE_LIMIT} sampling.max_turns = 1")
    tokens = refusal(
        "context_length_exceeded", "prompt is too long: 30 tokens leave no room"
    )
    other = refusal("invalid_request", "n must be 1, got 2: send one call for each")
    agent = {
        "name": "terminus-2",
        "kwargs": {"enable_summarize": False},
    }
    args = {"tasks": str(tmp_path), "agent": agent}
    episodes = [{"replies": [refused]} for refused in (turns, tokens, other)]
    by_turns, by_tokens, failed = play(args, *episodes)
    for scored in (by_turns, by_tokens):
        assert scored["reward"] == 0.25, scored
        assert scored["metrics"]["ended_by_limit"] == 1.0
    assert "BadRequestError" in failed["failure"]


def test_an_agent_whose_time_is_over_is_scored(tmp_path: Path) -> None:
    make_task(tmp_path, "task", solution="true")
    trial = {"agent_timeout_multiplier": 0.05}
    args = {"tasks": str(tmp_path), "agent": "harbor_agents:Late", "trial": trial}
    (played,) = play(args, {"replies": ["no call"]})
    assert played["reward"] == 1.0, played
    assert played["metrics"]["ended_by_limit"] == 1.0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_of_a_sandbox_stays_behind_its_worker_and_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    make_task(tmp_path, "task", solution="true")
    # Paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="harbor-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    args = {"tasks": str(tmp_path), "agent": "harbor_agents:Sleeps"}
    command = program(args, {"replies": ["no call"]})
    with subprocess.Popen(
        command,
        cwd=FAKES,
        env=variables(),
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        lines = (line for line in worker.stdout if line.startswith(SLEEPS))
        sleeper = next(lines).removeprefix(SLEEPS).split()
        wait_until(lambda: len(running(sleeper)) == 2)
        assert {
            path.name.rpartition("-")[0] for path in folder.glob("slipstream-*")
        } == {
            "slipstream-agent",
            "slipstream-relay",
        }
        worker.send_signal(end)
    wait_until(lambda: not running(sleeper))
    if end == signal.SIGKILL:
        # The next worker, server or command does so.
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        remove_abandoned()
    assert not list(folder.glob("slipstream-*"))
    shutil.rmtree(folder)


def running(command: list[str]) -> list[int]:
    """Returns the processes that run `command`."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if process.info["cmdline"] == command]


def test_an_agent_in_a_sandbox_finds_no_way_out(tmp_path: Path) -> None:
    make_task(tmp_path, "task", solution="true")
    args = {"tasks": str(tmp_path / "task"), "agent": "harbor_agents:Attacks"}
    (played,) = play(args, {"replies": ["no call"]})
    assert played["failure"] == ""
    assert played["reward"] == 1.0


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"agent": "oracel"}, "Harbor refuses the trial"),
        (
            {"agent": "oracle", "include": ["none*"]},
            "no task has a name like 'none*': task",
        ),
        ({"agent": "oracle", "exclude": ["task"]}, "include and exclude leave no task"),
        (
            {"agent": "oracle", "trial": {"task": {}}},
            "trial.task is set for each episode",
        ),
        (
            {"agent": "oracle", "trial": {"install_only": True}},
            "trial must run the agent",
        ),
        (
            {"agent": {"name": "codex", "base_url": "x"}},
            "agent.base_url is set for each",
        ),
        (
            {"agent": {"name": "nop", "env": {"OPENAI_API_KEY": "k"}}},
            "agent.env.OPENAI_API_KEY is",
        ),
        ({"agent": "oracle", "tasks": "/nowhere"}, "/nowhere has no task of Harbor"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    tmp_path: Path, args: dict[str, Any], cause: str
) -> None:
    make_task(tmp_path, "task", solution="true")
    (refused,) = play({"tasks": str(tmp_path), **args})
    assert cause in refused["failure"]
