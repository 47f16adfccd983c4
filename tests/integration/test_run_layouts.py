"""Several trainer ranks in a real run: the weights that arrive are those of the whole."""

from pathlib import Path

import pytest
from support.fakes.tiny_models import make_mixture_like, make_model_folder
from support.rigs import run_processes

pytestmark = [*run_processes.SLOW_RUN, pytest.mark.timeout(300)]

LAYOUTS = {
    "two replicas with a distributed optimizer": {},
    "tensor parallel": {"learner__parallel": {"tp": 2}},
    "expert parallel with router replay": {
        "learner__parallel": {"ep": 2},
        "algorithm__router_replay": "rollout",
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of two groups: two ranks can share it."""
    folder = tmp_path_factory.mktemp("models") / "four-heads"
    return make_model_folder(folder, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_and_publish_what_the_servers_prove(layout, tmp_path, model):
    if layout.startswith("expert parallel"):
        model = make_mixture_like(model, tmp_path / "mixture")
    run_processes.write_config(
        run_processes.copy_environments(tmp_path),
        model,
        run__steps=3,
        evaluations=[],
        algorithm__group_size=8,
        algorithm__groups_per_step=8,
        learner__world_size=2,
        weights__verify_every=1,
        **LAYOUTS[layout],
    )
    result = run_processes.succeed("run", "config.toml", cwd=tmp_path, limit_s=200)
    assert result.stderr == ""
    summary = run_processes.checked(tmp_path / "run")
    assert summary["steps"] == 3
    assert summary["publishes_verified"] == summary["publishes"] >= 3
    assert summary["probe_gap_max"] <= 1e-4
    assert summary["logprob_gap_mean"] <= 1e-4
    if layout.endswith("router replay"):
        steps = run_processes.rows_of(tmp_path / "run")
        assert [step["routing_unrecorded"] for step in steps] == [0.0] * 3
        assert all(0 <= step["routing_difference"] < 0.2 for step in steps)
    run_processes.check_replay(tmp_path / "run")
