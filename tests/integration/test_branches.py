"""Episodes of several branches through a real controller, into its files and to its trainer."""

import dataclasses
import json

import numpy as np
from slipstream.core.types import Branch, Trajectory
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import rows_of

TOKENS = 5
BRANCHES = (Branch(2), Branch(2, 0.5, "reviewer", -2.5))
SAMPLING = {"sampling__max_turns": 2, "sampling__max_total_tokens": 80}


def as_tree(trajectory: Trajectory) -> Trajectory:
    """The same sampled tokens, the last two of them in a branch behind the first three."""
    ids = trajectory.token_ids
    return dataclasses.replace(
        trajectory,
        token_ids=np.concatenate([ids[:6], ids[:6], [1], ids[6:]]).astype(np.uint32),
        run_lengths=(3, 3, 7, 2),
        branches=BRANCHES,
        num_turns=2,
    )


async def test_trees_are_trained_once_told_as_trees_and_kept_in_the_ledger(
    tmp_path,
) -> None:
    config = make_config(tmp_path, **SAMPLING)
    server = FakeServer(config.controller.address, delay_s=0.02, reply_tokens=TOKENS)
    server.spoil = as_tree
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    summary = await play(config, server, trainer=trainer)
    assert (summary["code"], summary["steps"]) == (0, 12)
    assert (
        summary["ledger"]["trained"]
        == summary["ledger"]["generated"]
        == 12 * 16 * TOKENS
    )
    assert 0 < max(trainer.lags) <= 2
    trained = [trajectory for batch in trainer.batches for trajectory in batch]
    assert {trajectory.branches for trajectory in trained} == {BRANCHES}
    rows = rows_of(config.run_dir)
    assert {row["branches_mean"] for row in rows} == {2.0}
    assert {row["turns_mean"] for row in rows} == {2.0}
    lines = (config.run_dir / "trajectories.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        first, second = line["branches"]
        assert (second["name"], second["share"], second["reward"]) == (
            "reviewer",
            0.5,
            -2.5,
        )
        assert (first["reward"], second["sampled_tokens"]) == (None, 2)


async def test_a_lease_reserves_room_for_all_branches_together(tmp_path) -> None:
    # Room for two groups of trajectories with 1000 tokens, a batch; four of one branch would fit.
    largest = 2048 + 1000 * 24
    sizes = {"algorithm__groups_per_step": 2, "queue__max_bytes": 2 * 4 * largest}
    config = make_config(
        tmp_path, sampling__max_total_tokens=1000, run__steps=2, **sizes
    )
    server = FakeServer(config.controller.address, delay_s=0.05)
    most = 0
    deliver = server.spoil

    def counted(trajectory: Trajectory) -> Trajectory:
        nonlocal most
        most = max(most, len(server.unfinished))
        return deliver(trajectory)

    server.spoil = counted
    summary = await play(config, server)
    assert summary["steps"] == 2
    assert 0 < most <= 8
