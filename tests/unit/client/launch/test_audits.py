"""What `slipstream check` prints of environments and of prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.client.launch.audits import audit_all, audit_class
from slipstream.client.launch.preflight import audit_command
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import EvaluationSection
from slipstream.learner.trainer.tiny_model import make_tokenizer
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import make_model_folder

pytestmark = pytest.mark.process
QUESTIONS = "slipstream.environments.questions:Questions"
FIRST_SYSTEM = (
    "{{ messages[0]['content'] }}{% for m in messages[1:] if m['role'] != 'system' %} "
    "{{ m['content'] }}{% endfor %}"
)


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Makes the settings of a run that asks rows with a judge, below the template above."""
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(FIRST_SYSTEM)

    def make(rows: list[dict], **sampling: int) -> Config:
        (tmp_path / "rows.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows)
        )
        args = {"path": "rows.jsonl", "question": "prompt", "judge": "exact"}
        section = {"name": "sums", "reference": QUESTIONS, "args": args}
        config = small_config(environments=[section], sampling=sampling)
        model = config.model.model_copy(update={"path": tmp_path / "model"})
        return config.model_copy(update={"model": model})

    return make


def lines_of(shown: str) -> list[str]:
    """The lines but those that a busy machine adds."""
    return [
        line
        for line in shown.splitlines()
        if "is audited, each call within" not in line
    ]


def row(answer: str, *messages: tuple[str, str]) -> dict:
    prompt = [{"role": role, "content": content} for role, content in messages]
    return {"prompt": prompt, "answer": answer}


@pytest.mark.long
async def test_prompts_are_counted_and_what_the_template_leaves_out_is_told(
    asking, capsys
):
    rows = [
        row("a", ("user", "b c")),
        row("b", ("user", "c d e")),
        row("c", ("user", "d e"), ("user", "g h i j k")),
        row("d", ("user", "d e"), ("system", "f"), ("user", "g")),
    ]
    assert await audit_all(asking(rows, max_prompt_tokens=5)) == 0
    shown = capsys.readouterr()
    title, _, right, *_ = lines_of(shown.out)
    assert title.startswith("sums: 4 tasks, 4 of them played, in ")
    assert right.split() == ["the", "right", "answer", "4", "1", "yes"]
    *_, tokens, dropped, longer, ready = shown.out.splitlines()
    assert tokens == "  tokens of a prompt: least 2, median 3, most 7 of at most 5"
    assert dropped.startswith(
        "  ! 1 of 4 prompts cannot be written: the chat template leaves out a message of role"
    )
    assert longer.startswith("  ! 1 of 4 prompts have more than 5 tokens")
    assert (ready, shown.err) == ("  ready", "")


async def test_a_message_that_spells_a_special_token_is_told(asking, capsys):
    rows = [row("a", ("user", "b </s> c")), row("b", ("user", "c d e"))]
    assert await audit_all(asking(rows)) == 0
    message = (
        "  ! 1 of 2 prompts have a message that spells </s>: the model reads that token"
    )
    assert message in capsys.readouterr().out.splitlines()


async def test_tools_that_the_template_does_not_write_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_folder(tmp_path / "model")
    monkeypatch.chdir(Path(__file__).parents[3] / "support" / "fakes")
    looking = "example_tools:Looking"
    assert await audit_class(looking, [], python="", timeout_s=60.0, model=model) == 0
    *_, line, _ = capsys.readouterr().out.splitlines()
    assert line == (
        f"  ! 20 of 20 prompts offer tools, but the chat template in {model} writes no tools, so "
        "that the model never sees those that it is offered: name one that writes them in "
        "rollout_server.chat_template, or describe them in messages"
    )


