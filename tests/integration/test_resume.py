"""Whole runs with all real parts that are killed, and go on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slipstream.learner.controller.records.journal import read_batch, read_records
from support.rigs.run_processes import (
    ROLLOUT_SERVER,
    TRAINER,
    check_ledger,
    command,
    connection,
    copy_environments,
    descendants,
    is_alive,
    kill,
    rows_of,
    run_command,
    succeed,
    summary_of,
    until_event,
    until_gone,
    until_step,
    write_config,
)
from support.rigs.valkey import queue_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 12
RUN_LIMIT_S = 400.0
SETTINGS = {
    "run__steps": STEPS,
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 4,
    "evaluations": [],
    "checkpoint__every_steps": 3,
    "checkpoint__keep_last": 2,
}


def journal_of(run: Path) -> list[dict]:
    return list(read_records(run / "journal"))


def digests(run: Path) -> list[str]:
    return [record["digest"] for record in journal_of(run) if record["kind"] == "step"]


def check_whole_run(run: Path, steps: int) -> None:
    """Each step once, on one timeline, nothing twice, and the journal alone gives the same bits."""
    records = journal_of(run)
    batches = [record for record in records if record["kind"] == "batch"]
    assert [record["step"] for record in batches] == list(range(steps))
    trajectories = [
        (t.group_id, t.member)
        for record in batches
        for t in read_batch(run / "journal", record["step"], record["crc32"]).trajectories
    ]
    assert len(trajectories) == len(set(trajectories)) == steps * 16
    versions = [record["version"] for record in records if record["kind"] == "step"]
    assert versions == [[0, step + 1] for step in range(steps)]
    assert [row["step"] for row in rows_of(run) if "step" in row] == list(range(1, steps + 1))
    summary = summary_of(run)
    assert summary["steps"] == steps
    assert summary["state"] == "finished"
    assert summary["weight_digest"] == digests(run)[-1]
    assert summary["max_lag_seen"] <= summary["max_staleness"]
    check_ledger(summary)
    replay = succeed("replay", run, limit_s=300.0)
    assert [line.split()[2] for line in replay.stdout.splitlines()] == digests(run)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Iterator[Path]:
    folder = copy_environments(tmp_path)
    with queue_settings(tmp_path / "valkey") as queue:
        write_config(folder, tiny_model, **SETTINGS, **queue)
        yield folder


async def test_the_same_command_goes_on_after_a_kill(folder: Path) -> None:
    async with command(folder, "run", "config.toml", cwd=folder) as run:
        async with connection(folder / "config.toml", run) as client:
            await until_step(client, STEPS // 2)
        everything = descendants(run.process.pid)
        kill(psutil.Process(run.process.pid))
        await until_gone(everything)
    before = digests(folder / "run")
    # The record of the step that was told last may not be on disk yet.
    assert STEPS // 2 - 1 <= len(before) < STEPS
    again = await asyncio.to_thread(
        run_command, "run", "config.toml", cwd=folder, limit_s=RUN_LIMIT_S
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the run resumes at version" in again.stdout
    assert digests(folder / "run")[: len(before)] == before
    check_whole_run(folder / "run", STEPS)


async def test_a_killed_rank_starts_again_beside_the_fleet(folder: Path) -> None:
    async with command(folder, "run", "config.toml", cwd=folder) as run:
        async with connection(folder / "config.toml", run) as client:
            await until_step(client, STEPS // 2)
            servers = run.find(ROLLOUT_SERVER) + run.engines()
            (rank,) = run.find(f"{TRAINER} ")
            kill(rank)
            await until_event(client, lambda event: "trained again" in event.text)
            assert [is_alive(process) for process in servers] == [True] * len(servers)
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
        assert "was killed by SIGKILL" in run.out
        assert "the trainer starts again, start 2" in run.out
    starts = [record for record in journal_of(folder / "run") if record["kind"] == "start"]
    assert len(starts) == 1
    check_whole_run(folder / "run", STEPS)


def test_a_checkpoint_is_exported_and_a_longer_run_goes_on(folder: Path) -> None:
    succeed("run", "config.toml", "run.steps=3", cwd=folder, limit_s=RUN_LIMIT_S)
    succeed("export", folder / "run", "--step", "3", limit_s=100)
    final, exported = folder / "run/checkpoints/final", folder / "run/checkpoints/hf-000003"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (exported / name).read_bytes() == (final / name).read_bytes(), name
    missing = run_command("export", folder / "run", "--step", "2")
    assert missing.returncode == 2
    assert "has no checkpoint of version 2, only of 3" in missing.stderr
    changed = run_command("run", "config.toml", "algorithm.group_size=8", cwd=folder)
    assert changed.returncode == 2
    assert "algorithm.group_size must stay 4 when a run goes on, got 8" in changed.stderr
    succeed("run", "config.toml", "run.steps=5", cwd=folder, limit_s=RUN_LIMIT_S)
    check_whole_run(folder / "run", 5)
