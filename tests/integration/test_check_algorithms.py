"""`slipstream check` and the start of a run prove functions of one's own."""

import json
from pathlib import Path

import pytest
from slipstream.client.launch.findings import LEARNER, Scene
from slipstream.client.launch.preflight import check_proofs
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from support.fakes import wrong_algorithms
from support.rigs.run_processes import run_command, write_config

pytestmark = pytest.mark.usefixtures("nothing_survives")

OWN = {
    "loss": "deploy.algorithms.gmpo:loss",
    "weight": "deploy.algorithms.dppo:weight",
    "advantage": "deploy.algorithms.gigpo:advantage",
    "filter": "deploy.algorithms.difficulty:filter",
}
WRONG = f"{wrong_algorithms.__name__}:divides_by_length"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of a run, whose functions may be modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    return write_config(tmp_path, tiny_model)


async def test_a_run_proves_its_own_functions(config: Path) -> None:
    own = load_config(
        config, [f"algorithm.{kind}={json.dumps(name)}" for kind, name in OWN.items()]
    )
    said = f"own functions are proved: {', '.join(sorted(OWN.values()))}"
    assert await check_proofs(Scene(own, LEARNER)) == said
    wrong = load_config(config, [f"algorithm.loss={json.dumps(WRONG)}"])
    with pytest.raises(ConfigError, match=f"^loss {WRONG}: layout: padding: loss of token 0 is "):
        await check_proofs(Scene(wrong, LEARNER))


@pytest.mark.long
def test_check_tells_whether_functions_are_proved(config: Path) -> None:
    wrong = f"algorithm.loss={json.dumps(WRONG)}"
    shown = run_command("check", config, wrong, cwd=config.parent, limit_s=300)
    assert shown.returncode == 2
    assert f"slipstream: loss {WRONG}: layout: padding: " in shown.stderr
    right = f"algorithm.loss={json.dumps(OWN['loss'])}"
    shown = run_command("check", config, right, cwd=config.parent, limit_s=300)
    assert shown.stdout.splitlines()[-1] == "the algorithm's functions are proved"
