"""The command of Inspect is a program of this test, which leaves a log as Inspect does."""

import json
import sys
from pathlib import Path

import pytest
from slipstream.client.agent import Endpoint
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.inspect_ai import Inspect

ENDPOINT = Endpoint("http://127.0.0.1:1/token", "sk-secret")


def fake_inspect(folder: Path, log: object) -> str:
    """A program that notes its arguments and writes `log`, unless that is None."""
    (folder / "log.json").write_text(json.dumps(log))
    path = folder / "inspect"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "seen = [sys.argv[1:], os.getcwd(), os.environ['SLIPSTREAM_API_KEY']]\n"
        "(folder / 'seen.json').write_text(json.dumps(seen))\n"
        "logs = pathlib.Path(sys.argv[sys.argv.index('--log-dir') + 1])\n"
        "text = (folder / 'log.json').read_text()\n"
        "print('the last words')\n"
        "if text == 'null': sys.exit(3)\n"
        "logs.mkdir()\n"
        "(logs / 'a.json').write_text(text)\n"
    )
    path.chmod(0o755)
    return str(path)


def log(status: str = "success", **scores: dict[str, float]) -> dict:
    made = [
        {"name": name, "metrics": {key: {"value": value} for key, value in metrics.items()}}
        for name, metrics in scores.items()
    ]
    return {"status": status, "error": {"message": "it broke"}, "results": {"scores": made}}


@pytest.mark.process
async def test_the_command_of_a_user_runs_beside_the_task_and_its_scores_are_metrics(
    tmp_path: Path,
) -> None:
    (tmp_path / "sums.py").touch()
    program = fake_inspect(tmp_path, log(match={"accuracy": 0.5, "stderr": 0.1}))
    evaluation = Inspect(
        f"{tmp_path}/sums.py@hard",
        samples=5,
        samples_per_episode=2,
        inspect=program,
        options=["-T", "level=2"],
        log_dir=str(tmp_path / "kept"),
    )
    assert evaluation.tasks() == [(1, 2), (3, 4), (5, 5)]
    outcome = await evaluation.run((3, 4), ENDPOINT)
    assert (outcome.reward, outcome.metrics) == (0.5, {"accuracy": 0.5, "stderr": 0.1})
    arguments, folder, key = json.loads((tmp_path / "seen.json").read_text())
    assert arguments[:4] == ["eval", "sums.py@hard", "-T", "level=2"]
    assert arguments[4:8] == [
        *("--model", "openai-api/slipstream/policy"),
        *("--model-base-url", "http://127.0.0.1:1/token/v1"),
    ]
    assert arguments[8:10] == ["--limit", "3-4"]
    assert (folder, key) == (str(tmp_path), "sk-secret")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a.json"]


@pytest.mark.process
async def test_several_scorers_are_told_apart_and_one_is_the_reward(tmp_path: Path) -> None:
    program = fake_inspect(tmp_path, log(**{"match": {"mean": 0.5}, "f 1": {"mean": 0.25}}))
    both = {"match_mean": 0.5, "f_1_mean": 0.25}
    outcome = await Inspect("p/t", samples=1, inspect=program).run((1, 1), ENDPOINT)
    assert (outcome.reward, outcome.metrics) == (0.5, both)
    chosen = Inspect("p/t", samples=1, inspect=program, reward="f_1_mean")
    assert (await chosen.run((1, 1), ENDPOINT)).reward == 0.25
    other = Inspect("p/t", samples=1, inspect=program, reward="mean")
    with pytest.raises(ValueError, match="no metric 'mean'; its metrics are: match_mean, f_1_mean"):
        await other.run((1, 1), ENDPOINT)


@pytest.mark.process
@pytest.mark.parametrize(
    ("left", "cause"),
    [
        (log("error"), "inspect eval ended as error: it broke"),
        ({"status": "cancelled"}, "inspect eval ended as cancelled: exit status 0: the last words"),
        (None, "inspect left no log after exit status 3: the last words"),
    ],
)
async def test_an_evaluation_without_success_fails(
    tmp_path: Path, left: object, cause: str
) -> None:
    evaluation = Inspect("p/t", samples=1, inspect=fake_inspect(tmp_path, left))
    with pytest.raises(RuntimeError, match=cause):
        await evaluation.run((1, 1), ENDPOINT)


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"inspect": "no-such-inspect"}, "there is no program 'no-such-inspect': pip install"),
        ({"inspect": sys.executable, "samples": 0}, "must be at least 1, got 0 and 16"),
        ({"inspect": sys.executable, "task": "none.py@a"}, "task none.py does not exist"),
    ],
)
def test_arguments_that_cannot_work_are_refused(args: dict, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        Inspect(**{"task": "p/t", "samples": 1, **args})
