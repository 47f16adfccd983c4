"""Messages that no part of ours would send, to a controller in the middle of a run.

Whoever sends them may hold the token. The run goes on to its last step without a traceback, and the
honest servers, trainer and clients notice nothing.
"""

import asyncio

import grpc
import grpc.aio
import pytest
from slipstream.client import Client
from slipstream.protocol.codec import TRAINER_EPOCH
from slipstream.protocol.queue.base import seal
from slipstream.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    fleet_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectory_pb2,
)
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.liars import Liar, attacked, deliver, ended
from support.fakes.named_channel import open_named
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import records_of
from support.rigs.waiting import LIMIT_S, until


async def test_a_delivery_of_nobody_ends_its_stream_alone(tmp_path, caplog):
    lines = {
        "ä" * 150: "DeliverRequest.trajectory_id must have at most 128 bytes, got 300",
        "g000001\x1b[2J": "DeliverRequest.trajectory_id must hold ASCII letters, digits and ",
        "what": "trajectory 'what' is not sealed by the server that it names",
    }

    async def attack(channel, server):
        for trajectory_id, line in lines.items():
            request = trajectory_pb2.DeliverRequest(
                trajectory_id=trajectory_id, trajectory=b"junk"
            )
            code, details = await ended(deliver(channel, request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith(line)

    await attacked(tmp_path, caplog, attack)


async def test_nobody_delivers_under_the_epoch_of_another_server(tmp_path, caplog):
    async def attack(channel, server):
        liar = Liar(channel)
        key = (await liar.join()).delivery_key
        for number in range(20):
            name = f"g{number:06d}.0.0.{server.epoch:x}"
            for sealed in (b"junk", seal(key, name, b"junk")):
                request = trajectory_pb2.DeliverRequest(
                    trajectory_id=name, trajectory=sealed
                )
                code, details = await ended(deliver(channel, request))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert (
                    details
                    == f"trajectory {name!r} is not sealed by the server that it names"
                )

    summary = await attacked(tmp_path, caplog, attack)
    assert summary["ledger"]["quarantined"] == 0


async def test_nobody_sets_back_the_episodes_of_another_server(tmp_path):
    config = make_config(tmp_path, run__steps=6)
    address = config.controller.address
    server = FakeServer(address)
    trainer = FakeTrainer(address)
    trainer.hold_at(1)

    async def during(controller, tasks):
        async with asyncio.timeout(LIMIT_S), open_named(address) as channel:
            await trainer.until_held()
            server.gate.clear()
            trainer.gate.set()
            await until(
                lambda: len({group_id for group_id, _ in server.unfinished}) >= 2
            )
            liar = Liar(channel)
            key = (await liar.join()).delivery_key
            for group_id in sorted({group_id for group_id, _ in server.unfinished})[:2]:
                for attempt in (0, 1, 2, 999_998):
                    name = f"{group_id}.0.{attempt}.{liar.epoch:x}"
                    request = trajectory_pb2.DeliverRequest(
                        trajectory_id=name, trajectory=seal(key, name, b"junk")
                    )
                    await deliver(channel, request).read()
        server.gate.set()

    summary = await play(config, server, trainer=trainer, during=during)
    assert (summary["code"], summary["steps"]) == (0, 6)
    # No group lost its task or ran it again.
    records = records_of(config.run_dir)
    assert len([r for r in records if r.get("end") == "quarantined"]) == 8
    assert not [r for r in records if r["kind"] == "set_aside"]
    assert {lease.first_attempt for lease in server.leases} == {0}


async def test_a_key_is_handed_out_for_a_new_epoch_alone(tmp_path, caplog):
    async def attack(channel, server):
        liar = Liar(channel)
        liar.epoch = server.epoch
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await liar.join()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == (
            f"server liar: epoch {server.epoch:x} was given before, draw a new one"
        )

    await attacked(tmp_path, caplog, attack)


async def test_a_second_process_under_the_name_of_a_server_that_lives_is_turned_away(
    tmp_path, caplog
):
    """Two that throw each other out again and again would let neither of them serve."""

    async def attack(channel, server):
        first = Liar(channel, process=1)
        await first.join()
        for epoch in (78, 79):
            second = Liar(channel, epoch=epoch, process=2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.join()
            # A server tries again after this: the first one may be dead, and not be known as that.
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (
                "server liar: another process of this name has joined"
                in caught.value.details()
            )
        # The same process may come back before the end of its stream is known.
        await Liar(channel, epoch=80, process=1).join()
        texts = []
        async with Client(server.address) as client:
            async for event in client.watch():
                texts.append(event.text)
                if texts.count("rollout server liar joined") == 2:
                    break
        assert (
            len([text for text in texts if "a second rollout server liar" in text]) == 1
        )

    await attacked(tmp_path, caplog, attack)


async def test_a_server_that_delivers_junk_is_sent_away_and_the_run_goes_on(
    tmp_path, caplog
):
    async def attack(channel, server):
        liar = Liar(channel)
        key = (await liar.join()).delivery_key
        spans = trajectory_pb2.Trajectory(
            version_spans=[trajectory_pb2.VersionSpan()] * 5_000_000
        ).SerializeToString()
        names = [f"g{number:06d}.0.0.{liar.epoch:x}" for number in range(16)]
        requests = [
            trajectory_pb2.DeliverRequest(
                trajectory_id=n, trajectory=seal(key, n, data)
            )
            for n, data in zip(names, [spans, *[b"junk"] * 15], strict=True)
        ]
        call = deliver(channel, *requests)
        message = await liar.call.read()
        while message.WhichOneof("message") != "drain":
            await liar.say(heartbeat=fleet_pb2.ServerReport())
            message = await liar.call.read()
        assert "nothing but trajectories that cannot be trained" in message.drain.reason
        call.cancel()

    await attacked(tmp_path, caplog, attack)
    records = records_of(tmp_path / "r")
    causes = [r["cause"] for r in records if r.get("end") == "quarantined"]
    assert sorted(c.split(",")[0] for c in causes)[0].startswith(
        "it has 15000000 bytes"
    )
    assert len(causes) == 16


# After a report of ten generated tokens.
IMPOSSIBLE_REPORTS = [
    (
        {"heartbeat": fleet_pb2.ServerReport(generated_tokens=9)},
        "rollout server liar reports 9 generated tokens after 10: counters of an epoch never fall",
    ),
    (
        {
            "lease": fleet_pb2.LeaseReport(
                group_id="g1", closed=True, next_attempt=2**32 - 1
            )
        },
        "ServerMessage.lease.next_attempt must be between 0 and 1e+06, got 4294967295",
    ),
    (
        {"drained": fleet_pb2.ServerReport(uptime_s=float("nan"))},
        "ServerMessage.drained.uptime_s must be between 0 and 1e+09, got nan",
    ),
    *(
        (
            {
                "heartbeat": fleet_pb2.ServerReport(
                    **{"generated_tokens": 10, name: value}
                )
            },
            f"rollout server liar reports {value} {name.replace('_', ' ')} after ",
        )
        for name, value in {
            "generated_tokens": 10**12,
            "drafted_tokens": 10**12,
        }.items()
    ),
    *(
        (
            {"heartbeat": fleet_pb2.ServerReport(generated_tokens=10, **{name: 1e8})},
            f"rollout server liar reports 1e+08 {name.replace('_', ' ')} after ",
        )
        for name in ("busy_s", "paused_s", "uptime_s")
    ),
]


async def test_a_report_that_cannot_be_ends_the_stream_of_its_server(tmp_path, caplog):
    async def attack(channel, server):
        for epoch, (message, line) in enumerate(IMPOSSIBLE_REPORTS, 100):
            liar = Liar(channel, epoch=epoch)
            await liar.join()
            tens = fleet_pb2.ServerReport(generated_tokens=10, in_flight_tokens=10)
            await liar.say(heartbeat=tens)
            await liar.say(**message)
            refusal = await liar.refusal()
            assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.details().startswith(line)

    await attacked(tmp_path, caplog, attack)


async def test_a_trainer_that_is_refused_takes_nobodys_place(tmp_path, caplog):
    facts = {"world_size": 1, "layout_description": "a\nb", "num_senders": 1}
    lines = {
        "layout_description of a trainer must not be empty": {"layout_description": ""},
        "TrainerHello.num_senders must be between 0 and 65536, got 4294967295": {
            "num_senders": 2**32 - 1
        },
        "num_senders of a trainer must be at most its world_size, got 9 and 1": {
            "num_senders": 9
        },
    }

    async def attack(channel, server):
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        for line, hello in lines.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await trainer.Register(
                    trainer_pb2.TrainerHello(**(facts | hello)), timeout=LIMIT_S
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == line

    await attacked(tmp_path, caplog, attack)


async def test_no_call_of_a_trainer_counts_from_one_without_its_epoch(tmp_path, caplog):
    async def attack(channel, server):
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        calls = (
            (trainer.KeepPlace, trainer_pb2.PlaceRequest()),
            (trainer.Next, trainer_pb2.NextRequest()),
            (trainer.ReportStep, trainer_pb2.StepReport(step=2)),
            (trainer.StartPublish, trainer_pb2.PublishStart()),
            (trainer.FinishPublish, trainer_pb2.PublishResult()),
            (trainer.ReportCheckpoint, trainer_pb2.CheckpointReport()),
            (trainer.ReportWork, trainer_pb2.WorkReport()),
            (trainer.Finish, trainer_pb2.TrainerGoodbye()),
        )
        for metadata in ((), ((TRAINER_EPOCH, "0"),), ((TRAINER_EPOCH, "1"),)):
            for method, request in calls:
                call = method(request, timeout=LIMIT_S, metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call.read() if hasattr(call, "read") else call)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert caught.value.details() == "another trainer has taken over"

    await attacked(tmp_path, caplog, attack)


IMPOSSIBLE_ENVIRONMENTS = [
    (
        {"num_workers": 2**32 - 1},
        "SubmitEnvironmentRequest.spec.num_workers must be between 0",
    ),
    ({"num_workers": 0}, "num_workers must be between 1 and 256 with the 0 of other"),
    ({"weight": 5e-324}, "weight must be between 1e-06 and 1e+06, got 5e-324"),
    (
        {"name": ".."},
        "a name has 1 to 100 letters, digits and ._:-, a letter or digit first",
    ),
    ({"args_json": "[" * 60_000}, "args must be a JSON object: "),
    (
        {"chat_template_kwargs_json": "[" * 60_000},
        "chat_template_kwargs must be a JSON object: ",
    ),
    (
        {"chat_template_kwargs_json": '{"chat_template": "{{ 1 }}"}'},
        "chat_template_kwargs must not set 'chat_template', which servers set",
    ),
    (
        {"args_json": "a" * (30 << 20)},
        "SubmitEnvironmentRequest must have at most 131072 bytes",
    ),
]


async def test_an_environment_that_cannot_be_is_refused_in_one_line(tmp_path, caplog):
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    facts = {"name": "new", "reference": "m:E", "weight": 1.0, "timeout_s": 1.0}
    facts |= {"num_workers": 1, "purpose": purpose}

    async def attack(channel, server):
        environments = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for spec, line in IMPOSSIBLE_ENVIRONMENTS:
            request = environment_pb2.SubmitEnvironmentRequest(
                spec=environment_pb2.EnvironmentSpec(**(facts | spec))
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await environments.SubmitEnvironment(request, timeout=LIMIT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(line)
            assert "\n" not in caught.value.details()

    await attacked(tmp_path, caplog, attack)
