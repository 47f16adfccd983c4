"""The controller over real gRPC, with servers and a trainer that compute nothing."""

import asyncio
import re
import time
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from slipstream.client import Client
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.core.machine.address import free_port
from slipstream.core.types import Failure, FailureKind
from slipstream.learner.controller.application import Controller
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.protocol.rich_errors import Reason, has_reason
from slipstream.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    trainer_pb2,
    trajectory_pb2,
)
from support.fakes.fake_server import FakeServer, environment_failure
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.fake_workers import Good
from support.fakes.named_channel import OPEN, open_named
from support.rigs.controller_runs import evaluation_rows, make_config, play
from support.rigs.run_processes import batches_of, records_of, rows_of
from support.rigs.waiting import until


async def test_a_run_trains_every_step_within_the_bound_and_closes_its_ledger(tmp_path):
    config = make_config(tmp_path)
    address = config.controller.address
    trainer = FakeTrainer(address, step_s=0.02)
    servers = [
        FakeServer(address, f"s{i}", delay_s=0.02, max_episodes=16) for i in range(2)
    ]
    summary = await play(config, *servers, trainer=trainer)
    assert summary["code"] == 0
    assert summary["steps"] == 12
    assert max(trainer.lags) <= 2
    assert max(trainer.lags) > 0
    assert summary["ledger"]["trained"] == 12 * 16 * 5
    assert summary["ledger"]["generated"] == summary["ledger"]["trained"]
    # The journal holds the batches that were trained.
    for recorded, trained in zip(
        batches_of(config.run_dir), trainer.batches, strict=True
    ):
        assert [t.group_id for t in recorded.trajectories] == [
            t.group_id for t in trained
        ]


async def test_a_group_that_loses_too_many_servers_is_set_aside_with_an_event(tmp_path):
    config = make_config(tmp_path, run__steps=4, controller__max_attempts=1)
    address = config.controller.address
    first = FakeServer(address, "s")
    second = FakeServer(address, "s")
    first.gate.clear()

    async def kill(controller, tasks):
        # (1 + max_staleness) * groups_per_step
        await until(lambda: len(first.leases) >= 12)
        first.killed = True
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        tasks.append(asyncio.ensure_future(second.run()))

    summary = await play(config, first, during=kill)
    assert summary["steps"] == 4
    group_ids = {lease.group_id for lease in first.leases}
    assert group_ids.isdisjoint({lease.group_id for lease in second.leases})
    causes = {r["group"]: r["cause"] for r in records_of(config.run_dir, "set_aside")}
    assert causes == dict.fromkeys(group_ids, "its rollout server was lost, 1 times")
    # No group goes on elsewhere.
    assert not [text for text in summary["told"] if "wait for another server" in text]
    group_id = first.leases[0].group_id
    assert (
        sum(f"of {group_id} had its last attempt" in text for text in summary["told"])
        == 1
    )
    # Many groups may fail for one cause: the first few tell it.
    assert sum("had its last attempt" in text for text in summary["told"]) == 3


async def test_the_end_of_a_shared_worker_is_told_once_and_is_no_failure(tmp_path):
    def lost(lease, member, attempt):
        if attempt:
            return float(member)
        return Failure(
            FailureKind.BYSTANDER, "worker exited with code 1; 4 episodes shared it"
        )

    config = make_config(tmp_path, run__steps=3)
    server = FakeServer(config.controller.address, judge=lost)
    summary = await play(config, server)
    ends = [text for text in summary["told"] if text.startswith("episodes of ")]
    assert ends == [
        "episodes of e lost their worker and run again: worker exited with code 1; 4 episodes "
        "shared it"
    ]
    assert not any(text.startswith("an episode of ") for text in summary["told"])


@pytest.mark.parametrize("advantage", ["grpo", "return_to_go"])
async def test_what_agents_ask_for_in_vain_and_sums_of_rewards_are_told_once(
    tmp_path, advantage
):
    config = make_config(tmp_path, run__steps=3, algorithm__advantage=advantage)
    server = FakeServer(config.controller.address)
    request = {"ignored/temperature": 2.0, "ignored/conversation": 4.0}
    server.spoil = lambda t: replace(
        t, metrics=request, token_rewards=t.behavior_logprobs
    )
    summary = await play(config, server)
    messages = [
        text for text in summary["told"] if "ask for" in text or "rewards of" in text
    ]
    sums = "rewards of several turns of e are added up: all turns of an episode learn from the sum"
    assert sorted(messages) == [
        "agents of e ask for conversation, temperature, which changes nothing: "
        "docs/guides/agents.md says what holds",
        *([sums] if advantage == "grpo" else []),
    ]
    rows = rows_of(config.run_dir)
    assert [row["e/ignored/temperature"] for row in rows] == [2.0] * 3


