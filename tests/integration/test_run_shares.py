"""Each batch of a whole run has the shares of its environments, whichever of them is slow."""

import re
from collections import Counter
from pathlib import Path

import pytest
from support.rigs.run_processes import (
    LONG_RUN,
    check_replay,
    checked,
    command,
    copy_environments,
    records_of,
    rows_of,
    succeed,
    write_config,
)

pytestmark = [*LONG_RUN, pytest.mark.timeout(900)]

LIMIT_S = 600.0
STEPS = 6
GROUPS = 8
ENTRY = "extensions.by_environment.environments.slow"


async def test_a_slow_environment_has_its_share_of_each_batch_from_the_first_step_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = copy_environments(tmp_path)
    quick = {"reference": "user_environments:Repeat", "timeout_s": 10.0}
    # A reply takes some ten times as long as one of the other.
    slow = {
        "reference": "user_environments:SlowAndVaried",
        "args": {"step_s": 1.0},
        "timeout_s": 60.0,
    }
    write_config(
        folder,
        tiny_model,
        run__steps=STEPS,
        environments=[{"name": "quick", **quick}, {"name": "slow", **slow}],
        evaluations=[],
        algorithm__group_size=4,
        algorithm__groups_per_step=GROUPS,
        algorithm__kl={"coefficient": 0.1},
        extensions__by_environment__environments={
            "slow": {
                "loss_weight": 3.0,
                "group_size": 2,
                "temperature": 1.5,
                "loss": "gspo",
                "loss_args": {"clip_high": 0.3},
                "kl_coefficient": 0.0,
            },
        },
    )
    async with command(tmp_path, "run", "config.toml", cwd=folder) as run:
        assert await run.wait(LIMIT_S) == 0, run.out + run.err
    run_folder = tmp_path / "run"
    summary = checked(run_folder)
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    environments = {
        r["group"]: r["environment"] for r in records_of(run_folder, "lease")
    }
    batches = records_of(run_folder, "batch")
    sizes = {r["group"]: len(r["members"]) for r in records_of(run_folder, "lease")}
    assert {(environments[group], size) for group, size in sizes.items()} == {
        ("quick", 4),
        ("slow", 2),
    }
    shares = [
        Counter(environments[group] for group in record["groups"]) for record in batches
    ]
    assert shares == [{"quick": GROUPS // 2, "slow": GROUPS // 2}] * STEPS
    assert all(
        abs(seats) <= 0.5 for record in batches for seats in record["owed"].values()
    )
    # Engine and learner divide by the same temperatures: before any lag their values are equal.
    first = rows_of(run_folder)[0]
    assert first["importance_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["logprob_gap_max"] < 1e-3
    check_replay(run_folder)
    compared = succeed("replay", run_folder, "--to", "1", f"{ENTRY}.loss_weight=1.0")
    (cosine,) = re.findall(r"change by step 1: cosine (\S+),", compared.stdout)
    assert float(cosine) < 0.99
