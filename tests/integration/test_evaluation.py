"""Held-out rounds in whole runs of the controller, with servers that compute nothing."""

import json
import zlib
from collections import Counter

import pytest
from slipstream.core.types import PolicyVersion
from slipstream.v1 import trajectory_pb2
from support.fakes.fake_server import FakeServer, environment_failure
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import evaluation_rows, make_config, play
from support.rigs.run_processes import records_of
from support.rigs.waiting import until


def evaluation_leases(server: FakeServer, name: str = "held") -> list:
    return [
        lease
        for lease in server.leases
        if lease.purpose == trajectory_pb2.EPISODE_PURPOSE_EVALUATION
        and lease.environment == name
    ]


async def test_every_round_takes_the_same_tasks_with_the_same_seeds(tmp_path):
    config = make_config(
        tmp_path,
        {"name": "held", "num_episodes": 6, "every_steps": 2, "samples_per_task": 2},
        run__steps=4,
    )
    server = FakeServer(config.controller.address)
    await play(
        config, server, trainer=FakeTrainer(config.controller.address, step_s=0.05)
    )
    leases = evaluation_leases(server)
    rounds = [leases[start : start + 6] for start in range(0, len(leases), 6)]
    assert len(rounds) == 3
    tasks = [
        Counter((lease.task_index, lease.seed) for lease in leases) for leases in rounds
    ]
    assert tasks[0] == {(0, 0): 2, (1, 1): 2, (2, 2): 2}
    assert tasks[1] == tasks[2] == tasks[0]
    # The journal knows each episode and each round.
    records = records_of(config.run_dir)
    leased = {
        r["group"]: r["version"] for r in records if r["kind"] == "evaluation_lease"
    }
    ended = [r["id"].split(".")[0] for r in records if r.get("end") == "evaluated"]
    assert sorted(leased) == sorted(set(ended))
    rounds = [
        (r["version"], r["episodes"]) for r in records if r["kind"] == "evaluation"
    ]
    assert rounds == [(version, 6) for version in sorted(set(leased.values()))]


async def test_every_round_keeps_replies_to_the_same_first_tasks(tmp_path):
    config = make_config(
        tmp_path,
        {"name": "held", "num_episodes": 8, "samples_per_task": 2},
        {"name": "few", "num_episodes": 2},
        run__steps=1,
    )
    await play(config, FakeServer(config.controller.address))
    content = (config.run_dir / "heldout.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    places = [
        (
            row["evaluation_step"],
            row["evaluation"],
            row["task_index"],
        )
        for row in rows
    ]
    assert places == [
        (0, "few", 0),
        (0, "few", 1),
        (0, "held", 0),
        (0, "held", 1),
        (0, "held", 2),
        (1, "few", 0),
        (1, "few", 1),
        (1, "held", 0),
        (1, "held", 1),
        (1, "held", 2),
    ]
    for row in rows:
        assert "reply" in row
        assert "lag" not in row
    first_record, last_record = [
        record
        for record in records_of(config.run_dir)
        if record["kind"] == "evaluation"
    ]
    checksums = [zlib.crc32(line) for line in lines]
    assert first_record["replies_crc32"] == checksums[:5]
    assert last_record["replies_crc32"] == checksums[5:]


async def test_a_round_takes_no_task_twice_and_says_once_that_fewer_are_there(
    tmp_path, caplog
):
    def first_task_passes(lease, member, attempt):
        return float(lease.task_index == 0)

    config = make_config(
        tmp_path,
        {"name": "held", "num_episodes": 22, "samples_per_task": 2, "every_steps": 1},
        {"name": "enough", "num_episodes": 10},
        run__steps=2,
    )
    server = FakeServer(config.controller.address, judge=first_task_passes)
    with caplog.at_level("WARNING"):
        await play(config, server)
    first_round = Counter(lease.task_index for lease in evaluation_leases(server)[:20])
    assert first_round == dict.fromkeys(range(10), 2)
    for row in evaluation_rows(config):
        assert row["held/num_episodes"] == 20
        assert row["held/pass_at_1"] == row["held/reward_mean"] == 0.1
        assert row["enough/num_episodes"] == 10
    warned = [message for message in caplog.messages if "tasks" in message]
    assert warned == [
        "evaluation held has 10 tasks, and num_episodes = 22 with samples_per_task = 2 asks for "
        "11: a round takes each task once, 20 episodes"
    ]


async def test_an_evaluation_on_a_scale_from_0_to_10_says_that_it_has_no_pass_rates(
    tmp_path, caplog
):
    scales = [
        {"name": "unsaid", "num_episodes": 4},
        {"name": "said", "num_episodes": 4},
    ]
    scales[1]["pass_reward"] = 7.0
    config = make_config(tmp_path, *scales, run__steps=2)
    server = FakeServer(
        config.controller.address, judge=lambda lease, member, attempt: 7.0
    )
    await play(config, server)
    for row in evaluation_rows(config):
        assert row["said/pass_at_1"] == 1.0
        assert "unsaid/pass_at_1" not in row
    assert [message for message in caplog.messages if "pass rates" in message] == [
        "evaluation unsaid has no pass rates: it gave rewards up to 7, and which of them passes is "
        "not said; set pass_reward of it"
    ]