async def test_a_broken_environment_is_suspended_and_the_other_trains_on(tmp_path):
    def half(lease, member, attempt):
        if lease.environment == "bad":
            return environment_failure(lease, member, attempt)
        return float(member)

    config = make_config(tmp_path, run__steps=4, controller__max_failed_groups=3)
    table = config.model_dump(mode="json", exclude_none=True)
    table["environments"].append({"name": "bad", "reference": "m:B"})
    config = parse_config(table, source="test")
    trainer = FakeTrainer(config.controller.address)
    trainer.hold_at(1)
    server = FakeServer(config.controller.address, judge=half)

    async def look(controller, tasks):
        kept_events = controller._run.events.kept
        await until(
            lambda: any("bad is suspended" in event.text for event in kept_events())
        )
        trainer.gate.set()

    summary = await play(config, server, trainer=trainer, during=look)
    assert list(summary["suspended_environments"]) == ["bad"]
    assert summary["steps"] == 4
    assert {t.environment for batch in trainer.batches for t in batch} == {"e"}


@pytest.mark.parametrize("ends", ["suspended", "failed", "stopped"])
async def test_a_client_is_told_why_its_environment_gets_no_more_episodes(
    tmp_path, caplog, ends
):
    def judge(lease, member, attempt):
        if ends == "suspended" and lease.environment == "good":
            return environment_failure(lease, member, attempt)
        return float(member)

    config = make_config(tmp_path, run__steps=10_000, controller__max_failed_groups=1)
    server = FakeServer(config.controller.address, judge=judge)
    messages = []

    async def serve(controller, tasks):
        async with Client(config.controller.address) as client:
            serving = asyncio.ensure_future(client.serve(Good()))
            served = controller._run.events.kept
            await until(
                lambda: any("a client serves" in event.text for event in served())
            )
            if ends == "failed":
                controller._progress.fail("the disk is full")
            elif ends == "stopped":
                controller.stop("enough")
            messages.extend(await asyncio.gather(serving, return_exceptions=True))
            controller.stop("enough")

    summary = await play(config, server, during=serve, wait_for_trainer=False)
    if ends == "suspended":
        (error,) = messages
        assert isinstance(error, EnvironmentFailed)
        assert str(error).startswith(
            "environment good is suspended: its last group failed, the "
        )
        (cause,) = summary["suspended_environments"].values()
        assert str(error).endswith(cause)
    else:
        assert messages == [None]
        warned = [
            record.getMessage() for record in caplog.records if "client" in record.name
        ]
        assert warned == ["the run failed: the disk is full"] * (ends == "failed")


def too_long(lease, member, attempt):
    return Failure(
        FailureKind.PROMPT_TOO_LONG, "a prompt of 99 tokens is longer than 64"
    )


async def test_tasks_whose_prompt_is_too_long_are_skipped_counted_told_and_replaced(
    tmp_path, caplog
):
    def odd_tasks(lease, member, attempt):
        if lease.task_index % 2:
            return too_long(lease, member, attempt)
        return float(member)

    config = make_config(tmp_path, run__steps=4, controller__max_failed_groups=1)
    trainer = FakeTrainer(config.controller.address)
    server = FakeServer(config.controller.address, judge=odd_tasks)
    summary = await play(config, server, trainer=trainer)
    assert summary["steps"] == 4
    assert all(t.task_index % 2 == 0 for batch in trainer.batches for t in batch)
    assert rows_of(config.run_dir)[-1]["skipped_tasks"] > 0
    assert {lease.first_attempt for lease in server.leases} == {0}
    messages = [
        line
        for line in caplog.messages
        if "a prompt of 99 tokens is longer than 64" in line
    ]
    assert len(messages) == len(set(messages)) > 0


