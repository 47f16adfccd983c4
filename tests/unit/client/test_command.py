from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from slipstream.client.builtin.command import Command
from slipstream.client.serving import EpisodeHost
from slipstream.protocol.errors import ConfigError
from slipstream.v1 import environment_pb2 as pb
from support.fakes.scripted_server import Episode, answers, never

LIMIT_S = 120.0

CALL = """
import json, os, sys, urllib.request
key = os.environ["OPENAI_API_KEY"]
assert key == os.environ["ANTHROPIC_API_KEY"]
assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
asked = urllib.request.Request(url, body, {"Authorization": "Bearer " + key})
with urllib.request.urlopen(asked) as answer:
    reply = json.load(answer)["choices"][0]["message"]["content"]
open("reply.txt", "w").write(reply)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


async def played(command: Command, handler=None) -> pb.WorkerMessage:
    host = EpisodeHost(command)
    try:
        async with asyncio.timeout(LIMIT_S):
            return await Episode(host, handler or answers(str.upper)).run()
    finally:
        await host.close_all()


@pytest.mark.process
async def test_a_program_finds_the_model_and_its_exit_status_is_the_reward() -> None:
    right = python(CALL + "sys.exit(reply != 'HELLO')", "{word}")
    wrong = python(CALL + "sys.exit(reply == 'HELLO')", "{word}")
    for command, reward in ((right, 1.0), (wrong, 0.0)):
        result = (await played(Command(command, [{"word": "hello"}]))).agent_result
        assert result.reward == reward
        assert dict(result.metrics) == {"ended_by_limit": 0.0, "exit_0": reward}


@pytest.mark.process
async def test_a_task_travels_in_arguments_files_and_variables() -> None:
    code = (
        "import json, os, pathlib, sys; "
        "assert sys.argv[2] == os.environ['OPENAI_BASE_URL']; "
        "said = [sys.argv[1], pathlib.Path('in/question.txt').read_text(), os.environ['HINT']]; "
        "pathlib.Path('score.json').write_text(json.dumps({'reward': 0.5, 'n': len(said)})); "
        "sys.exit(said != ['7 {unknown}', 'Say hello.', '[1, 2]'])"
    )
    command = Command(
        python(code, "{number} {unknown}", "{OPENAI_BASE_URL}"),
        [{"number": 7, "word": "hello", "hint": [1, 2]}],
        files={"in/question.txt": "Say {word}."},
        variables={"HINT": "{hint}"},
        score_file="score.json",
    )
    result = (await played(command)).agent_result
    assert result.reward == 0.5
    assert dict(result.metrics) == {"ended_by_limit": 0.0, "exit_0": 1.0, "n": 3.0}


@pytest.mark.process
async def test_another_program_scores_what_the_first_one_left() -> None:
    judge = (
        "import os, pathlib, sys; print('noise'); print('noise', file=sys.stderr); "
        "assert 'OPENAI_API_KEY' not in os.environ; "
        "print(0.25 + (pathlib.Path('reply.txt').read_text() == sys.argv[1]) / 2)"
    )
    command = Command(
        python(CALL, "{word}"),
        [{"word": "hello", "right": "HELLO"}],
        score_command=python(judge, "{right}"),
    )
    assert (await played(command)).agent_result.reward == 0.75


@pytest.mark.process
async def test_a_program_sees_no_variable_of_its_worker_and_a_home_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "x")
    code = (
        "import os, sys; home = os.environ['HOME']; "
        "open(home + '/settings', 'w').write(sys.argv[1]); print(os.getcwd()); "
        "sys.exit('SECRET' in os.environ or os.listdir('.') != [])"
    )
    assert (await played(Command(python(code, "{task}"), ["a"]))).agent_result.reward == 1.0
    assert not list(Path.home().glob("settings"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("while True: pass", {"limit_s": 1.0}),
        ("while True: print('x' * 1000)", {"max_output_mib": 0.1}),
        ("x = bytearray(1 << 29)\nfor i in range(0, len(x), 4096): x[i] = 1\nwhile True: pass",
         {"memory_gib": 0.2}),
        ("import os, time\nfor _ in range(9): os.fork() or time.sleep(99)\ntime.sleep(99)",
         {"max_processes": 4}),
    ],
)  # fmt: skip
async def test_a_program_that_reaches_a_limit_is_ended_and_scored(code: str, limits: dict) -> None:
    result = (await played(Command(python(code, "{task}"), ["a"], **limits))).agent_result
    assert result.reward == 0.0
    assert result.metrics["ended_by_limit"] == 1.0


@pytest.mark.process
async def test_what_a_program_forks_ends_with_the_episode(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(600)\n"
        "    open(sys.argv[2], 'a').write(f'{os.getpid()}\\n')\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "open(sys.argv[2], 'a').write(f'{os.getpid()}\\n')\n"
        "if sys.argv[1] == 'stay': time.sleep(600)\n"
    )
    command = Command(python(code, "{task}", str(pids)), ["go", "stay"])
    assert (await played(command)).agent_result.reward == 1.0
    assert await gone(pids)
    pids.unlink()
    host = EpisodeHost(command)
    episode = Episode(host, never, task_index=1)
    await episode.reset()
    waiting = asyncio.create_task(episode.next())
    async with asyncio.timeout(LIMIT_S):
        while not pids.exists() or len(pids.read_text().splitlines()) < 2:
            await asyncio.sleep(0.01)
    await episode.close()
    assert (await waiting).failure.message == "the episode was closed"
    assert await gone(pids)
    await host.close_all()


async def gone(pids: Path) -> bool:
    """Whether all processes of a file have ended; a killed one may take a moment."""
    async with asyncio.timeout(LIMIT_S):
        while any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()):
            await asyncio.sleep(0.01)
    return True


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"score_file": "none.txt"}, "ValueError: no score in none.txt ([Errno 2]"),
        ({"score_command": python("raise KeyError(3)")}, "score_command failed: exit status 1"),
        ({"score_command": python("print('high')")}, "must be a number, or a JSON object"),
        ({"score_command": python("print('{\"n\": 1}')")}, "must be a number, or a JSON object"),
        ({"score_command": python("print('NaN')")}, "the reward must be a finite number"),
    ],
)
async def test_a_score_that_is_none_fails_the_episode(given: dict, cause: str) -> None:
    answer = await played(Command(python("print('bye')", "{task}"), ["a"], **given))
    assert cause in answer.failure.message


def test_tasks_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(3)))
    assert Command(["true", "{n}"], str(path)).tasks() == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("arguments", "given", "cause"),
    [
        (("true", ["a"]), {}, "a command is a list: the program, then each of its arguments"),
        ((["true"], ["a"]), {}, "nothing of a task reaches the program: name one of its fields"),
        ((["no-such-program", "{task}"], ["a"]), {}, "there is no program 'no-such-program' in"),
        ((["/no/such", "{task}"], ["a"]), {}, "there is no program '/no/such'$"),
        ((["true", "{task}"], []), {}, "there must be at least one task"),
        ((["true", "{task}"], [3]), {}, "task 1 must be a text or an object, got 3"),
        ((["true", "{task}"], "no.jsonl"), {}, "no.jsonl does not exist"),
        ((["true", "{task}"], ["a"]), {"limit_s": 0.0}, "limit_s must be above 0"),
        ((["true", "{task}"], ["a"]), {"files": {"../x": ""}}, "files are inside the folder"),
        (
            (["true", "{task}"], ["a"]),
            {"score_file": "a", "score_command": ["true"]},
            "give score_command or score_file, not both",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple, given: dict, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause.replace("(", r"\(")):
        Command(*arguments, **given)


@pytest.mark.process
async def test_variables_of_the_program_do_not_reach_what_watches_it() -> None:
    given = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "{task}"}
    command = Command(["sh", "-c", 'test "$PYTHONPATH" = a'], ["a"], variables=given)
    assert (await played(command)).agent_result.reward == 1.0


@pytest.mark.process
async def test_a_file_in_the_folder_is_not_imported_by_what_watches_the_program() -> None:
    command = Command(
        python("import sys; sys.exit(0)", "{task}"),
        ["a"],
        files={"argparse.py": "raise SystemExit(9)", "slipstream/__init__.py": "raise KeyError"},
    )
    assert (await played(command)).agent_result.reward == 1.0
