"""Runs that a program of Python starts with its own environments, as a notebook does."""

import asyncio
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import slipstream
from slipstream.client import ResetResult, started_run
from slipstream.client.client import NoController
from slipstream.core.errors import ConfigError, EnvironmentFailed, RunFailed
from slipstream.core.machine.files import remove_abandoned
from slipstream.core.template_values import NEED_PARSER
from slipstream.environments.questions import Questions
from support.fakes.example_environments import Repeat
from support.fakes.page_reader import BLOCK
from support.rigs.run_processes import QUICKSTART, ROOT, descendants, describe
from support.rigs.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.usefixtures("nothing_survives")

ROWS = [{"question": f"What is {n} + {n}?", "sum": 2 * n} for n in range(20)]
QUICK = (sys.executable, "-m", "support.fakes.quick_run", "started")


def reward(reply: str, row: dict[str, int]) -> float:
    return float(str(row["sum"]) in reply)


def settings(folder: Path, model: Path, steps: int) -> dict[str, object]:
    table = tomllib.loads(QUICKSTART.read_text())
    del table["environments"], table["evaluations"]
    table["algorithm"] |= {"group_size": 4, "groups_per_step": 4}
    return table | {"run": {"steps": steps, "dir": folder}, "model": {"path": model}}


@pytest.fixture
def quick(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> dict[str, object]:
    """Settings of 10,000 steps, for runs with stand-ins for an engine and a trainer's step."""
    monkeypatch.setattr(started_run, "COMMAND", QUICK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    table = settings(tmp_path, tiny_model, 10_000)
    table["learner"] |= {"export_final": False}
    return table


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    started_run.end_all()


def commands() -> list[psutil.Process]:
    return [
        descendant
        for descendant in descendants(os.getpid())
        if "quick_run started" in describe(descendant)
    ]


@pytest.mark.long
async def test_rows_come_while_a_run_asks_questions_of_this_process(
    quick, tmp_path, capfd, monkeypatch
) -> None:
    threads = set()
    # Engines start beside each other: each of these waits for the other.
    monkeypatch.setenv("QUICK_TOGETHER", "2")
    quick["rollout_server"] |= {"count": 2}

    def judge(reply: str, row: dict[str, int]) -> float:
        threads.add(threading.current_thread().name)
        return reward(reply, row)

    table = {
        "reference": Questions(ROWS, judge=judge),
        "name": "sums",
        "timeout_s": 20.0,
    }
    # A notebook has a running event loop, too.
    quick["run"]["steps"] = 5
    run = slipstream.run(environments=table, **quick)
    assert run.folder == tmp_path / "tiny-sums"
    assert [row["step"] for row in run if "reward_mean" in row] == [1, 2, 3, 4, 5]
    assert run.wait()["state"] == "finished"
    assert list(run) == []
    assert len(list(run.folder.glob("engine-*"))) == 2
    assert threads == {"slipstream"}
    assert run.page.is_file()
    assert "step 5/5" in capfd.readouterr().out
    run.stop()
    with pytest.raises(
        ConfigError, match="is finished with 5 steps; raise run.steps to go on"
    ):
        run.resume()
        run.wait()


@pytest.mark.long
def test_settings_that_have_changed_since_the_last_start_of_a_run_are_told(
    quick, capfd
) -> None:
    quick["run"] |= {"steps": 2}
    quick["algorithm"] |= {"learning_rate": 1e-3}
    slipstream.run(environments=[Repeat], **quick).wait()
    assert "changed since" not in capfd.readouterr().out
    quick["run"]["steps"] = 3
    # The run chooses the same one: that is no change.
    del quick["algorithm"]["learning_rate"]
    quick["sampling"] |= {"stop": ["b"]}
    slipstream.run(environments=[Repeat], **quick).wait()
    begin = "changed since the run's last start: "
    lines = [
        line for line in capfd.readouterr().out.splitlines() if line.startswith(begin)
    ]
    assert lines == [
        f"{begin}run.steps is 3, was 2",
        f'{begin}sampling.stop is ["b"], was []',
    ]


@pytest.mark.long
def test_a_stopped_run_is_resumed_and_yields_what_comes_then(
    quick, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick["run"]["dir"] = "runs"
    run = slipstream.run(environments=[Repeat], show=False, **quick)
    rows = iter(run)
    # Paths are those of the cell that started the run.
    monkeypatch.chdir("/")
    first = next(rows)
    monkeypatch.chdir(tmp_path)
    assert run.status().state == "running"
    with pytest.raises(
        ConfigError, match="is a run that goes on; stop it before it is resumed"
    ):
        run.resume()
    with pytest.raises(ConfigError, match="is written by a run that goes on"):
        slipstream.run(environments=[Repeat], show=False, **quick).wait()
    run.stop()
    *_, last = rows
    assert last["step"] >= first["step"]
    assert run.wait()["state"] == "stopped"
    assert not commands()
    monkeypatch.chdir("/")
    run.resume()
    with run:
        assert next(iter(run))["step"] > first["step"]
    assert not commands()


@pytest.mark.long
def test_the_end_of_a_failed_run_says_what_its_log_says(quick) -> None:
    def wrong(reply: str) -> float:
        raise ValueError("no judge today")

    quick["controller"] = {"max_failed_groups": 1}
    quick["run"]["audit"] = "tell"
    run = slipstream.run(
        environments=Questions(ROWS, answer="sum", judge=wrong), **quick
    )
    cause = r"no environment is left: questions: .*ValueError: no judge today \(test_started_run.py"
    for _ in range(2):
        with pytest.raises(RunFailed, match=cause):
            list(run)


def test_what_cannot_work_is_refused_before_anything_starts(quick) -> None:
    def refusal(environments: object = Repeat, **changes: object) -> str:
        with pytest.raises(ConfigError) as caught:
            slipstream.run(environments=environments, **(quick | changes))
        return str(caught.value)

    assert refusal(run={"steps": 3, "stepz": 3}) == (
        "slipstream.run: unknown key 'run.stepz'; did you mean 'steps'?"
    )
    assert refusal(model={"path": None}) == (
        "slipstream.run: model: path must be a text, number, list or table, got None"
    )
    assert "Questions(rows, judge=function)" in refusal(reward)
    assert (
        refusal([])
        == "slipstream.run: environments is an empty list: name an environment"
    )
    assert "has no option python, only name," in refusal(
        {"reference": Repeat, "python": "x"}
    )
    assert "args are for a class, got" in refusal(
        {"reference": Repeat(3), "args": {"a": 1}}
    )

    assert "write steps into the table run" in refusal(**{"run.steps": 3})
    assert "environments" in (twice := refusal([Repeat, Repeat])) and "repeat" in twice
    assert "environments.0.weight: input should be greater than 0, got -1" in refusal(
        {"reference": Repeat, "weight": -1}
    )

    numbers = dict.fromkeys(("4", 1.5, True, float("nan"), None), "a whole number")
    numbers |= {0: "at least 1", -1: "at least 1", 2**31: "at most 2147483647"}
    for number, rule in numbers.items():
        assert refusal({"reference": Repeat, "episodes": number}) == (
            f"slipstream.run: environments: episodes of repeat must be {rule}, got {number!r}"
        )
    # A number of numpy is refused for its size alone.
    assert "must be at least 1, got 0" in refusal(
        {"reference": Repeat, "episodes": np.int64(0)}
    )

    class Needs(Repeat):
        def __init__(self, letters: str) -> None:
            self.letters = letters

    missing = "slipstream.run: environments: args of Needs: missing a required argument: 'letters'"
    assert refusal(Needs) == missing
    assert "unexpected keyword argument 'x'" in refusal(
        {"reference": Needs, "args": {"letters": "a", "x": 1}}
    )

    class Empty(Repeat):
        def tasks(self) -> list[int]:
            return []

    with pytest.raises(EnvironmentFailed, match="gives no task"):
        slipstream.run(environments=Empty, **quick)
    assert not commands()


def test_what_a_check_refuses_is_refused_before_anything_starts(quick, capfd) -> None:
    def refusal(environment: object) -> str:
        with pytest.raises(ConfigError) as caught:
            slipstream.run(environments=environment, **quick)
        return str(caught.value)

    def wrong(reply: str) -> float:
        raise ValueError("no judge today")

    class Drawn(Repeat):
        def reset(self, task: str) -> list[dict[str, str]]:
            return [{"role": "user", "content": str(next(numbers))}]

    class Tools(Repeat):
        def reset(self, task: str) -> ResetResult:
            tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
            messages = [{"role": "user", "content": task}]
            return ResetResult(messages, tools=[{"type": "function", "function": tool}])

    numbers = itertools.count()
    judged = Questions(ROWS, answer="sum", judge=wrong)
    assert refusal(judged).startswith(
        "environment questions: ValueError: no judge today (test_"
    )
    twice = (
        r"environment drawn: .*begin otherwise when they are reset twice with one seed"
    )
    assert re.match(twice, refusal(Drawn))
    assert refusal(Tools) == f"environment tools: {NEED_PARSER}"
    assert not commands()
    capfd.readouterr()


@pytest.mark.parametrize("kind", ["awaits", "blocks"])
def test_an_environment_whose_first_call_does_not_end_is_named(
    quick, monkeypatch, kind
) -> None:
    class Awaits(Repeat):
        async def reset(self, task: str) -> list[dict[str, str]]:
            return await asyncio.Future()

    class Blocks(Repeat):
        def reset(self, task: str) -> list[dict[str, str]]:
            released.wait()
            return []

    released = threading.Event()
    monkeypatch.setattr(started_run, "SLOW_S", 0.01)
    table = {"reference": {"awaits": Awaits, "blocks": Blocks}[kind], "timeout_s": 0.1}
    says = f"environment {kind}: its check did not end within 0.4 s"
    try:
        with pytest.raises(ConfigError, match=says) as caught:
            slipstream.run(environments=table, **quick)
        if kind == "blocks":
            assert "test_started_run.py" in str(caught.value)
            assert str(caught.value).endswith("in reset)")
    finally:
        released.set()
    assert not commands()


@pytest.mark.long
def test_an_interrupted_cell_stops_its_run_in_order(quick) -> None:
    def judge(reply: str) -> float:
        # The first episode of the run itself.
        if started and not interrupted:
            # Linux may give a signal of the process to any thread: here to one that does not wait.
            interrupted.append(
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            )
        return 0.0

    started: list[slipstream.Run] = []
    interrupted: list[None] = []
    # A program in the background of a shell ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = slipstream.run(
            environments=Questions(ROWS, answer="sum", judge=judge), **quick
        )
        started.append(run)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not commands()
    assert run.wait()["state"] == "stopped"


@pytest.mark.long
def test_an_environment_that_blocks_its_thread_holds_up_no_end_of_its_run(
    quick, monkeypatch
) -> None:
    def judge(reply: str) -> float:
        if started:
            blocked.set()
            released.wait()
        return 0.0

    monkeypatch.setattr(started_run, "BLOCKED_S", 0.1)
    started: list[slipstream.Run] = []
    blocked = threading.Event()
    released = threading.Event()
    table = {"reference": Questions(ROWS, answer="sum", judge=judge), "timeout_s": 5.0}
    run = slipstream.run(environments=table, **quick)
    started.append(run)
    stopping = threading.Thread(target=run.stop)
    try:
        assert blocked.wait(LIMIT_S)
        with pytest.raises(NoController, match="blocks the thread"):
            run.status()
        with pytest.warns(match="an environment was not closed within 0.1 s"):
            stopping.start()
            stopping.join(LIMIT_S)
        assert not (stopping.is_alive() or commands())
        # The environments of a later run have another thread.
        quick["run"]["name"] = "later"
        with slipstream.run(environments=Repeat, **quick) as later:
            assert next(iter(later))["step"] == 1
    finally:
        released.set()


@pytest.mark.long
def test_a_handle_that_nobody_has_any_more_ends_its_run(quick) -> None:
    run = slipstream.run(environments=Repeat, **quick)
    next(iter(run))
    assert commands()
    del run
    gc.collect()
    wait_until(lambda: not commands(), LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize("end", ["raise ValueError", "os.kill(os.getpid(), 9)"])
def test_a_program_that_ends_leaves_no_process_and_no_file(
    quick, tmp_path: Path, tiny_model, end, monkeypatch
) -> None:
    # Sockets are not made in a longer path.
    temporary = tempfile.TemporaryDirectory(prefix="t")
    monkeypatch.setenv("TMPDIR", temporary.name)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import os
            from pathlib import Path
            import slipstream
            from integration.test_started_run import QUICK, Repeat, settings
            from slipstream.client import started_run

            started_run.COMMAND = QUICK
            given = settings(Path({str(tmp_path)!r}), Path({str(tiny_model)!r}), 10_000)
            run = slipstream.run(environments=Repeat, show=False, **given)
            print(next(iter(run))["step"], flush=True)
            {end}
            """
        )
    )
    ended = subprocess.run(
        [sys.executable, program], stdout=subprocess.PIPE, timeout=LIMIT_S
    )
    assert ended.stdout == b"1.0\n"
    for command in commands():
        # The run became a child of this process.
        command.wait(LIMIT_S)
    # The next run of this user removes what a killed one has left.
    monkeypatch.setattr(tempfile, "tempdir", temporary.name)
    remove_abandoned()
    with temporary:
        assert os.listdir(temporary.name) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "is_real",
    [
        pytest.param(False, marks=pytest.mark.long),
        pytest.param(True, marks=pytest.mark.slow),
    ],
)
def test_the_cells_of_the_page_from_a_notebook_run(
    tmp_path, tiny_model, quick, is_real
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    page = (ROOT / "docs" / "guides" / "notebook.md").read_text()
    cells = [block[2] for block in BLOCK.finditer(page) if block[1] == "python"]
    if not is_real:
        start = f"from slipstream.client import started_run\nstarted_run.COMMAND = {QUICK}\n"
        cells.insert(0, start)
    # The command writes its lines to the same place as the cells, also into the middle of theirs.
    cells.insert(0, "import sys\nsys.stdout = open('said', 'w')\n")
    (tmp_path / "cells.py").write_text("\n".join(cells))
    subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, check=True, timeout=800)
    message = (tmp_path / "said").read_text().splitlines()
    assert [
        line.split()[0] for line in message if re.fullmatch(r"\d\.0 [\d.]+", line)
    ] == [f"{step}.0" for step in range(1, 6)]
    assert [line for line in message if line.startswith("finished ")]
    first, second = (float(line) for line in message if re.fullmatch(r"\d+\.0", line))
    assert 5 < first <= second