@pytest.mark.parametrize(
    ("server", "cause"),
    [
        (
            {"judge": too_long},
            "no environment is left: e: no task fits, the newest: a prompt of ",
        ),
        ({"judge": environment_failure}, "ValueError: broken"),
        ({"failing_environments": ("e",)}, "no module named nowhere"),
    ],
    ids=["no task fits", "always fails", "cannot be loaded"],
)
async def test_a_run_without_an_environment_that_works_says_why(
    tmp_path, server, cause
):
    config = make_config(tmp_path, controller__max_failed_groups=3)
    summary = await play(config, FakeServer(config.controller.address, **server))
    assert summary["code"] == 1
    assert cause in summary["cause"]


async def test_a_run_without_an_environment_says_at_its_start_how_it_gets_one(tmp_path):
    config = make_config(tmp_path, run__steps=1).model_copy(update={"environments": ()})

    async def submit(controller, tasks):
        async with Client(config.controller.address) as client:
            await client.submit("m:E", name="e")

    summary = await play(config, during=submit)
    assert summary["told"][1] == (
        "the settings have no environment: the first step waits until a client serves or submits "
        "one (slipstream submit MODULE:CLASS), else add [[environments]]"
    )
    assert summary["steps"] == 1
    again = config.model_copy(
        update={"run": config.run.model_copy(update={"steps": 2})}
    )
    assert not [
        text for text in (await play(again))["told"] if "no environment" in text
    ]


@pytest.mark.parametrize(
    ("end", "cause"),
    [(None, "RuntimeError: it returned"), (SystemExit(3), "SystemExit: 3")],
)
async def test_the_end_of_a_task_of_the_controller_fails_the_run_with_its_name(
    tmp_path, monkeypatch, end, cause
):
    async def lease_forever(self, **_):
        await asyncio.sleep(0.1)
        if end is not None:
            raise end

    monkeypatch.setattr(Scheduler, "lease_forever", lease_forever)
    config = make_config(tmp_path)
    summary = await play(config, wait_for_trainer=False)
    assert (summary["code"], summary["state"]) == (1, "failed")
    assert summary["cause"] == f"task scheduler of the controller ended: {cause}"


async def test_evaluations_run_before_between_and_after(tmp_path):
    config = make_config(
        tmp_path, {"name": "held", "num_episodes": 10, "every_steps": 3}, run__steps=6
    )
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    summary = await play(config, trainer=trainer)
    steps = [row["evaluation_step"] for row in evaluation_rows(config)]
    assert steps[0] == 0
    assert steps[-1] == 6
    assert len(steps) == 3
    assert summary["ledger"]["evaluated"] == 30 * 5


async def test_an_evaluation_finds_room_in_a_queue_that_holds_one_batch(tmp_path):
    one_batch = 16 * 3584
    evaluation = {
        "name": "held",
        "num_episodes": 40,
        "samples_per_task": 4,
        "every_steps": 3,
    }
    config = make_config(tmp_path, evaluation, run__steps=6, queue__max_bytes=one_batch)
    address = config.controller.address
    server = FakeServer(address, queue_bytes=one_batch)
    summary = await play(config, server)
    assert summary["steps"] == 6
    assert summary["ledger"]["evaluated"] == 3 * 40 * 5


@pytest.mark.parametrize("ordered", [False, True], ids=["sigterm", "ordered"])
async def test_a_server_that_drains_finishes_or_hands_back_what_it_has(
    tmp_path, ordered
):
    config = make_config(tmp_path, run__steps=40, controller__max_attempts=1)
    address = config.controller.address
    leaving = FakeServer(address, "leaving")
    staying = FakeServer(address, "staying")
    trainer = FakeTrainer(address)
    seen = {}

    async def drain(controller, tasks):
        await until(lambda: trainer.version.step >= 2)
        leaving.gate.clear()
        await until(lambda: leaving.gated)
        # The end of the run is not to come before the server has left.
        trainer.gate.clear()
        # The server must not leave before the test has seen that it is about to.
        leaving.departure.clear()
        published = len(leaving.loaded_versions)
        async with Client(address) as client:
            if ordered:
                there = "no rollout server x is in the run; there are: leaving, staying"
                with pytest.raises(ConfigError, match=there):
                    await client.drain("x", "test")
                await client.drain("leaving", "test")
            else:
                tasks.append(asyncio.ensure_future(leaving.leave()))
            while True:
                status = await client.status()
                states = {s.server_id: (s.state, s.cause) for s in status.servers}
                if states["leaving"][0] == "draining":
                    seen["cause"] = states["leaving"][1]
                    seen["leases"] = len(leaving.leases)
                    leaving.departure.set()
                if states["leaving"][0] in ("left", "dead"):
                    break
                await asyncio.sleep(0)
        seen["departed"] = states["leaving"]
        seen["published"] = len(leaving.loaded_versions) - published
        trainer.gate.set()

    summary = await play(config, leaving, staying, trainer=trainer, during=drain)
    assert summary["steps"] == 40
    assert seen["cause"] == ("test" if ordered else "it was told to stop")
    assert seen["departed"] == ("left", seen["cause"])
    assert seen["leases"] == len(leaving.leases)
    # The publish under way at most.
    assert seen["published"] <= 1
    handed_back = {
        lease.group_id
        for lease in leaving.leases
        if lease.group_id in {other.group_id for other in staying.leases}
    }
    assert handed_back
    assert summary["ledger"]["lost"] == 0
    # A drain costs no attempt: with one attempt a lost server would have set the groups aside.
    kinds = {r["kind"] for r in records_of(config.run_dir)}
    assert "set_aside" not in kinds
    assert "rollout server leaving has left" in summary["told"]


