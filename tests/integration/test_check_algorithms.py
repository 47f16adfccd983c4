"""`slipstream check` proves functions, alone and by training a tiny model in several layouts."""

import json
from pathlib import Path

import pytest
from slipstream.client.launch.findings import LEARNER, Scene
from slipstream.client.launch.preflight import PROOF_LIMIT_S, check_proofs
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from support.fakes import wrong_algorithms
from support.rigs.run_processes import run_command, succeed, write_config

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_survives")]

OWN = {
    "loss": "deploy.algorithms.gmpo:loss",
    "weight": "deploy.algorithms.dppo:weight",
    "advantage": "deploy.algorithms.gigpo:advantage",
    "filter": "deploy.algorithms.difficulty:filter",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings whose functions were never proved; modules of the tests can be imported.

    A TransformerEngine is installed, but the proof hides the GPU that it needs.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}:{tmp_path / 'packages'}")
    engine = tmp_path / "packages" / "transformer_engine"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text("raise RuntimeError('no GPU')\n")
    return write_config(tmp_path, tiny_model)


async def test_functions_are_proved_once_for_a_source(config: Path) -> None:
    overrides = [f"algorithm.{kind}={json.dumps(name)}" for kind, name in OWN.items()]
    shown = succeed("check", config, *overrides, cwd=config.parent, limit_s=PROOF_LIMIT_S)
    lines = shown.stdout.splitlines()
    assert lines[-1] == (
        "a tiny model is trained alike with one rank, small micro batches, shared prefixes, "
        "order of episodes, tp 2, pp 2, cp 2"
    )
    for kind, name in OWN.items():
        assert f"{kind} {name}: proved" in lines
    (known,) = (config.parent / "cache" / "slipstream" / "proved").iterdir()
    before = known.stat().st_mtime_ns
    said = "the algorithm's own functions are proved"
    assert await check_proofs(Scene(load_config(config, overrides), LEARNER)) == said
    # Another proof would have written the file again.
    assert known.stat().st_mtime_ns == before


def test_a_loss_that_differs_between_ranks_is_refused_by_check_and_run(config: Path) -> None:
    loss = f"algorithm.loss={json.dumps(f'{wrong_algorithms.__name__}:depends_on_the_rank')}"
    shown = run_command("check", config, loss, cwd=config.parent, limit_s=PROOF_LIMIT_S)
    assert shown.returncode == 2
    faults = [line for line in shown.stderr.splitlines() if line.startswith("slipstream: ")]
    for line, layout in zip(faults, ("tp 2", "pp 2", "cp 2"), strict=True):
        assert line.startswith(f"slipstream: a run with {layout}: loss of step 1 differs by ")


@pytest.mark.slow
async def test_a_loss_that_reads_the_rank_is_refused(config: Path) -> None:
    wrong = load_config(config, [f"algorithm.loss='{wrong_algorithms.__name__}:reads_the_rank'"])
    with pytest.raises(ConfigError, match="^a run with tp 2: loss of step 1 differs by "):
        await check_proofs(Scene(wrong, LEARNER))


async def test_a_run_is_refused_with_the_first_fault(config: Path) -> None:
    name = f"{wrong_algorithms.__name__}:divides_by_length"
    wrong = load_config(config, [f"algorithm.loss={json.dumps(name)}"])
    with pytest.raises(ConfigError, match=f"^loss {name}: layout: padding: loss of token 0 is "):
        await check_proofs(Scene(wrong, LEARNER))
