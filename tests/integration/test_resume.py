"""Whole runs with all real parts that are killed at random moments, and go on.

`python tests/integration/test_resume.py [KILLS]` kills a run so often and prints a table.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.learner.controller.records.journal import read_batch, read_records  # noqa: E402
from support.fakes.tiny_models import make_model_folder  # noqa: E402
from support.rigs.run_processes import (  # noqa: E402
    CONTROLLER,
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
    summary_of,
    until_event,
    until_gone,
    until_step,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 12
# How much further a run shall go that is killed within a minute or two.
STEPS_OF_A_LIFE = 1500
RUN_LIMIT_S = 400.0
LONG_RUN_LIMIT_S = 1800.0
SETTINGS = {
    "run__steps": STEPS,
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 4,
    "evaluations": [],
    "queue__kind": "redis",
    "checkpoint__every_steps": 3,
    "checkpoint__keep_last": 2,
}


@dataclass(frozen=True)
class Kill:
    """One kill, and what it left."""

    what: str
    after_s: float
    steps: int
    checkpoint: int


def journal_of(run: Path) -> list[dict]:
    return list(read_records(run / "journal"))


def digests(run: Path) -> list[str]:
    return [record["digest"] for record in journal_of(run) if record["kind"] == "step"]


def check_whole_run(run: Path, steps: int, limit_s: float = 300.0) -> None:
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
    replay = run_command("replay", run, limit_s=limit_s)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert [line.split()[2] for line in replay.stdout.splitlines()] == digests(run)


async def run_and_kill(
    folder: Path, config: Path, what: str, after_s: float | None, *settings: str
) -> Kill | None:
    """Starts the command and kills a part; None when the run was over before."""
    run_folder = folder / "run"
    started_s = time.monotonic()
    async with command(folder, "run", "config.toml", *settings, cwd=folder) as run:
        if after_s is None:
            async with connection(config, run) as client:
                await until_step(client, STEPS // 2)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await run.process.wait()
        if run.process.returncode is not None:
            assert run.process.returncode == 0, run.out + run.err
            return None
        everything = descendants(run.process.pid)
        victims = [psutil.Process(run.process.pid)] if what == "command" else run.find(what)
        for victim in victims:
            kill(victim)
        if what == "command":
            await until_gone(everything)
        else:
            # The run goes on without it, until the command dies as well.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await run.process.wait()
    records = journal_of(run_folder) if (run_folder / "journal").exists() else []
    checkpoints = [r["version"][1] for r in records if r["kind"] == "checkpoint"]
    return Kill(
        what.removeprefix("slipstream.").strip(),
        time.monotonic() - started_s,
        sum(record["kind"] == "step" for record in records),
        checkpoints[-1] if checkpoints else 0,
    )


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    folder = copy_environments(tmp_path)
    write_config(folder, tiny_model, **SETTINGS)
    return folder


async def test_the_same_command_goes_on_after_a_kill(folder: Path) -> None:
    config = folder / "config.toml"
    await run_and_kill(folder, config, "command", None)
    before = digests(folder / "run")
    assert STEPS // 2 <= len(before) < STEPS
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
    first = run_command("run", "config.toml", "run.steps=3", cwd=folder, limit_s=RUN_LIMIT_S)
    assert first.returncode == 0, first.stdout + first.stderr
    export = run_command("export", folder / "run", "--step", "3", limit_s=100)
    assert export.returncode == 0, export.stderr
    final, exported = folder / "run/checkpoints/final", folder / "run/checkpoints/hf-000003"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (exported / name).read_bytes() == (final / name).read_bytes(), name
    missing = run_command("export", folder / "run", "--step", "2")
    assert missing.returncode == 2
    assert "has no checkpoint of version 2, only of 3" in missing.stderr
    changed = run_command("run", "config.toml", "algorithm.group_size=8", cwd=folder)
    assert changed.returncode == 2
    assert "algorithm.group_size must stay 4 when a run goes on, got 8" in changed.stderr
    second = run_command("run", "config.toml", "run.steps=5", cwd=folder, limit_s=RUN_LIMIT_S)
    assert second.returncode == 0, second.stdout + second.stderr
    check_whole_run(folder / "run", 5)


async def kill_often(folder: Path, kills: int) -> int:
    """Kills a run at random moments, prints a table; returns how many steps it shall have."""
    draw, number, trained, steps = random.Random(0), 0, 0, 0
    print("| kill | what | after | steps in the journal | last checkpoint |")
    print("|---|---|---|---|---|")
    while number < kills:
        steps = max(steps, trained + STEPS_OF_A_LIFE)
        what = draw.choice(["command", CONTROLLER, f"{TRAINER} ", ROLLOUT_SERVER])
        # While it starts, or in the middle of its steps.
        after_s = draw.uniform(1.0, 40.0)
        config = folder / "config.toml"
        done = await run_and_kill(folder, config, what, after_s, f"run.steps={steps}")
        if done is None:
            trained = steps
            continue
        number, trained = number + 1, done.steps
        print(
            f"| {number} | {done.what} | {done.after_s:.1f} s | {trained} | {done.checkpoint} |",
            flush=True,
        )
    return steps


async def main(kills: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = copy_environments(Path(name))
        write_config(folder, make_model_folder(folder / "model"), **SETTINGS)
        steps = await kill_often(folder, kills)
        last = run_command(
            *("run", "config.toml", f"run.steps={steps}"), cwd=folder, limit_s=LONG_RUN_LIMIT_S
        )
        assert last.returncode == 0, last.stdout + last.stderr
        check_whole_run(folder / "run", steps, LONG_RUN_LIMIT_S)
        print(f"{kills} kills, {steps} steps, bit for bit as the replay of the journal")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
