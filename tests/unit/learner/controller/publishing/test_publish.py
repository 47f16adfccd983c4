"""Publishes as the controller follows them, with servers that only get orders."""

import asyncio
import gc

import pytest
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.publishing.receivers import MAX_FAILED_PUBLISHES
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2, weights_pb2
from support.rigs.publishing_scene import (
    DIGESTS,
    FAILED,
    LOADED,
    READY,
    SERVING,
    Scene,
    next_order,
    publishing,
    run_of,
    serving,
    whole,
)
from support.rigs.waiting import LIMIT_S, until


@pytest.fixture
def run() -> ControlledRun:
    return run_of()


async def test_a_publish_through_a_kept_communicator_begins_with_its_order(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        order = await scene.ordered()
        assert order.begun
        receive = await next_order(scene.session)
        # The order to a server does not grow with the fleet.
        told = weights_pb2.PublishOrder()
        told.CopyFrom(order)
        told.ClearField("receivers")
        assert receive.receive.order == told
        # The server has it from the first publish.
        assert not receive.receive.layout.tensors
        commit = (await next_order(scene.session)).commit
        assert (commit.publish_id, commit.version.step) == (order.publish_id, 1)
        assert list(commit.bucket_digests) == DIGESTS
        # The server is done before the learner says so.
        await scene.loads(order)
        assert scene.session.version == PolicyVersion(0, 1)
        assert not (await scene.finish(order.publish_id)).discard_communicator
        # Nothing else is said to it.
        assert scene.sent() == []


@pytest.mark.parametrize("has_sent", [True, False])
async def test_a_server_that_serves_has_loaded_without_saying_it_apart(has_sent, run):
    async with serving(run) as scene:
        order = await scene.ordered()
        finishing = scene.finish(order.publish_id) if has_sent else None
        scene.say(order.publish_id, SERVING, bucket_digests=DIGESTS)
        await scene.until_serving()
        receipt = await (finishing or scene.finish(order.publish_id))
        assert not receipt.discard_communicator


async def test_servers_are_asked_while_the_trainer_makes_the_version(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        # The server serves what the trainer has, and is due when the next version is there.
        scene.session.version = PolicyVersion(0, 1)
        scene.publisher.ask_ahead(PolicyVersion(0, 2))
        publish_id = (await next_order(scene.session)).prepare.publish_id
        scene.say(publish_id, READY)
        scene.make_version(2)
        order = await scene.publisher.prepare(scene.trainer)
        assert order.begun
        # The server is not asked again.
        assert scene.sent() == ["receive", "commit"]
        scene.publisher.trainer_joined(1)


async def test_only_a_server_that_came_later_is_asked_when_others_have_answered(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        scene.publisher.ask_ahead(PolicyVersion(0, 1))
        scene.say((await next_order(scene.session)).prepare.publish_id, READY)
        other = scene.joined("b")
        preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
        scene.say((await next_order(other)).prepare.publish_id, READY, other)
        order = await preparing
        assert [receiver.server_id for receiver in order.receivers] == ["a", "b"]
        assert scene.sent() == []


async def test_a_server_has_the_ranks_behind_those_of_a_new_trainer_that_send(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        scene.publisher.trainer_joined(3)
        order = await scene.ordered()
        assert order.communicator.num_senders == 3
        assert [receiver.first_rank for receiver in order.receivers] == [3]
        assert order.new_communicator
        scene.publisher.trainer_joined(1)


async def test_an_answer_counts_for_one_publish_alone(run: ControlledRun) -> None:
    async with serving(run) as scene:
        for _ in range(2):
            scene.publisher.ask_ahead(PolicyVersion(0, 1))
            scene.say((await next_order(scene.session)).prepare.publish_id, READY)
            assert scene.sent() == []
        scene.trainer.ClearField("bucket_digests")
        assert await scene.publisher.prepare(scene.trainer) is not None
        preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
        scene.say((await next_order(scene.session)).prepare.publish_id, READY)
        assert await preparing is not None


@pytest.mark.parametrize("unknown", ["communicator_id", "bucket_digests", "version"])
async def test_a_publish_waits_for_the_trainer_when_something_is_not_known(
    run, unknown
):
    async with serving(run) as scene:
        scene.trainer.ClearField(unknown)
        order = await scene.ordered()
        assert not order.begun
        assert order.new_communicator == (unknown == "communicator_id")
        assert scene.session.is_serving
        assert scene.sent() == []


async def test_nobody_stands_still_while_a_probe_is_scored(run: ControlledRun) -> None:
    async with serving(run) as scene:
        scene.publisher.totals.publishes = run.config.weights.verify_every
        order = await scene.ordered()
        assert order.verify
        assert not order.begun
        assert not order.new_communicator


async def test_servers_do_not_wait_for_a_trainer_that_never_got_its_order(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        order = await scene.ordered()
        assert scene.sent() == ["receive", "commit"]
        # The trainer asks again: the answer was lost.
        assert await scene.publisher.prepare(scene.trainer) is None
        assert scene.session.state == fleet_pb2.SERVER_STATE_STALE
        assert (await next_order(scene.session)).abort.publish_id == order.publish_id
        scene.session.retry_publish_s = 0.0
        assert (await scene.ordered()).new_communicator


async def test_a_server_that_serves_the_version_keeps_it_when_the_rest_of_a_publish_fails(
    run,
):
    async with serving(run) as scene:
        order = await scene.ordered()
        scene.sent()
        await scene.loads(order)
        receipt = await scene.finish(order.publish_id, error="another server died")
        assert receipt.discard_communicator
        assert scene.session.is_serving
        assert scene.sent() == []


@pytest.mark.parametrize(
    ("report", "result"),
    [
        ({"phase": FAILED, "message": "late"}, {}),
        ({"phase": LOADED, "bucket_digests": [b"another"]}, {}),
        (
            {"phase": LOADED, "bucket_digests": DIGESTS},
            {"bucket_digests": [b"another"]},
        ),
        (
            {"phase": LOADED, "bucket_digests": DIGESTS},
            {"error": "a bucket was not sent"},
        ),
    ],
)
async def test_a_failure_of_a_begun_publish_counts_once_and_is_aborted_once(
    run, report, result
):
    async with serving(run) as scene:
        order = await scene.ordered()
        scene.sent()
        scene.say(order.publish_id, **report)
        receipt = await scene.finish(order.publish_id, **result)
        assert receipt.discard_communicator
        assert scene.session.state == fleet_pb2.SERVER_STATE_STALE
        assert scene.session.failed_publishes == 1
        assert scene.sent() == ["abort"]


async def test_a_server_lost_in_a_begun_publish_is_waited_for_no_longer(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        order = await scene.ordered()
        scene.fleet.remove(scene.session, "its stream ended")
        receipt = await scene.finish(order.publish_id)
    assert receipt.discard_communicator


@pytest.mark.filterwarnings("error")
async def test_a_trainer_that_has_sent_after_the_end_of_the_run_gets_its_receipt(
    run: ControlledRun,
) -> None:
    async with publishing(run) as scene:
        order = await scene.started()
        run.progress.fail("the disk is full")
        scene.fleet.remove(scene.session, "the run is over")
    # No task can begin any more.
    result = trainer_pb2.PublishResult(
        publish_id=order.publish_id, bucket_digests=DIGESTS
    )
    receipt = await scene.publisher.finish(result)
    gc.collect()
    assert receipt.discard_communicator


async def test_servers_that_were_told_nothing_go_on_when_a_publish_is_given_up(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        scene.trainer.ClearField("bucket_digests")
        assert not (await scene.ordered()).begun
        scene.publisher.trainer_joined(1)
        assert scene.session.is_serving
        assert scene.sent() == []


async def test_a_trainer_that_is_told_to_leave_its_communicator_is_given_a_new_one(run):
    async with publishing(run) as scene:
        first = await scene.ordered()
        assert (await scene.finish("one that is over")).discard_communicator
        second = await scene.ordered()
    assert second.new_communicator
    assert second.communicator.communicator_id != first.communicator.communicator_id


async def test_a_result_of_another_publish_leaves_the_one_at_hand_alone(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        order = await scene.ordered()
        assert (await scene.finish("one that is over")).discard_communicator
        assert scene.publisher._current
        await scene.loads(order)
        assert not (await scene.finish(order.publish_id)).discard_communicator


async def test_servers_are_told_once_to_receive_when_the_trainer_repeats_its_call(
    run: ControlledRun,
) -> None:
    async with publishing(run) as scene:
        start = scene.start_of(await scene.ordered())
        assert scene.publisher.start(start) == scene.publisher.start(start)
        assert scene.sent() == ["receive"]
        scene.publisher.trainer_joined(1)


async def test_servers_share_what_is_encoded_of_their_orders(
    run: ControlledRun,
) -> None:
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        scene = Scene(run, tasks)
        servers = [scene.session, scene.joined("b"), scene.joined("c")]
        start = scene.start_of(await scene.ordered(*servers))
        tensors = [TensorSpec(f"w{number}", "float32", (4, 4)) for number in range(16)]
        start.layout.CopyFrom(layout_to_pb(tensors, 64))
        scene.publisher.start(start)
        for other in servers[1:]:
            # The first one's was read when it was asked.
            assert other.outbox.pop().WhichOneof("message") == "prepare"
        orders = [server.outbox.pop() for server in servers]
        assert len({id(order.shared) for order in orders}) == 1
        assert len(orders[0].shared) > len(start.layout.SerializeToString()) > 0
        received = [whole(order).receive for order in orders]
        assert all(order.layout == start.layout for order in received)
        assert {order.order.publish_id for order in received} == {start.publish_id}
        assert sorted(order.first_rank for order in received) == [1, 2, 3]
        scene.publisher.trainer_joined(1)


async def test_a_trainer_lost_while_servers_load_leaves_none_of_them_loading(
    run: ControlledRun,
) -> None:
    async with publishing(run) as scene:
        order = await scene.started()
        assert scene.session.state == fleet_pb2.SERVER_STATE_LOADING
        # gRPC cancels a call whose client is gone.
        finishing = scene.finish(order.publish_id)
        await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert scene.session.state == fleet_pb2.SERVER_STATE_STALE
        assert scene.sent() == ["receive", "commit", "abort"]
        scene.session.retry_publish_s = 0.0
        assert scene.publisher.due() == [scene.session]


async def test_a_trainer_that_is_gone_takes_no_publish_of_its_successor_along(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        order = await scene.ordered()
        finishing = scene.finish(order.publish_id)
        await asyncio.sleep(0)
        scene.publisher.trainer_joined(1)
        other = scene.joined("b")
        second = await scene.ordered(other)
        finishing.cancel()
        await asyncio.wait((finishing,))
        started = scene.publisher.start(scene.start_of(second))
        assert [r.server_id for r in started] == ["b"]
        scene.publisher.trainer_joined(1)


async def test_a_server_that_took_its_weights_back_is_sent_them_again(
    run: ControlledRun,
) -> None:
    async with serving(run) as scene:
        scene.say("p000000", FAILED, message="of another publish")
        assert scene.session.is_serving
        scene.say("p000001", FAILED, message="the verdict on its probe came too late")
        assert scene.session.state == fleet_pb2.SERVER_STATE_STALE
        assert scene.session.cause == "the verdict on its probe came too late"
        scene.session.retry_publish_s = 0.0
        assert scene.publisher.due() == [scene.session]


async def test_a_probe_that_cannot_be_read_makes_its_server_stale_and_nothing_else(run):
    async with publishing(run) as scene:
        order = await scene.started()
        finishing = scene.finish(order.publish_id)
        scene.say(order.publish_id, LOADED, bucket_digests=DIGESTS)
        await finishing
        scene.say(order.publish_id, SERVING, probe_logprobs=b"odd")
        await until(lambda: scene.session.state == fleet_pb2.SERVER_STATE_STALE)
        assert "must be a multiple of 4 bytes, got 3" in scene.session.cause


async def fail_all_of_its_life(scene: Scene, session: ServerSession) -> None:
    """Fails MAX_FAILED_PUBLISHES publishes, after which the server is sent away."""
    for _ in range(MAX_FAILED_PUBLISHES):
        session.retry_publish_s = 0.0
        order = await scene.started(session)
        await scene.finish(order.publish_id, error="nobody came")
    assert scene.fleet.find(session.key) is None


async def test_buckets_may_take_longer_after_each_publish_that_fails_on_a_slow_machine(
    run,
):
    async with publishing(run) as scene:
        given_s = []
        for _ in range(5):
            scene.session.retry_publish_s = 0.0
            order = await scene.ordered()
            given_s.append(order.bucket_deadline_s)
            assert scene.publisher.start(scene.start_of(order))
            await scene.finish(order.publish_id, error="late")
        first_s = run.config.weights.bucket_deadline_s
        assert given_s == [first_s * times for times in (1, 2, 4, 8, 8)]
        messages = [
            event.text for event in run.events.kept() if "may take" in event.text
        ]
        assert messages[0] == (
            f"a publish failed: each bucket may take {2 * first_s:g} s from now on "
            f"(weights.bucket_deadline_s = {first_s:g})"
        )
        assert len(messages) == 3


async def test_a_run_ends_when_its_servers_come_back_and_no_publish_ever_succeeds(
    run: ControlledRun,
) -> None:
    async with publishing(run) as scene:
        await fail_all_of_its_life(scene, scene.session)
        assert not run.progress.is_over
        await fail_all_of_its_life(scene, scene.joined("a"))
        assert run.progress.state == status_pb2.RUN_STATE_FAILED
        assert run.progress.cause == (
            "no rollout server serves, and 16 publishes in a row to a failed, the last one: "
            "the learner could not send: nobody came"
        )


async def test_a_server_that_no_publish_reaches_does_not_end_a_run_in_which_another_one_serves(
    run,
):
    async with serving(run) as scene:
        scene.publisher.pin(scene.session)
        for _ in range(3):
            await fail_all_of_its_life(scene, scene.joined("b"))
        assert not run.progress.is_over


async def test_a_server_that_drains_is_sent_no_weights(run: ControlledRun) -> None:
    async with publishing(run) as scene:
        leaving = scene.session
        staying = scene.joined("b")
        assert scene.publisher.due() == [leaving, staying]
        preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
        publish_id = (await next_order(leaving)).prepare.publish_id
        # The server was ready, and then it was told to leave.
        scene.fleet.drains(leaving, "SIGTERM")
        for session in (leaving, staying):
            scene.say(publish_id, READY, session)
        order = await preparing
        assert [receiver.server_id for receiver in order.receivers] == ["b"]
        assert scene.publisher.due() == [staying]
        scene.publisher.trainer_joined(1)


async def test_a_server_that_begins_to_drain_while_it_loads_ends_the_publish_and_never_serves(
    run,
):
    async with publishing(run) as scene:
        order = await scene.started()
        scene.fleet.drains(scene.session, "SIGTERM")
        finishing = scene.finish(order.publish_id)
        scene.say(order.publish_id, LOADED, bucket_digests=DIGESTS)
        assert not (await finishing).discard_communicator
        assert scene.sent()[-2:] == ["receive", "commit"]
        scene.say(order.publish_id, SERVING)
    assert scene.session.state == fleet_pb2.SERVER_STATE_DRAINING
    assert scene.fleet.serving() == []


async def test_a_receiver_that_left_before_the_weights_were_sent_makes_no_other_stale(
    run,
):
    async with publishing(run) as scene:
        leaving = scene.session
        staying = scene.joined("b")
        order = await scene.ordered(leaving, staying)
        scene.fleet.remove(leaving, "its stream ended")
        assert scene.publisher.start(scene.start_of(order)) == []
        assert staying.state == fleet_pb2.SERVER_STATE_JOINING
        assert scene.publisher.due() == [staying]
        assert (await scene.ordered(staying)).new_communicator


async def test_the_trainer_hears_who_is_still_there_while_all_meet(
    run: ControlledRun,
) -> None:
    async with publishing(run) as scene:
        order = await scene.ordered()
        question = trainer_pb2.PublishStart(
            publish_id=order.publish_id, is_question=True
        )
        start = trainer_pb2.PublishStart(publish_id=order.publish_id)
        scene.publisher.start(start)
        orders = scene.sent()
        assert [r.server_id for r in scene.publisher.start(question)] == [
            scene.session.name
        ]
        # A question sends no message to any server.
        assert orders[-1] == "receive"
        assert scene.sent() == []
        scene.say(order.publish_id, FAILED, message="could not join")
        # A receiver's failure acts at once: it is not known only when the trainer has sent.
        assert scene.session.state == fleet_pb2.SERVER_STATE_STALE
        assert scene.sent() == ["abort"]
        assert scene.publisher.start(question) == []
        other = trainer_pb2.PublishStart(publish_id="another", is_question=True)
        assert scene.publisher.start(other) == []
