"""A whole run whose disk hangs when the model is to be exported."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from support.fakes.throttled_disk import ThrottledDisk  # noqa: E402
from support.rigs.run_processes import (  # noqa: E402
    check_ledger,
    command,
    copy_environments,
    summary_of,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANK_LIMIT_S = 15.0
RUN_LIMIT_S = 400.0


async def test_a_run_whose_disk_hangs_at_its_end_fails_and_the_same_command_exports_the_model(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(
        copy_environments(tmp_path),
        tiny_model,
        run__steps=2,
        evaluations=[],
        algorithm__group_size=4,
        algorithm__groups_per_step=4,
        learner__timeout_s=RANK_LIMIT_S,
        weights__join_deadline_s=5.0,
        checkpoint__every_steps=0,
    )
    final = tmp_path / "run" / "checkpoints" / "final"
    disk = ThrottledDisk(final.parent, tmp_path / "tools")
    for name, value in disk.environ.items():
        monkeypatch.setenv(name, value)
    disk.set_rate(0)
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        assert await run.wait(RUN_LIMIT_S) == 1, run.out + run.err
    line = f"moved no byte to or from the disk of {final.parent} for 15 s (learner.timeout_s)"
    assert line in run.err
    how = f"mend the cause, then resume it with: {sys.executable} -m slipstream.client.cli"
    assert f"  failed at version 2 of 2; {how} run config.toml\n" in run.out
    assert summary_of(tmp_path / "run")["state"] == "failed"
    assert not final.exists()
    disk.release()
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = summary_of(tmp_path / "run")
    assert (summary["state"], summary["steps"]) == ("finished", 2)
    check_ledger(summary)
    assert (final / "model.safetensors").is_file()