async def test_each_evaluation_has_its_own_settings(tmp_path):
    config = make_config(
        tmp_path,
        {
            "name": "greedy",
            "num_episodes": 2,
            "temperature": 0,
            "max_reply_tokens": 3,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {"name": "sampled", "num_episodes": 4, "top_p": 0.5, "temperature": 0.7},
        run__steps=1,
        sampling__top_p=0.9,
        algorithm__weight="none",
        sampling__stop_token_ids=[5, 6],
        sampling__stop=["</call>"],
    )
    server = FakeServer(config.controller.address)
    await play(config, server)
    greedy, sampled = (
        evaluation_leases(server, name) for name in ("greedy", "sampled")
    )
    assert len(greedy) == 2 * 2
    assert {(x.sampling.temperature, x.sampling.max_reply_tokens) for x in greedy} == {
        (0.0, 3)
    }
    assert {x.sampling.top_p for x in greedy} == {0.9}
    assert len(sampled) == 2 * 4
    assert {(x.sampling.temperature, x.sampling.top_p) for x in sampled} == {(0.7, 0.5)}
    assert {x.sampling.max_reply_tokens for x in sampled} == {8}
    # The same for all, those of training, too.
    assert {tuple(x.sampling.stop_token_ids) for x in server.leases} == {(5, 6)}
    assert {tuple(x.sampling.stop) for x in server.leases} == {("</call>",)}
    # Values for the template belong to one environment.
    assert {x.chat_template_kwargs_json for x in greedy} == {
        '{"enable_thinking": false}'
    }
    leases = [x for x in server.leases if x.environment != "greedy"]
    assert {x.chat_template_kwargs_json for x in leases} == {""}


async def test_a_round_tells_its_statistics_in_the_file_the_summary_and_an_event(
    tmp_path, caplog
):
    counter = Counter()

    def by_task(lease, member, attempt):
        if lease.purpose != trajectory_pb2.EPISODE_PURPOSE_EVALUATION:
            return float(member)
        if lease.task_index == 3:
            return environment_failure(lease, member, attempt)
        # The first of the two samples of task 1 passes; no sample of another task does.
        counter[lease.task_index] += 1
        return float(lease.task_index == 1 and counter[1] % 2)

    config = make_config(
        tmp_path,
        {"name": "held", "num_episodes": 8, "samples_per_task": 2},
        run__steps=1,
    )
    server = FakeServer(config.controller.address, judge=by_task)
    with caplog.at_level("INFO"):
        summary = await play(config, server)
    rows = evaluation_rows(config)
    assert [row["evaluation_step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["reward_heldout"] == row["held/reward_mean"] == pytest.approx(1 / 6)
        assert row["held/num_episodes"] == row["num_episodes"] == 6
        assert row["held/num_failed"] == row["num_failed"] == 2
        assert row["held/reply_tokens_mean"] == row["held/reply_tokens_max"] == 5
        assert row["held/pass_at_1"] == pytest.approx((0 + 1 / 2 + 0) / 3)
        assert row["held/pass_at_2"] == pytest.approx((0 + 1 + 0) / 3)
    assert summary["evaluations"]["held"]["pass_at_2"] == rows[-1]["held/pass_at_2"]
    assert summary["reward_heldout"] == rows[-1]["reward_heldout"]
    assert (
        "evaluation held at version 0: reward 0.167 (0 to 1), pass@1 0.167, pass@2 0.333, "
        "5.0 tokens a reply, 0% cut off, 6 episodes, 2 failed"
    ) in caplog.messages


async def test_training_goes_on_while_a_round_runs_and_the_round_keeps_its_version(
    tmp_path,
):
    config = make_config(tmp_path, {"name": "held", "num_episodes": 4}, run__steps=6)
    address = config.controller.address
    servers = [FakeServer(address, "a"), FakeServer(address, "b")]
    trainer = FakeTrainer(address)
    for server in servers:
        server.evaluation_gate.clear()
    seen = []

    async def look(controller, tasks):
        await until(lambda: trainer.version.step >= 3)
        (measured,) = [server for server in servers if evaluation_leases(server)]
        seen.append((measured.version, evaluation_rows(config)))
        for server in servers:
            server.evaluation_gate.set()

    await play(config, *servers, trainer=trainer, during=look)
    assert seen == [(PolicyVersion(0, 0), [])]
    assert [row["evaluation_step"] for row in evaluation_rows(config)] == [0, 6]
