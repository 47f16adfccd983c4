"""Environments of verifiers and OpenEnv as their makers ship them, each in its own Python.

They are no dependencies: a test without its framework is skipped. `SLIPSTREAM_FRAMEWORKS` names a
folder that these commands fill; WORKER stands for the requirements for another Python in
docs/guides/environment-runs.md.

    cd $SLIPSTREAM_FRAMEWORKS
    for name in verifiers openenv; do python3 -m venv $name; done
    verifiers/bin/pip install verifiers==0.4.0 hatchling WORKER
    openenv/bin/pip install openenv==0.10.0 gymnasium matplotlib
    git clone --depth 1 https://github.com/meta-pytorch/OpenEnv OpenEnv
    verifiers/bin/pip download --no-deps --no-binary :all: --no-build-isolation verifiers==0.4.0
    tar xzf verifiers-0.4.0.tar.gz
    realpath verifiers-0.4.0/tests/v1/fixtures > \\
        $(echo verifiers/lib/python3*/site-packages)/fixtures.pth
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.client.environment import Message, StepResult
from slipstream.client.launch.preflight import free_port
from slipstream.environments.frameworks.openenv import OpenEnv
from support.fakes.chat_models import make_chat_model
from support.fakes.framework_episode import MARK
from support.fakes.page_reader import BLOCK
from support.rigs import run_processes
from support.rigs.completed import completed
from support.rigs.waiting import until

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("nothing_survives")]

FOLDER = Path(os.environ.get("SLIPSTREAM_FRAMEWORKS", "frameworks-of-others")).absolute()
# An image that answers as the environment of `openenv init` does; its tests need Docker.
IMAGE = os.environ.get("SLIPSTREAM_OPENENV_IMAGE", "")
LIMIT_S = 300.0
RUN_LIMIT_S = 1200.0
VERIFIERS = "slipstream.environments.frameworks.verifiers:Verifiers"
OPENENV = "slipstream.environments.frameworks.openenv:OpenEnv"
FAKES = run_processes.ROOT / "tests" / "support" / "fakes"


def python_of(framework: str) -> Path:
    return FOLDER / framework / "bin" / "python"


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips without the virtual environment of a framework."""
    reason = f"{python_of(framework)} is not there; the top of this file says how to make it"
    return pytest.mark.skipif(not python_of(framework).exists(), reason=reason)


def play(
    python: Path | str, reference: str, args: dict, *episodes: dict, folder: Path = FAKES
) -> list[dict]:
    """Plays episodes in another interpreter and in `folder`, with scripted replies."""
    asked = {"reference": reference, "args": args, "search_path": str(folder)}
    paths = [
        str(run_processes.ROOT / part)
        for part in ("client", "core", "environments", "protos", "tests")
    ]
    words = json.dumps({**asked, "episodes": episodes})
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    program = [python, FAKES / "framework_episode.py", words]
    ended = completed(program, cwd=folder, env=environ, timeout=LIMIT_S)
    said = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    assert said, ended.stdout + ended.stderr
    return json.loads(said[0].removeprefix(MARK))


def verifiers_episodes(args: dict, *episodes: dict) -> list[dict]:
    return play(python_of("verifiers"), VERIFIERS, args, *episodes)


@needs("verifiers")
def test_rewards_of_verifiers_are_those_of_its_taskset() -> None:
    said = {"taskset": {"id": "echo-v1", "phrases": ["one", "two"]}}
    right, wrong = verifiers_episodes(
        said, {"task": 1, "replies": ["two"]}, {"task": 0, "replies": ["two"]}
    )
    assert (right["failure"], right["reward"], wrong["reward"]) == ("", 1.0, 0.0)
    assert right["metrics"] == {"echoed": 1.0, "turns": 1.0, "truncated": 0.0}
    assert [message["role"] for message in right["requests"][0]["messages"]] == ["system", "user"]


@needs("verifiers")
def test_verifiers_selects_tasks_as_its_own_commands_do() -> None:
    args = {"taskset": "echo-v1", "select": {"include": {"idx": ["2:"]}}}
    (episode,) = verifiers_episodes(args, {"replies": ["verifiers"]})
    assert (episode["failure"], episode["reward"]) == ("", 1.0)


@needs("verifiers")
def test_a_scripted_user_of_verifiers_leads_several_turns() -> None:
    args = {"taskset": "echo-user-sim-v1"}
    (episode,) = verifiers_episodes(args, {"replies": ["hello world", "no"]})
    assert (episode["failure"], episode["reward"]) == ("", 0.5)
    first, second = (request["messages"] for request in episode["requests"])
    # The second request continues the first one.
    assert second[: len(first)] == first
    assert episode["metrics"]["turns"] == 2.0


@needs("verifiers")
def test_each_agent_of_verifiers_is_a_branch_and_an_untrained_one_has_no_share() -> None:
    (episode,) = verifiers_episodes({"taskset": "duet-v1"}, {"task": 1, "replies": ["ping"]})
    assert (episode["failure"], episode["reward"]) == ("", 1.0)
    assert {request["branch"] for request in episode["requests"]} == {"a", "b"}
    assert episode["shares"] == {"b": 0.0}
    assert episode["metrics"]["a_duet"] == 1.0


