"""The smallest configuration there is runs on this machine, on CPUs or on a GPU."""

import shutil
import tomllib

import pytest
from slipstream.client.launch.placement import uses_gpus
from support.rigs.run_processes import checked, succeed
from support.rigs.smallest_run import own_settings, run_smallest

pytestmark = pytest.mark.usefixtures("nothing_survives")


ARITHMETIC = "deploy.environments.arithmetic:Arithmetic"


@pytest.mark.long
def test_a_run_chooses_all_but_model_environment_and_steps(
    tmp_path, tiny_model, monkeypatch
):
    # A user's shell does not set it; `make test` does.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    settings = own_settings(tmp_path, tiny_model)
    start = (f"--model={tiny_model}", f"--environment={ARITHMETIC}", "--steps=3")
    run = succeed("run", *start, *settings[1:], limit_s=500)
    folder = tmp_path / f"{tiny_model.name}-arithmetic"
    summary = checked(folder)
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    assert f"chosen for {tiny_model}: algorithm.learning_rate 0.001, " in run.stdout
    table = tomllib.loads((folder / "config.toml").read_text())
    assert table["algorithm"]["group_size"] == 8
    assert "algorithm.group_size" in table["automatic"]


@pytest.mark.slow
@pytest.mark.skipif(uses_gpus(), reason="GPUs compile by default")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_an_engine_on_a_cpu_compiles_where_it_is_asked_for(
    tmp_path, tiny_model, monkeypatch
):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    compiled = ("rollout_server.enforce_eager=false", "model.dtype=float32")
    # A probe of every publish: what was compiled computes with the new weights.
    summary, _ = run_smallest(tmp_path, tiny_model, *compiled, "weights.verify_every=1")
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    assert summary["logprob_gap_max"] < 1e-4
