import asyncio
import json
import os
import re
import socket
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.errors import ConfigError
from slipstream.core.template_values import show
from slipstream.environments.arguments import check_filled, filled
from slipstream.environments.command import Command
from slipstream.v1 import environment_pb2 as pb
from support.fakes.scripted_server import Episode, answers, never
from support.rigs.waiting import until

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


# The score is for tests of the program itself.
SCORED = {"score_command": ["echo", "0.5"]}


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


async def played(command: Command, handler=None) -> pb.WorkerMessage:
    host = EpisodeHost(command)
    try:
        return await asyncio.wait_for(
            Episode(host, handler or answers(str.upper)).run(), LIMIT_S
        )
    finally:
        await host.close_all()


@pytest.mark.process
async def test_a_program_finds_the_model_and_its_exit_status_is_a_metric_and_no_reward() -> (
    None
):
    right = python(CALL + "sys.exit(reply != 'HELLO')", "{word}")
    wrong = python(CALL + "sys.exit(reply == 'HELLO')", "{word}")
    for command, exit_0 in ((right, 1.0), (wrong, 0.0)):
        result = (
            await played(Command(command, [{"word": "hello"}], **SCORED))
        ).agent_result
        assert result.reward == 0.5
        assert dict(result.metrics) == {"ended_by_limit": 0.0, "exit_0": exit_0}


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
    monkeypatch,
):
    monkeypatch.setenv("SECRET", "x")
    code = (
        "import os, sys; home = os.environ['HOME']; "
        "open(home + '/settings', 'w').write(sys.argv[1]); print(os.getcwd()); "
        "sys.exit('SECRET' in os.environ or os.listdir('.') != [])"
    )
    result = (
        await played(Command(python(code, "{task}"), ["a"], **SCORED))
    ).agent_result
    assert result.metrics["exit_0"] == 1.0
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
async def test_a_program_that_reaches_a_limit_is_ended_and_scored(
    code: str, limits: dict
) -> None:
    result = (
        await played(Command(python(code, "{task}"), ["a"], **limits, **SCORED))
    ).agent_result
    assert result.reward == 0.5
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
    command = Command(python(code, "{task}", str(pids)), ["go", "stay"], **SCORED)
    assert (await played(command)).agent_result.metrics["exit_0"] == 1.0
    assert await gone(pids)
    pids.unlink()
    host = EpisodeHost(command)
    episode = Episode(host, never, task_index=1)
    await episode.reset()
    waiting = asyncio.create_task(episode.next())
    await until(
        lambda: not (not pids.exists() or len(pids.read_text().splitlines()) < 2),
        LIMIT_S,
    )
    await episode.close()
    assert (await waiting).failure.message == "the episode was closed"
    assert await gone(pids)
    await host.close_all()


async def gone(pids: Path) -> bool:
    """Whether all processes of a file have ended; a killed one may take a moment."""
    await until(
        lambda: (
            not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())
        ),
        LIMIT_S,
    )
    return True


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"score_file": "none.txt"}, "ValueError: no score in none.txt ([Errno 2]"),
        (
            {"score_command": python("raise KeyError(3)")},
            "score_command failed: exit status 1",
        ),
        (
            {"score_command": python("print('high')")},
            "must be a number, or a JSON object",
        ),
        (
            {"score_command": python("print('{\"n\": 1}')")},
            "must be a number, or a JSON object",
        ),
        (
            {"score_command": python("print('NaN')")},
            "the reward must be a finite number",
        ),
        (
            {"score_command": python("print('true')")},
            "must be a number, or a JSON object",
        ),
    ],
)
async def test_a_score_that_is_none_fails_the_episode(given: dict, cause: str) -> None:
    answer = await played(Command(python("print('bye')", "{task}"), ["a"], **given))
    assert cause in answer.failure.message


