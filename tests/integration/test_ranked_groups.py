"""A whole run whose only reward is a ranking of each group."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
from support.rigs.run_processes import (
    ROOT,
    check_replay,
    checked,
    succeed,
    write_config,
)

pytestmark = pytest.mark.usefixtures("nothing_survives")

STEPS = 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_learns_by_rankings_goes_on_and_can_be_replayed(
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        run__steps=STEPS // 2,
        algorithm__groups_per_step=8,
    )
    table = tomllib.loads(config.read_text())
    shutil.copy(ROOT / "deploy" / "environments" / "ranked.py", tmp_path)
    table["environments"][0]["reference"] = "ranked:Ranked"
    table["evaluations"][0]["every_steps"] = STEPS // 2
    config.write_text(tomli_w.dumps(table))
    run = tmp_path / "run"
    succeed("run", "config.toml", cwd=tmp_path, limit_s=300)
    succeed(
        "run",
        "config.toml",
        f"run.steps={STEPS}",
        cwd=tmp_path,
        limit_s=300,
    )
    checked(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # Each reply beats, on average, half of the others.
    for row in rows:
        if "reward_mean" in row:
            assert row["reward_mean"] == pytest.approx(0.5, abs=1e-9)
    name = "echo-heldout/reward_mean"
    heldout = [row[name] for row in rows if name in row]
    assert heldout[-1] >= heldout[0] + 0.15
    check_replay(run, cwd=tmp_path)