async def test_a_value_that_the_template_does_not_read_is_no_prompt(
    asking, capsys
) -> None:
    config = asking([row("a", ("user", "b c"))])
    (section,) = config.environments
    section = section.model_copy(update={"chat_template_kwargs": {"think": False}})
    assert await audit_all(config.model_copy(update={"environments": (section,)})) == 2
    message = "chat_template_kwargs: the chat template does not read 'think'"
    assert f"most prompts cannot be written: {message}" in capsys.readouterr().err


@pytest.mark.long
async def test_tasks_that_are_trained_and_measured_are_told(asking, capsys):
    config = asking([row(letter, ("user", f"{letter} b")) for letter in "cde"])
    (section,) = config.environments
    evaluation_section = EvaluationSection(
        name="held",
        reference=QUESTIONS,
        args=section.args | {"shuffle_seed": 1, "limit": 2},
    )
    assert (
        await audit_all(
            config.model_copy(update={"evaluations": (evaluation_section,)})
        )
        == 0
    )
    message = "! 2 of 2 tasks of held that were looked at are trained on too, in sums"
    assert capsys.readouterr().out.splitlines()[-1] == message


def test_the_episodes_of_a_step_are_shared_by_the_workers(
    asking: Callable[..., Config],
) -> None:
    config = asking([row("a", ("user", "b c"))], max_turns=1)
    (section,) = config.environments
    algorithm = config.algorithm
    servers = config.rollout_server.count
    section = section.model_copy(update={"num_workers": 2})
    command = audit_command(section, config)
    limits = json.loads(command[command.index("--limits") + 1])
    number = limits["num_episodes"]
    episodes = algorithm.groups_per_step * algorithm.group_size / (2 * servers)
    assert episodes <= number < episodes + 1
    # The warning of an agent's second call goes by this limit.
    assert limits["max_turns"] == config.sampling.max_turns == 1


async def test_no_prompt_of_an_agent_is_written_since_its_calls_have_the_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_folder(tmp_path / "model")
    monkeypatch.chdir(Path(__file__).parents[3] / "support" / "fakes")
    reference = "agents_for_checks:Calls"
    assert await audit_class(reference, [], python="", timeout_s=60.0, model=model) == 0
    shown = capsys.readouterr()
    title, ready = lines_of(shown.out)
    assert title.startswith(
        f"{reference}: 2 tasks, the first call is POST /v1/chat/completions, "
    )
    assert (ready, shown.err) == ("  ready", "")


async def test_an_environment_that_cannot_be_meant_is_refused_after_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3] / "data" / "audit")
    code = await audit_class(
        "audit_environments:BadClock", [], python="", timeout_s=60.0, model=None
    )
    shown = capsys.readouterr()
    assert code == 2
    title = lines_of(shown.out)[0]
    assert title.startswith("audit_environments:BadClock: 12 tasks, 12 of them played")
    assert shown.err.startswith(
        "slipstream: audit_environments:BadClock: 12 of 12 tasks, such as "
    )
    assert len(shown.err.splitlines()) == 1


async def test_tasks_that_differ_between_processes_are_refused(
    tmp_path, monkeypatch, capsys
):
    code = (
        "import os\n"
        "from slipstream.environments.echo import Echo\n"
        "class Differing(Echo):\n"
        "    def tasks(self):\n"
        "        return [(chr(97 + os.getpid() % 12), str(os.getpid()))]\n"
    )
    (tmp_path / "differing.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert (
        await audit_class(
            "differing:Differing", [], python="", timeout_s=60.0, model=None
        )
        == 2
    )
    assert "tasks() gives other tasks in another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "os._exit(0)",
            "it has ended its process by os._exit(0) (leaving.py:3 in <module>)",
        ),
        (
            "os._exit(3)",
            "it has ended its process by os._exit(3) (leaving.py:3 in <module>)",
        ),
        (
            "os.kill(os.getpid(), 9)",
            "its process was ended by SIGKILL in the middle of its check",
        ),
        (
            "ctypes.CDLL(None)._exit(0)",
            "its process ended itself with exit code 0 in the middle of its check",
        ),
    ],
)
async def test_an_environment_that_ends_its_process_is_one_line(
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "leaving.py").write_text(
        f"import ctypes, os\nprint('loaded')\n{line}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert (
        await audit_class("leaving:X", [], python="", timeout_s=60.0, model=None) == 2
    )
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "loaded"
    assert shown[-1] == f"environment leaving:X: {said}"


