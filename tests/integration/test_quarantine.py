"""Trajectories that can be none of this run, in whole runs of the controller."""

import dataclasses

import numpy as np
from slipstream.core.types import Trajectory
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of, rows_of


def above_zero(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        behavior_logprobs=np.full(trajectory.num_sampled_tokens, 0.25, np.float32),
    )


def nan(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        behavior_logprobs=np.full(trajectory.num_sampled_tokens, np.nan, np.float32),
    )


async def test_quarantined_episodes_run_again_and_their_tokens_are_counted(tmp_path):
    config = make_config(tmp_path, run__steps=3)
    server = FakeServer(config.controller.address)
    bad = []

    def sometimes(trajectory):
        if trajectory.member == 1 and trajectory.attempt == 0:
            bad.append(trajectory.trajectory_id)
            return (above_zero if len(bad) % 2 else nan)(trajectory)
        return trajectory

    server.spoil = sometimes
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, server, trainer=trainer)
    ledger = summary["ledger"]
    assert summary["steps"] == 3
    assert ledger["quarantined"] == 5 * len(bad) > 0
    assert ledger["difference"] == ledger["queued"] == ledger["in_flight"] == 0
    trained = [t for batch in trainer.batches for t in batch]
    assert {t.attempt for t in trained if t.member == 1} == {1}
    records = records_of(config.run_dir, "end")
    ends = {r["id"]: r for r in records if r["end"] == "quarantined"}
    assert set(ends) == set(bad)
    assert ends[bad[0]]["cause"] == "a log-probability is 0.25, above 0"
    assert ends[bad[1]]["cause"].endswith(
        "a value of behavior_logprobs is not a finite number"
    )
    assert rows_of(config.run_dir)[-1]["quarantined_trajectories"] > 0


async def test_a_server_that_produces_nothing_else_stops_the_run_with_the_cause(
    tmp_path,
):
    config = make_config(tmp_path)
    server = FakeServer(config.controller.address)
    server.spoil = above_zero
    summary = await play(config, server)
    assert summary["code"] == 1
    assert summary["cause"] == (
        "rollout server fake produces nothing but trajectories that cannot be trained, the last "
        "16 in a row: a log-probability is 0.25, above 0"
    )


async def test_a_group_goes_on_without_a_member_that_is_quarantined_at_every_attempt(
    tmp_path,
):
    config = make_config(tmp_path, run__steps=4)
    server = FakeServer(config.controller.address)
    server.spoil = lambda t: above_zero(t) if (t.task_index, t.member) == (3, 0) else t
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, server, trainer=trainer)
    assert summary["steps"] == 4
    trained = {(t.task_index, t.member) for batch in trainer.batches for t in batch}
    assert (3, 0) not in trained
    assert {(3, 1), (3, 2), (3, 3)} <= trained
    first = records_of(config.run_dir, "gave_up")[0]
    assert first["cause"] == "quarantined: a log-probability is 0.25, above 0"
    ends = records_of(config.run_dir, "end")
    attempts = [r["id"] for r in ends if r["end"] == "quarantined"]
    assert [i.split(".")[:3] for i in attempts if i.startswith(first["group"])] == [
        [first["group"], "0", str(attempt)] for attempt in range(3)
    ]


async def test_an_evaluated_episode_that_is_quarantined_is_measured_again(tmp_path):
    config = make_config(tmp_path, {"name": "held", "num_episodes": 6}, run__steps=2)
    server = FakeServer(config.controller.address)
    seen = []

    def once(trajectory):
        if trajectory.environment == "held" and trajectory.task_index == 4 and not seen:
            seen.append(trajectory)
            return above_zero(trajectory)
        return trajectory

    server.spoil = once
    summary = await play(config, server)
    assert summary["evaluations"]["held"]["num_episodes"] == 6
    assert summary["ledger"]["evaluated"] == 2 * 6 * 5
    assert summary["ledger"]["quarantined"] == 5


class Forgetful(FakeServer):
    """A server that closes leases as finished and does not deliver some of their trajectories."""

    forgotten = 0

    async def _put(self, trajectory_id: str, data: bytes) -> None:
        member, attempt = trajectory_id.split(".")[1:3]
        if (member, attempt) != ("1", "0") or self.forgotten == 3:
            await super()._put(trajectory_id, data)
            return
        self.forgotten += 1
        del self.delivering[trajectory_id]


async def test_what_a_closed_lease_left_without_a_word_runs_again(tmp_path, caplog):
    config = make_config(tmp_path, run__steps=3)
    server = Forgetful(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, server, trainer=trainer, is_planted=True)
    assert (summary["steps"], server.forgotten) == (3, 3)
    # The gap stays known: the server has ended episodes that it never sent.
    assert summary["ledger"]["difference"] == 3 * 5
    trained = [t for batch in trainer.batches for t in batch]
    assert [t.attempt for t in trained if t.attempt] == [1] * 3
    messages = [text for text in caplog.messages if " run again: " in text]
    assert len(messages) == 3
    assert messages[0].startswith("1 episodes of group g")
    assert messages[0].endswith(
        " run again: fake closed their lease, and neither delivered them nor named them unfinished"
    )