async def test_a_run_whose_episodes_all_fail_for_machines_stops_and_says_why(tmp_path):
    def unreachable(lease, member, attempt):
        return Failure(FailureKind.INFRASTRUCTURE, "the reference model failed")

    # No episode has its last attempt before the limit.
    limits = {"controller__stall_timeout_s": 1.0, "controller__max_attempts": 1000}
    config = make_config(tmp_path, **limits)
    server = FakeServer(config.controller.address, delay_s=0.05, judge=unreachable)
    summary = await play(config, server)
    assert summary["code"] == 1
    assert re.match(
        r"nothing moved for \d+ s of serving while waiting for ", summary["cause"]
    )
    assert summary["cause"].endswith(
        "; the last failure in e: the reference model failed"
    )
    assert summary["suspended_environments"] == {}


async def test_a_lease_without_progress_is_taken_back_and_set_aside_where_none_ever_comes(
    tmp_path,
):
    config = make_config(
        tmp_path,
        run__steps=4,
        controller__lease_timeout_s=5.0,
        controller__max_attempts=2,
    )
    server = FakeServer(config.controller.address)

    def hangs(lease, member, attempt):
        once = (lease.group_id, member, attempt) == ("g000001", 2, 0)
        return once or (lease.group_id == "g000002" and member > 0)

    server.hangs = hangs
    trainer = FakeTrainer(config.controller.address)
    summary = await play(config, server, trainer=trainer)
    assert summary["steps"] == 4
    again = [lease for lease in server.leases if lease.first_attempt]
    members = {lease.group_id: list(lease.members) for lease in again}
    assert members == {"g000001": [2], "g000002": [1, 2, 3]}
    trained = {
        t.trajectory_id.rsplit(".", 1)[0] for batch in trainer.batches for t in batch
    }
    assert "g000001.2.1" in trained
    causes = {r["group"]: r["cause"] for r in records_of(config.run_dir, "set_aside")}
    limit = "no episode ended in 5 s of serving (controller.lease_timeout_s)"
    assert causes == {"g000002": limit}


