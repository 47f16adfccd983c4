"""A run corrects for its engine and for its lag apart, also across the death of its trainer."""

from pathlib import Path

import pytest
from support.rigs.run_processes import (
    LONG_RUN,
    TRAINER,
    check_replay,
    checked,
    command,
    kill,
    rows_of,
    write_config,
)
from support.rigs.steps import until_row

pytestmark = [*LONG_RUN, pytest.mark.timeout(900)]

STEPS = 10
EVERY_STEPS = 3
LIMIT_S = 600.0


async def test_the_factor_of_the_engine_is_1_at_every_lag(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_config(
        tmp_path,
        tiny_model,
        run__steps=STEPS,
        evaluations=[],
        algorithm__max_staleness=4,
        algorithm__weight="split",
        algorithm__weight_args={
            "engine_token_band": [0.99, 1.01],
            "staleness_cap": 3.0,
        },
        checkpoint__every_steps=EVERY_STEPS,
    )
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        # Batches behind the checkpoint are trained again, with tokens of versions before it.
        await until_row(tmp_path, run, EVERY_STEPS + 2)
        (trainer,) = run.find(f"{TRAINER} ")
        kill(trainer)
        assert await run.wait(LIMIT_S) == 0, run.out + run.err
    folder = tmp_path / "run"
    summary = checked(folder)
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    rows = [row for row in rows_of(folder) if "step" in row]
    # How late tokens are, and how many replies cross a publish, depends on the machine's load.
    assert max(row["lag_max"] for row in rows) >= 1
    for row in rows:
        # Both are float32, and add up the same numbers in another order.
        assert row["engine_gap_max"] < 5e-6
        assert row["engine_gap_mean"] < 1e-6
        assert (
            row["engine_masked_token_fraction"] == row["retrained_version_tokens"] == 0
        )
        if row["lag_mean"]:
            assert row["staleness_gap_mean"] > 1e-3
    check_replay(folder, cwd=tmp_path)