@needs("verifiers")
def test_tools_of_verifiers_are_called_and_keep_their_state() -> None:
    bump = {"name": "counter_bump", "arguments": {}}
    two, one = verifiers_episodes(
        {"taskset": "counter-tool-v1"},
        {"replies": [bump, bump, "done"]},
        {"replies": [{"name": "no_tool", "arguments": {}}, bump, "done"]},
    )
    assert (two["failure"], two["reward"], one["reward"]) == ("", 1.0, 0.0)
    results = [m["content"] for m in two["requests"][-1]["messages"] if m["role"] == "tool"]
    assert results == ["count=1", "count=2"]
    assert "unknown tool 'no_tool'" in str(one["requests"][1]["messages"])


@needs("verifiers")
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


@contextlib.contextmanager
def serving_games(
    app: str = "guess", sessions: int = 100
) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of OpenEnv as its users start it."""
    port = free_port("127.0.0.1")
    options = ["--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(
        [python_of("openenv"), "-m", "uvicorn", f"openenv_games:{app}", *options],
        cwd=FAKES,
        env={**os.environ, "SESSIONS": str(sessions)},
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


async def until_it_answers(environment: OpenEnv) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await environment.reset({"seed": 0})
            except RuntimeError:
                await asyncio.sleep(0.2)
            else:
                await environment.close()
                return


async def replied(environment: OpenEnv, task: dict, *replies: str) -> list[StepResult]:
    """Plays one episode on a copy, as a worker does."""
    import copy

    own = copy.copy(environment)
    await own.reset(task)
    try:
        return [await own.step(reply) for reply in replies]
    finally:
        await own.close()


@needs("openenv")
async def test_sessions_of_openenv_are_episodes_and_their_failures_have_causes() -> None:
    with serving_games(sessions=2) as (url, process):
        game = OpenEnv(
            url,
            action={"guess": "{number}"},
            observation="{hint}",
            metrics=["steps"],
            tasks=5,
            full_timeout_s=LIMIT_S,
        )
        await until_it_answers(game)
        # The wanted digit of a seed is the same in every episode.
        digits = [
            [(await replied(game, {"seed": seed}, str(n)))[0].reward for n in range(3)].index(1.0)
            for seed in range(3)
        ]
        # There are ten episodes and two sessions: the others wait.
        played = await asyncio.gather(
            *[replied(game, {"seed": n % 3}, f"It is {digits[n % 3]}") for n in range(10)]
        )
        assert [results[-1].reward for results in played] == [1.0] * 10
        assert played[0][-1].metrics == {"turns": 1.0, "invalid_action": 0.0, "steps": 1.0}
        wrong = str((digits[0] + 1) % 3)
        *_, last = await replied(game, {"seed": 0}, wrong, wrong, wrong)
        assert (last.reward, last.done) == (0.0, True)
        (none,) = await replied(game, {"seed": 0}, "no number")
        assert (none.reward, none.done, none.metrics["invalid_action"]) == (0.0, True, 1.0)
        # The server refuses what is no whole number.
        (half,) = await replied(game, {"seed": 0}, "1.5")
        assert half.metrics["invalid_action"] == 1.0
        with pytest.raises(RuntimeError, match="refuses step: 777 is not allowed"):
            await replied(game, {"seed": 0}, "777")
        with pytest.raises(RuntimeError, match="the OpenEnv server was lost in step"):
            await replied(game, {"seed": 0}, "888")
        assert process.wait(LIMIT_S) == 3
        with pytest.raises(RuntimeError, match="no OpenEnv server answers at ws://127.0.0.1"):
            await replied(game, {"seed": 0}, "1")


def shown(folder: Path, framework: str) -> dict:
    """Saves the file of a section of the guide; returns the args of its first environment."""
    page = (run_processes.ROOT / "docs" / "guides" / "frameworks.md").read_text()
    section = page.partition(f"## {framework}\n")[2].partition("\n## ")[0]
    blocks = [(block[1], block[2]) for block in BLOCK.finditer(section)]
    for name in re.findall(r"`(\w+\.py)`", section)[:1]:
        (folder / name).write_text(next(text for kind, text in blocks if kind == "python"))
    table = tomllib.loads(next(text for kind, text in blocks if kind == "toml"))
    (folder / "venvs").symlink_to(FOLDER)
    return (table.get("environments") or table["evaluations"])[0]["args"]


@needs("verifiers")
def test_the_taskset_of_the_guide_trains(tmp_path: Path) -> None:
    args = shown(tmp_path, "verifiers")
    (episode,) = play(
        python_of("verifiers"), VERIFIERS, args, {"task": 1, "replies": ["edcb"]}, folder=tmp_path
    )
    assert (episode["failure"], episode["reward"]) == ("", 1.0)


@needs("openenv")
def test_the_server_of_the_guide_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = shown(tmp_path, "OpenEnv")
    init = [tmp_path / "venvs" / "openenv" / "bin" / "openenv", "init", "echoing"]
    subprocess.run(init, cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT_S)
    monkeypatch.chdir(tmp_path)
    environment = OpenEnv(**args)

    async def played() -> tuple[str, StepResult]:
        try:
            (first,) = await environment.reset({"seed": 0})
            return first.content, await environment.step("hi")
        finally:
            await environment.close()
            assert environment._server is not None
            await environment._server.close()

    first, step = asyncio.run(played())
    assert first == "You said: Echoing environment ready!"
    assert step.messages == [Message("user", "You said: hi")]
    assert (step.reward, step.done) == (pytest.approx(0.2), False)


def sizes(**changes: object) -> dict[str, object]:
    """Settings under which a tiny model plays twenty steps within minutes."""
    return {
        "run__steps": 20,
        "evaluations": [],
        "algorithm__group_size": 2,
        "algorithm__groups_per_step": 4,
        "sampling__max_reply_tokens": 12,
        "sampling__max_turns": 4,
        "sampling__max_episode_tokens": 2000,
        "sampling__max_total_tokens": 4000,
        "learner__micro_batch_tokens": 4096,
        "rollout_server__max_episodes": 16,
        "rollout_server__tool_parser": "hermes",
        **changes,
    }


async def trained(folder: Path, entries: list[dict], **changes: object) -> Path:
    """A run of twenty steps whose ledger is closed and in which no episode failed."""
    model = make_chat_model(folder / "model")
    run_processes.write_config(folder, model, environments=entries, **sizes(**changes))
    async with run_processes.command(folder, "run", "config.toml", cwd=folder) as run:
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = run_processes.summary_of(folder / "run")
    assert summary["steps"] == 20
    assert summary["ledger"]["failed"] == 0
    run_processes.check_ledger(summary)
    return folder / "run"


def were_trained(run: Path) -> set[str]:
    """The environments whose trajectories were trained."""
    return {trajectory.environment for trajectory in run_processes.trained_trajectories(run)}


@pytest.mark.slow
@needs("verifiers")
async def test_environments_of_verifiers_train_twenty_steps(tmp_path: Path) -> None:
    names = ["echo-v1", "echo-user-sim-v1", "duet-v1", "counter-tool-v1"]
    entries = [
        {
            "name": name,
            "reference": VERIFIERS,
            "python": str(python_of("verifiers")),
            "args": {"taskset": name},
            "timeout_s": 120.0,
        }
        for name in names
    ]
    assert were_trained(await trained(tmp_path, entries)) == set(names)


@pytest.mark.skipif(not IMAGE, reason="SLIPSTREAM_OPENENV_IMAGE names no image of an echo server")
async def test_a_container_of_openenv_ends_with_the_process_that_started_it() -> None:
    args = {"image": IMAGE, "image_options": ["--memory", "1g"], "action": {"message": "{reply}"}}
    program = [sys.executable, "-c", PLAYS_IN_A_CONTAINER, json.dumps(args)]
    worker = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            # The server's own lines come first.
            while (line := await worker.stdout.readline()) != b"You said: hello\n":
                assert line, "the worker ended"
            assert len(containers()) == 1
            worker.kill()
            await until(lambda: not containers())
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


PLAYS_IN_A_CONTAINER = """
import asyncio, copy, json, sys
from slipstream.environments.frameworks.openenv import OpenEnv