async def test_a_fork_of_an_environment_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os\nfrom slipstream.environments.echo import Echo\n"
        "os.fork() or os._exit(0)\nassert os.wait()[1] == 0\n"
    )
    (tmp_path / "forking.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert (
        await audit_class("forking:Echo", [], python="", timeout_s=60.0, model=None)
        == 0
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line", ["sys.stdout.close()", "sys.stdout = sys.stderr = None"]
)
async def test_what_an_environment_does_to_its_output_does_not_end_its_check(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "import sys\nfrom slipstream.environments.echo import Echo\nprint('loaded', end='')\n"
    (tmp_path / "closing.py").write_text(f"{code}{line}\nprint('more')\n")
    monkeypatch.chdir(tmp_path)
    assert (
        await audit_class("closing:Echo", [], python="", timeout_s=60.0, model=None)
        == 0
    )
    shown = capsys.readouterr()
    assert lines_of(shown.out)[-1] == "  ready"
    assert shown.err.splitlines() == ["loadedmore" if "close" in line else "loaded"]


async def test_the_end_of_a_check_by_an_error_of_python_names_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os\nfrom slipstream.environments.echo import Echo\nos.closerange(3, 256)\n"
    (tmp_path / "closing.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert (
        await audit_class("closing:Echo", [], python="", timeout_s=60.0, model=None)
        == 2
    )
    *_, error, last = capsys.readouterr().err.splitlines()
    assert error == "OSError: [Errno 9] Bad file descriptor"
    assert last.startswith(
        "environment closing:Echo: its check broke off: OSError: [Errno 9] Bad"
    )


async def test_an_environment_that_cannot_be_loaded_is_one_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert (
        await audit_class("no_such:X", [], python="", timeout_s=60.0, model=None) == 2
    )
    with pytest.raises(
        ConfigError, match=r"got models/none, which does not exist below"
    ):
        await audit_class(
            "no_such:X", [], python="", timeout_s=60.0, model=Path("models/none")
        )
    shown = capsys.readouterr()
    assert (lines_of(shown.out), len(shown.err.splitlines())) == ([], 1)
    assert "there is no module 'no_such'" in shown.err


async def test_an_environment_of_which_no_prompt_fits_is_refused(
    asking, capsys
) -> None:
    rows = [row("a", ("user", "b c d")), row("b", ("user", "c d e"))]
    assert await audit_all(asking(rows, max_prompt_tokens=2)) == 2
    shown = capsys.readouterr()
    message = "sums: none of 2 prompts fits: all have more than 2 tokens"
    assert (shown.err, "  ready" in shown.out.splitlines()) == (
        f"slipstream: {message}\n",
        False,
    )


@pytest.mark.parametrize(
    ("episodes", "workers", "at_once"), [(1, 1, 1), (4, 4, 1), (5, 4, 2)]
)
def test_a_worker_plays_its_share_of_the_episodes_at_one_time(
    episodes: int, workers: int, at_once: int
) -> None:
    environment = {"name": "e", "reference": "m:E", "num_workers": workers}
    config = small_config(
        environments=[environment],
        algorithm={"group_size": 1, "groups_per_step": 4, "advantage": "reinforce_pp"},
        rollout_server={"max_episodes": episodes, "count": 2},
    )
    limits = audit_command(config.environments[0], config)
    limits = json.loads(limits[limits.index("--limits") + 1])
    assert (limits["at_once"], limits["in_all"]) == (at_once, 2 * episodes)
    assert not limits["compares"]