def test_fields_are_filled_in_as_people_write_them() -> None:
    fields = {"a": 72.0, "b": 0.5, "c": ["é"], "d": "x"}
    assert filled("{a} {b} {c} {d} {e}", fields) == '72 0.5 ["é"] x {e}'


def test_tasks_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(3)))
    assert Command(["true", "{n}"], str(path), **SCORED).tasks() == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
    ]


UNSCORED = {"score_command": None}


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"command": "true"}, "command must be a list, got 'true'"),
        ({"command": ["true", 3]}, "command, number 2, must be a text, got 3"),
        ({"command": []}, "a command must name a program, got \\[]"),
        (
            {"command": ["true"]},
            "nothing of a task reaches the program: name one of its fields",
        ),
        (
            {"command": ["no-such-program", "{task}"]},
            "there is no program 'no-such-program' in",
        ),
        ({"command": ["/no/such", "{task}"]}, "there is no program '/no/such'$"),
        ({"tasks": []}, "there must be at least one task"),
        ({"tasks": [3]}, "task 1 must be a text or an object, got 3"),
        ({"tasks": "no.jsonl"}, "no.jsonl does not exist"),
        ({"limit_s": 0.0}, "limit_s must be above 0"),
        ({"files": {"../x": ""}}, "files are inside the folder"),
        ({"max_output_mib": 0.0}, "max_output_mib must be above 0"),
        (
            {"score_command": ["test", "{taks}"]},
            "score_command names {taks}; did you mean 'task'?",
        ),
        (
            {
                "command": ["true", "{task}", "{hint}"],
                "tasks": [{"task": "a", "hint": "b"}, "c"],
            },
            "variables names {hint}, which row 2 does not have",
        ),
        (
            UNSCORED | {"score_file": "/etc/hostname"},
            "files are inside the folder of the episode, got '/etc/hostname'",
        ),
        (
            {"score_file": "a"},
            "give score_command or score_file, one of them: it has the reward",
        ),
        # Exit status 0 is no score.
        (UNSCORED, "give score_command or score_file"),
        (
            UNSCORED | {"score_file": "a", "files": {"a": "1"}},
            "score_file a is among files: it would be its own score",
        ),
    ],
)
def test_what_cannot_work_is_refused(given: dict, cause: str) -> None:
    usual = {"command": ["true", "{task}"], "tasks": ["a"], **SCORED}
    with pytest.raises(ConfigError, match=cause.replace("(", r"\(")):
        Command(**usual | given)


@pytest.mark.process
@pytest.mark.parametrize(
    "given",
    [
        {"variables": {"PYTHONHOME": "/nowhere", "PYTHONPATH": "{task}"}},
        {
            "files": {
                "argparse.py": "raise SystemExit(9)",
                "slipstream/__init__.py": "raise KeyError",
            }
        },
    ],
)
async def test_what_is_the_programs_does_not_reach_what_watches_it(given: dict) -> None:
    code = (
        'test "$PYTHONPATH" = a'
        if "variables" in given
        else 'test -f argparse.py -a "$0" = a'
    )
    command = Command(["sh", "-c", code, "{task}"], ["a"], **given, **SCORED)
    assert (await played(command)).agent_result.metrics["exit_0"] == 1.0