class RepeatingTrainer(FakeTrainer):
    """Reports each step again, as if the answer was lost, and then something else of it."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.refusals: list[str] = []

    async def report(self, report: trainer_pb2.StepReport) -> trainer_pb2.StepReceipt:
        receipt = await super().report(report)
        assert await super().report(report) == receipt
        for changed in ({"weight_digest": b"other"}, {"step": report.step + 5}):
            other = trainer_pb2.StepReport()
            other.MergeFrom(report)
            other.MergeFrom(trainer_pb2.StepReport(**changed))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await super().report(other)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            self.refusals.append(caught.value.details() or "")
        return receipt


async def test_a_step_that_is_reported_twice_counts_once_and_is_answered_alike(
    tmp_path,
):
    config = make_config(tmp_path, run__steps=2)
    address = config.controller.address
    trainer = RepeatingTrainer(address)
    summary = await play(config, trainer=trainer)
    assert summary["code"] == 0
    steps = [r["step"] for r in records_of(config.run_dir, "step")]
    assert steps == [0, 1]
    different, unknown = trainer.refusals[:2]
    assert different.startswith("step 1 was reported as version 1 with digest ")
    assert different.endswith(f"digest {b'other'.hex()} from batch b000000")
    assert unknown == (
        "a report of batch b000000 of step 6, but the batch that the trainer was given is none"
    )


async def test_a_used_run_folder_is_refused(tmp_path):
    config = make_config(tmp_path, run__resume="never")
    with Journal(config.run_dir / "journal") as journal:
        journal.append(kinds.Start(format=1, run_id="r-1"))
    with pytest.raises(ConfigError, match="holds a run already"):
        await Controller(config, OPEN).run()


async def test_a_refused_call_says_why_to_programs_too(tmp_path):
    config = make_config(tmp_path)
    address = config.controller.address
    trainer = FakeTrainer(address)
    trainer.hold_at(0)
    seen = []

    async def ask(controller, tasks):
        async with open_named(address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            spec = environment_pb2.EnvironmentSpec(
                name="e", reference="m:E", weight=1, timeout_s=1
            )
            spec.purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
            spec.num_workers = 1
            request = environment_pb2.SubmitEnvironmentRequest(spec=spec)
            other = environment_pb2.SubmitEnvironmentRequest(spec=spec)
            other.spec.name = "f"
            other.spec.adapter = "math"
            for call in (request, other):
                try:
                    await stub.SubmitEnvironment(call, timeout=60, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    is_told = has_reason(error, Reason.BAD_ARGUMENT)
                    seen.append((error.code(), error.details(), is_told))
        trainer.gate.set()

    await play(config, trainer=trainer, during=ask)
    (code, text, is_told), (_, wrong_adapter, _) = seen
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == "the run has an environment e already; choose another name"
    assert wrong_adapter == "adapter must be left out without lora.adapters, got 'math'"
    assert is_told


async def test_an_evaluation_that_cannot_be_loaded_does_not_hold_up_the_run(tmp_path):
    config = make_config(tmp_path, {"name": "held", "num_episodes": 4}, run__steps=3)
    server = FakeServer(config.controller.address, failing_environments=("held",))
    summary = await play(config, server)
    assert summary["code"] == 0
    assert summary["steps"] == 3
    assert summary["reward_heldout"] is None


async def test_health_and_reflection_tell_what_the_controller_serves(tmp_path):
    config = make_config(tmp_path)
    address = config.controller.address
    trainer = FakeTrainer(address)
    trainer.hold_at(0)
    seen = {}

    async def ask(controller, tasks):
        async with open_named(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(
                service="slipstream.v1.FleetService"
            )
            answer = await health.Check(request, timeout=60, wait_for_ready=True)
            seen["health"] = answer.status
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
            async for message in reflection.ServerReflectionInfo(
                iter(requests), timeout=60
            ):
                seen["services"] = {
                    s.name for s in message.list_services_response.service
                }
        trainer.gate.set()

    await play(config, trainer=trainer, during=ask)
    assert seen["health"] == health_pb2.HealthCheckResponse.SERVING
    names = ("Environment", "Fleet", "Status", "Trainer", "Trajectory")
    assert {f"slipstream.v1.{name}Service" for name in names} <= seen["services"]


async def test_a_stop_before_a_trainer_is_there_says_that_nothing_is_exported(tmp_path):
    async def stop(controller, tasks):
        async with Client(config.controller.address) as client:
            async for event in client.watch():
                if event.text.endswith(" listens"):
                    await client.stop("enough")
                    return

    config = make_config(tmp_path)
    away = FakeTrainer(f"127.0.0.1:{free_port('127.0.0.1')}")
    summary = await play(config, trainer=away, during=stop, wait_for_trainer=False)
    assert summary["state"] == "stopped"
    assert (
        "no trainer is there at the end: nothing is saved or exported"
        in summary["told"]
    )


async def test_a_clock_that_jumps_changes_no_measured_time(tmp_path, monkeypatch):
    config = make_config(tmp_path, run__steps=4)
    clock = time.time
    server, trainer = (
        kind(config.controller.address) for kind in (FakeServer, FakeTrainer)
    )
    trainer.hold_at(2)

    async def jump(*_):
        await trainer.until_held()
        monkeypatch.setattr("time.time", lambda: clock() + 1e6)
        trainer.gate.set()

    await play(config, server, trainer=trainer, during=jump)
    rows = rows_of(config.run_dir)
    for name in ("queue_s_mean", "episode_rest_s_mean"):
        assert max(row[name] for row in rows) < 1e5
