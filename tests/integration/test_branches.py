"""Episodes of several branches through a real controller, into its files and to its trainer."""

import dataclasses
import json

import numpy as np
from slipstream.core.types import Branch, Trajectory
from slipstream.learner.controller.records.journal import read_batch, read_records
from slipstream.protocol.codec import trajectory_from_pb
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play

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


async def test_trees_are_trained_once_told_as_trees_and_kept_in_the_ledger(tmp_path) -> None:
    config = make_config(tmp_path, **SAMPLING)
    server = FakeServer(config.controller.address, delay_s=0.02, reply_tokens=TOKENS)
    server.spoil = as_tree
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    summary = await play(config, server, trainer=trainer)
    assert (summary["code"], summary["steps"]) == (0, 12)
    assert summary["ledger"]["difference"] == 0
    assert summary["ledger"]["trained"] == summary["ledger"]["generated"] == 12 * 16 * TOKENS
    assert 0 < max(trainer.lags) <= 2
    trained = [trajectory for batch in trainer.batches for trajectory in batch]
    assert {trajectory.branches for trajectory in trained} == {BRANCHES}
    rows = [json.loads(x) for x in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {row["branches_mean"] for row in rows} == {2.0}
    assert {row["turns_mean"] for row in rows} == {2.0}
    lines = (config.run_dir / "trajectories.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        first, second = line["branches"]
        assert (second["name"], second["share"], second["reward"]) == ("reviewer", 0.5, -2.5)
        assert (first["reward"], second["sampled_tokens"]) == (None, 2)


async def test_the_journal_gives_back_the_branches_that_were_trained(tmp_path) -> None:
    config = make_config(tmp_path, **SAMPLING, run__steps=3)
    server = FakeServer(config.controller.address, reply_tokens=TOKENS)
    server.spoil = as_tree
    trainer = FakeTrainer(config.controller.address)
    await play(config, server, trainer=trainer)
    folder = config.run_dir / "journal"
    batches = [r for r in read_records(folder) if r["kind"] == "batch"]
    for record, trained in zip(batches, trainer.batches, strict=True):
        recorded = read_batch(folder, record["step"], record["crc32"])
        found = [trajectory_from_pb(message) for message in recorded.trajectories]
        assert [t.branches for t in found] == [BRANCHES] * len(trained)
        assert [t.sequences() for t in found] == [t.sequences() for t in trained]


async def test_a_tree_beyond_the_limits_of_the_run_is_quarantined_with_the_rule(tmp_path) -> None:
    config = make_config(tmp_path, **SAMPLING, sampling__max_branches=1, run__steps=2)
    address = config.controller.address
    strange, honest = FakeServer(address, "strange"), FakeServer(address, "honest")
    strange.spoil = as_tree
    summary = await play(config, strange, honest)
    assert summary["steps"] == 2
    assert summary["ledger"]["quarantined"] > 0
    assert summary["ledger"]["difference"] == 0
    ends = [r for r in read_records(config.run_dir / "journal") if r["kind"] == "end"]
    causes = {r["cause"] for r in ends if r["end"] == "quarantined"}
    assert causes == {"it has 2 branches, sampling.max_branches is 1"}


async def test_a_lease_reserves_room_for_all_branches_together(tmp_path) -> None:
    # Room for two groups of trajectories with 1000 tokens, a batch; four of one branch would fit.
    largest = 2048 + 1000 * 24
    sizes = {"algorithm__groups_per_step": 2, "queue__max_bytes": 2 * 4 * largest}
    config = make_config(tmp_path, sampling__max_total_tokens=1000, run__steps=2, **sizes)
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