async def main():
    game = OpenEnv(**json.loads(sys.argv[1]), observation="You said: {echoed_message}")
    episode = copy.copy(game)
    await episode.reset({"seed": 0})
    print((await episode.step("hello")).messages[0].content, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def containers() -> list[str]:
    """The ids of the containers of IMAGE that run."""
    asked = ["docker", "ps", "--quiet", "--filter", f"ancestor={IMAGE}"]
    return completed(asked, check=True).stdout.split()


@pytest.mark.slow
@needs("openenv")
async def test_environments_of_openenv_train_twenty_steps(tmp_path: Path) -> None:
    # What `openenv init` makes is the environment that OpenEnv itself ships.
    made = [FOLDER / "openenv" / "bin" / "openenv", "init", "echoing"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT_S)
    app = tmp_path / "echoing" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=100,"))
    uvicorn = [str(python_of("openenv")), "-m", "uvicorn", "--port", "{port}"]
    quiet = ["--log-level", "warning"]
    rules = {
        "echoing": {"action": {"message": "{reply}"}, "tasks": 10},
        "guess": {"action": {"guess": "{number}"}, "observation": "{hint}", "tasks": 10},
        "write": {"action": {"text": "{reply}"}, "tasks": [{"first": "a"}, {"first": "b"}]},
    }
    places = {"echoing": ("echoing.server.app:app", tmp_path)}
    entries = []
    for name, rule in rules.items():
        target, place = places.get(name, (f"openenv_games:{name}", FAKES))
        start = [*uvicorn, "--app-dir", str(place), target, *quiet]
        entries.append(
            {
                "name": name,
                "reference": OPENENV,
                "args": {"command": start, **rule},
                "timeout_s": 240.0,
            }
        )
    assert were_trained(await trained(tmp_path, entries)) == set(rules)
