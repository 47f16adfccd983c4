"""Functions of one's own are proved before a run; the algorithms of deploy/algorithms learn."""

import json
import shutil
from pathlib import Path

import pytest
from slipstream.client.launch.preflight import prove
from slipstream.client.launch.scene import LEARNER, Scene
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.extensions.proofs.launch import check_proofs
from support.fakes import wrong_algorithms
from support.rigs.run_processes import (
    ROOT,
    check_replay,
    checked,
    run_command,
    succeed,
    write_config,
)

pytestmark = pytest.mark.usefixtures("nothing_survives")

OWN = {
    "loss": "deploy.algorithms.gmpo:loss",
    "weight": "deploy.algorithms.dppo:weight",
    "advantage": "deploy.algorithms.gigpo:advantage",
    "filter": "deploy.algorithms.difficulty:filter",
}
WRONG = f"{wrong_algorithms.__name__}:divides_by_length"
# The settings of docs/guides/own-algorithms.md.
SETTINGS: dict[str, dict[str, object]] = {
    "gmpo": {
        "algorithm__loss": "gmpo:loss",
        "algorithm__aggregation": "sequence_mean",
        "algorithm__mini_batches": 4,
    },
    "dppo": {
        "algorithm__weight": "dppo:weight",
        "algorithm__loss": "reinforce",
        "algorithm__mini_batches": 4,
    },
    "top_entropy": {"algorithm__loss": "top_entropy:loss"},
    "covariance": {
        "algorithm__loss": "covariance:kl_cov",
        "algorithm__mini_batches": 4,
    },
    "m2po": {"algorithm__weight": "m2po:weight", "algorithm__loss": "reinforce"},
    "maxrl": {"algorithm__advantage": "maxrl:advantage"},
    "gdpo": {
        "algorithm__advantage": "gdpo:advantage",
        "algorithm__advantage_args": {"metrics": ["right"]},
    },
    "vespo": {"algorithm__weight": "vespo:weight", "algorithm__loss": "reinforce"},
    "oapl": {
        "algorithm__advantage": "oapl:advantage",
        "algorithm__loss": "oapl:loss",
        "algorithm__aggregation": "fixed",
        "algorithm__weight": "none",
    },
    "gigpo": {"algorithm__advantage": "gigpo:advantage"},
    "alp": {"algorithm__reward": "alp:reward", "sampling__max_reply_tokens": 8},
    # Later the task is solved so often that the filter leaves out too many groups.
    "difficulty": {
        "run__steps": 100,
        "algorithm__filter": "difficulty:filter",
        "algorithm__filter_args": {"low": 0.02, "high": 0.98},
    },
}


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of a run, whose functions may be modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    return write_config(tmp_path, tiny_model)


async def test_a_run_proves_its_own_functions(config: Path) -> None:
    settings = load_config(
        config, [f"algorithm.{kind}={json.dumps(name)}" for kind, name in OWN.items()]
    )
    message = f"own functions are proved: {', '.join(sorted(OWN.values()))}"
    assert await check_proofs(Scene(settings, LEARNER)) == message
    wrong = load_config(config, [f"algorithm.loss={json.dumps(WRONG)}"])
    with pytest.raises(
        ConfigError, match=f"^loss {WRONG}: layout: padding: loss of token 0 is "
    ):
        await check_proofs(Scene(wrong, LEARNER))


async def test_a_proof_tells_facts_of_own_functions_alone(config: Path) -> None:
    overrides = [f"algorithm.{kind}={json.dumps(name)}" for kind, name in OWN.items()]
    proved = await prove(load_config(config, overrides))
    assert proved.faults == []
    for kind in ("loss", "weight", "filter"):
        name = f"{kind} {OWN[kind]}: "
        assert [fact for fact in proved.facts if fact.startswith(name)]
    built_in = await prove(load_config(config))
    assert built_in.facts == []


@pytest.mark.long
def test_check_tells_whether_functions_are_proved(config: Path) -> None:
    wrong = f"algorithm.loss={json.dumps(WRONG)}"
    shown = run_command("check", config, wrong, cwd=config.parent, limit_s=300)
    assert shown.returncode == 2
    assert f"slipstream: loss {WRONG}: layout: padding: " in shown.stderr
    right = f"algorithm.loss={json.dumps(OWN['loss'])}"
    shown = run_command("check", config, right, cwd=config.parent, limit_s=300)
    assert shown.stdout.splitlines()[-1] == "the algorithm's functions are proved"
    assert (
        f"loss {OWN['loss']}: on policy a token becomes, of positive advantage "
        in shown.stdout
    )


def copy_algorithms(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS:
        shutil.copy(ROOT / "deploy" / "algorithms" / f"{name}.py", folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_papers_algorithm_learns_and_its_run_can_be_replayed(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    copy_algorithms(tmp_path)
    write_config(tmp_path, tiny_model, **SETTINGS[name])
    succeed("run", "config.toml", cwd=tmp_path, limit_s=600)
    summary = checked(tmp_path / "run")
    assert summary["reward_last"] >= summary["reward_first"] + 0.4
    check_replay(tmp_path / "run", cwd=tmp_path)
