"""Games of gymnasium train a tiny model for 20 steps each, with held-out seeds."""

from pathlib import Path

import pytest
from support.fakes.tiny_models import make_model_folder
from support.rigs import run_processes

pytestmark = [*run_processes.SLOW_RUN, pytest.mark.timeout(1300)]

STEPS = 20
GYMNASIUM = "deploy.environments.gymnasium_game:Game"
# The model knows letters, 0 and 1; everything else is one unknown word to it.
LETTERS = list("abcdef")


def gym(id: str, num_actions: int, **kwargs: object) -> dict[str, object]:
    return {"id": id, "kwargs": kwargs, "actions": LETTERS[:num_actions]}


CASES = {
    "frozen-lake": gym("FrozenLake-v1", 4, render_mode="ansi"),
    "cart-pole": gym("CartPole-v1", 2, max_episode_steps=12),
    "cliff-walking": gym("CliffWalking-v1", 4, max_episode_steps=8),
    "taxi": gym("Taxi-v4", 6, max_episode_steps=8),
    "blackjack": gym("Blackjack-v1", 2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's, with room for games."""
    folder = tmp_path_factory.mktemp("models") / "long"
    return make_model_folder(folder, max_position_embeddings=1024)


@pytest.mark.parametrize("name", CASES)
def test_a_game_of_gymnasium_trains(name: str, tmp_path: Path, model: Path) -> None:
    pytest.importorskip("gymnasium")
    args = CASES[name]
    other = {"first_seed": 1000}
    entry = {"name": name, "reference": GYMNASIUM, "timeout_s": 60.0}
    heldout = {"name": f"{name}-heldout", "reference": GYMNASIUM, "timeout_s": 60.0}
    config = run_processes.write_config(
        tmp_path,
        model,
        run__steps=STEPS,
        environments=[entry | {"args": args}],
        evaluations=[
            heldout
            | {"args": args | other, "num_episodes": 8, "every_steps": STEPS // 2}
        ],
        algorithm__group_size=8,
        algorithm__groups_per_step=4,
        sampling__max_reply_tokens=2,
        sampling__max_turns=24,
        sampling__max_episode_tokens=900,
        sampling__max_total_tokens=1800,
        learner__micro_batch_tokens=4096,
        rollout_server__max_episodes=32,
    )
    (tmp_path / "deploy").symlink_to(run_processes.ROOT / "deploy")
    run_processes.succeed("run", config, cwd=tmp_path, limit_s=1200.0)
    summary = run_processes.checked(tmp_path / "run")
    assert summary["steps"] == STEPS
    assert summary["ledger"]["failed"] == 0
    rows = run_processes.rows_of(tmp_path / "run")
    assert len([row for row in rows if f"{name}/reward" in row]) == STEPS