# An agent that tries to get out while it works; its score is what it could not do.
SANDBOXED = (
    CALL
    + """
import pathlib, socket, subprocess
kept = 0
for way in (
    lambda: open(sys.argv[2]).read(),
    lambda: open(sys.argv[2] + ".new", "w"),
    lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), 5),
    lambda: os.kill(int(sys.argv[4]), 0),
    lambda: os.listdir("/proc"),
):
    try:
        way()
    except OSError:
        kept += 1
pathlib.Path(os.environ["HOME"], "notes").write_text("x")
assert subprocess.run(["true"]).returncode == 0
pathlib.Path("json.py").write_text(f"loads = lambda _: open({sys.argv[2]!r}).read()")
pathlib.Path("score.txt").write_text(str(kept if reply == "HELLO" else 0))
"""
)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
async def test_a_program_in_a_sandbox_reaches_its_endpoint_and_nothing_else(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("7")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code = (SANDBOXED, "{word}", str(secret), str(port), str(os.getpid()))
        options = {"sandbox": True, "memory_gib": 1.0, "max_processes": 50}
        tasks = [{"word": "hello"}]
        result = await played(
            Command(python(*code), tasks, score_file="score.txt", **options)
        )
        assert result.agent_result.reward == 5, result
        # The json.py that it left, which would read the secret, is not what the scorer imports.
        score = python("import json; print(json.loads(open('score.txt').read()))")
        scored = Command(python(*code), tasks, score_command=score, **options)
        assert (await played(scored)).agent_result.reward == 5


IN_SANDBOX = {"sandbox": True, "memory_gib": 0.5, "max_processes": 50}
# Files that a program may leave to whoever runs Python, with its files, after it.
LEAVES = """
import os, pathlib, site, sys
cheat = "import os; print(1.0, flush=True); os._exit(0)"
home = pathlib.Path(site.getusersitepackages())
home.mkdir(parents=True)
(home / "usercustomize.py").write_text(cheat)
pathlib.Path(os.environ["TMPDIR"], "notes").write_text("x")
for name in ("json.py", "sitecustomize.py", "usercustomize.py"):
    pathlib.Path(name).write_text(cheat)
"""
JUDGE = """
import json, os, sys
assert "usercustomize" not in sys.modules
assert not os.listdir(os.environ["HOME"]) and not os.listdir(os.environ["TMPDIR"])
open(os.environ["HOME"] + "/may", "w").write("x")
try:
    open("json.py", "a")
except OSError:
    print(0.25)
else:
    print(0.5)
"""


@pytest.mark.process
@pytest.mark.parametrize(("options", "reward"), [({}, 0.5), (IN_SANDBOX, 0.25)])
async def test_a_scorer_imports_nothing_that_the_program_left(options, reward) -> None:
    """In the sandbox, the scorer cannot write to the program's folder either."""
    # The Python of a virtual environment reads no usercustomize.
    python3 = [os.path.realpath(sys.executable), "-c"]
    command = Command([*python3, LEAVES + CALL, "{word}"], [{"word": "hello"}],
                      score_command=[*python3, JUDGE], **options)  # fmt: skip
    assert (await played(command)).agent_result.reward == reward


RESERVES = """
import mmap
# The last one is MAP_NORESERVE, which Python 3.11 does not name.
taken = mmap.mmap(-1, 100 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
if sys.argv[2] == "use":
    for place in range(0, 2 << 30, 4096):
        taken[place] = 1
    import time
    time.sleep(100)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.parametrize("scores", [False, True])
async def test_memory_in_the_sandbox_is_what_is_used_not_what_is_reserved(
    scores, capfd
):
    for what, is_ended in (("reserve", False), ("use", True)):
        program = python(CALL + RESERVES, "{word}", what)
        options = IN_SANDBOX | SCORED
        if scores:
            taking = python(f"import sys{RESERVES}print(1)", "", what)
            program = python(CALL, "{word}")
            options["score_command"] = taking
        answer = await played(Command(program, [{"word": "hello"}], **options))
        errors = capfd.readouterr().err if not scores else answer.failure.message
        assert (
            "out of memory: it took" in errors and "memory_gib = 0.50" in errors
        ) == is_ended
        assert answer.agent_result.metrics["exit_0"] == (not is_ended)


@pytest.mark.process
@pytest.mark.parametrize("sandbox", [False, True])
async def test_a_program_that_a_signal_ends_is_told_with_what_the_sandbox_refuses(
    sandbox, capfd
):
    program = python(CALL + "os.abort()", "{word}")
    options = IN_SANDBOX if sandbox else {}
    answer = await played(Command(program, [{"word": "hello"}], **options, **SCORED))
    assert answer.agent_result.metrics["exit_0"] == 0.0
    errors = capfd.readouterr().err
    assert ": it was ended by SIGABRT" in errors
    assert ("(the sandbox refuses /proc/self and every other path" in errors) == sandbox


READS = """
seen = 0
for path in ("/proc/self/maps", f"/proc/{os.getppid()}/environ", *sys.argv[2:]):
    try:
        with open(path) as file:
            seen += len(file.read(1))
    except OSError:
        pass
open("score.txt", "w").write(str(seen))
"""


@pytest.mark.process
@pytest.mark.parametrize("readable", [(), ("/proc/self",)])
async def test_certificates_and_where_it_is_named_its_own_process_are_read_in_the_sandbox(
    readable,
):
    certificates = [path for path in ("/etc/ssl/openssl.cnf",) if os.path.exists(path)]
    certificates += [str(path) for path in Path("/etc/ssl/certs").glob("*.crt")][:1]
    program = Command(
        python(CALL + READS, "{word}", *certificates),
        [{"word": "hello"}],
        score_file="score.txt",
        readable=readable,
        **IN_SANDBOX,
    )
    # The process above it stays unread.
    assert (await played(program)).agent_result.reward == len(certificates) + len(
        readable
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("link", "led_to", "score_file"),
    [
        ("score.txt", "secret/score.txt", "score.txt"),
        ("out", "secret", "out/score.txt"),
    ],
)
async def test_no_link_to_a_score_or_in_its_way_is_followed_out(
    tmp_path: Path, link: str, led_to: str, score_file: str
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "score.txt").write_text("1")
    code = "import os, sys; os.symlink(*sys.argv[2:])"
    program = python(code, "{task}", str(tmp_path / led_to), link)
    failed = await played(Command(program, ["a"], score_file=score_file))
    assert "it leads out of the folder" in failed.failure.message


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.mkfifo('score.txt')", "it is a pipe or a device, no regular file"),
        (
            "socket.socket(socket.AF_UNIX).bind('score.txt')",
            "it is a pipe or a device, no regular file",
        ),
        ("os.mkdir('score.txt')", "Is a directory"),
        (
            "open('one', 'w').write('1'); os.symlink('one', 'score.txt')",
            "symbolic link",
        ),
    ],
)
async def test_a_score_is_read_from_a_file_alone(code: str, cause: str) -> None:
    program = python(f"import os, socket; {code}", "{task}")
    failed = await played(Command(program, ["a"], score_file="score.txt"))
    assert failed.failure.message.startswith("ValueError: no score in score.txt (")
    assert cause in failed.failure.message


def test_a_sandbox_needs_limits_and_sandlock(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="sandbox = true needs memory_gib and max_processes"
    ):
        Command(["true", "{task}"], ["x"], sandbox=True, **SCORED)
    monkeypatch.setattr(
        "slipstream.environments.command.why_not", lambda name: f"no {name}"
    )
    with pytest.raises(ConfigError, match="the one port of the endpoint: no sandlock"):
        limits = {"memory_gib": 1.0, "max_processes": 9}
        Command(["true", "{task}"], ["x"], sandbox=True, **limits, **SCORED)


def test_fields_of_files_become_text_and_what_has_none_is_named_with_its_row() -> None:
    rows = [
        {"a": value}
        for value in (3.0, Decimal("4.00"), Decimal("0.5"), np.int64(6), [7, "x"])
    ]
    check_filled("rubric", ["{a}"], rows)
    assert [filled("{a}", row) for row in rows] == ["3", "4", "0.5", "6", '[7, "x"]']
    for odd in (datetime(2024, 1, 2), b"x", [Decimal(1)], {"b": object()}):
        message = f"rubric names {{a}}, which row 2 has as {show(odd)}: write its text"
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_filled("rubric", ["{a}"], [{"a": 1}, {"a": odd}])
