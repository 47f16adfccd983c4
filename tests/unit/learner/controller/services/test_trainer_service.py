"""Calls of the trainer, and of servers turned away."""

import asyncio
import re
from contextlib import aclosing

import pytest
from google.rpc import error_details_pb2, status_pb2
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.types import PolicyVersion, ServerId
from slipstream.learner.controller.loop import TrainerOrders, batch_wait
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.run import (
    HEARD_S,
    ControlledRun,
    LoopClock,
    RunProgress,
)
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.services.fleet_service import FleetServicer
from slipstream.learner.controller.services.trainer_service import (
    RESERVED_S,
    TrainerPlace,
    TrainerServicer,
)
from slipstream.learner.controller.tasks import Relay
from slipstream.learner.controller.trajectories.formed_batch import FormedBatch, Trained
from slipstream.protocol.codec import TRAINER_EPOCH, version_to_pb
from slipstream.protocol.queue.grpc import GrpcReceiver
from slipstream.protocol.rich_errors import Reason
from slipstream.v1 import fleet_pb2, trainer_pb2
from support.fakes.queue_seals import without_seal
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.lease_rig import book_of
from support.rigs.publishing_scene import joined, run_of


class OneBatch:
    """Has given the batch of the first step, and takes the report of it."""

    untried = None
    made = PolicyVersion(0, 1)
    missing: str | None = None

    def first_missing(self, step: int) -> str | None:
        return self.missing

    def answered(self, report: trainer_pb2.StepReport) -> None:
        return None

    async def take_up(self, message: object, trainer: PolicyVersion) -> None:
        pass

    async def durable(self) -> None:
        pass

    def trained(self, report: trainer_pb2.StepReport) -> Trained:
        return Trained(FormedBatch(report.step, "b000000", ()), self.made, again=False)


class Unfinished(Part):
    """What the run waits for at its end."""

    def is_done(self) -> bool:
        return False


class Refused(Exception):
    """A call ended with this text and reason."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class Call:
    """The context of a call with an epoch, or without one."""

    def __init__(self, epoch: int | str = 0) -> None:
        self._epoch = epoch

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(TRAINER_EPOCH, str(self._epoch))] if self._epoch else []

    def time_remaining(self) -> float:
        return 10.0

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def abort(self, code: object, text: str, metadata: object) -> None:
        assert isinstance(metadata, tuple)
        _, data = metadata[0]
        status = status_pb2.Status.FromString(data)
        info = error_details_pb2.ErrorInfo()
        detail = status.details[0]
        detail.Unpack(info)
        raise Refused(text, info.reason)


def new_servicer(run: ControlledRun) -> TrainerServicer:
    return TrainerServicer(run, book_of(), OneBatch(), None, (Unfinished(),))


def servicer_of(run: ControlledRun) -> TrainerServicer:
    """The service of a controller with which the trainer of epoch 1 has registered."""
    servicer = new_servicer(run)
    servicer.place.epoch = 1
    return servicer


async def has_its_place() -> None:
    """Ends no call: no other trainer has come."""


class NoOrder(TrainerOrders):
    """Counts how often they were asked for, and never has one."""

    num_asked = 0

    def __init__(self, run: ControlledRun) -> None:
        super().__init__(run, None, None, None, ())  # type: ignore[arg-type]

    async def _order(self, request: trainer_pb2.NextRequest) -> None:
        self.num_asked += 1


@pytest.mark.parametrize("client_loop", [True, False])
async def test_what_a_client_orders_goes_to_the_trainer_without_a_moment_for_more(
    client_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(
        controller={"client_loop": client_loop},
        model={"path": "m", "dtype": "float32"},
        learner={"shared_prefix_tokens": 0},
    )
    servicer = new_servicer(run)
    orders = servicer.orders = NoOrder(run)
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    context = Call(servicer.place.take(HELLO, Call()))
    asks = asyncio.create_task(anext(servicer.Next(trainer_pb2.NextRequest(), context)))
    for _ in range(5):
        await asyncio.sleep(0)
    run.signal.notify()
    for _ in range(5):
        await asyncio.sleep(0)
    assert orders.num_asked == 1 + client_loop
    asks.cancel()


async def test_a_version_that_was_made_is_waited_for_no_more() -> None:
    run = run_of()
    servicer = servicer_of(run)
    run.progress.waits_for("the trainer to make version 1")
    await servicer.ReportStep(trainer_pb2.StepReport(step=0), Call(1))
    assert run.progress.version == PolicyVersion(0, 1)
    assert run.progress.waiting_for == "the trainer to ask for its next batch"


async def test_a_trainer_that_leaves_before_the_end_fails_the_run() -> None:
    run = run_of()
    servicer = servicer_of(run)
    await servicer.ReportStep(trainer_pb2.StepReport(step=0), Call(1))
    await servicer.Finish(trainer_pb2.TrainerGoodbye(), Call(1))
    # Otherwise the run would wait for it until `controller.stall_timeout_s`.
    assert run.progress.has_failed
    assert run.progress.cause.startswith(
        "the trainer left at version 1, told to by SIGTERM or an earlier controller;"
    )


async def test_a_step_that_came_out_different_is_told() -> None:
    run = run_of()
    servicer = servicer_of(run)
    was = trainer_pb2.StepReport(step=0, version=version_to_pb(PolicyVersion(0, 1)))
    await servicer.ReportStep(was, Call(1))
    assert not [event for event in run.events.kept() if "different" in event.text]
    servicer._former.made = PolicyVersion(1, 1)  # type: ignore[attr-defined]
    await servicer.ReportStep(was, Call(1))
    (warning,) = [
        event.text for event in run.events.kept() if "different" in event.text
    ]
    assert warning == (
        "step 1 came out different when it was trained again: its weights are version 1/1 now, "
        "and are sent again"
    )


@pytest.mark.parametrize(
    ("step", "missing", "said"),
    [
        (4, None, "the run is at version 3; a trainer of version 4 cannot go on"),
        (2, "the batch of step 3", "the batch of step 3 is missing; "),
    ],
)
async def test_a_trainer_that_cannot_go_on_is_refused_before_it_takes_the_place(
    step: int, missing: str | None, said: str
) -> None:
    run = run_of()
    run.progress.reached(PolicyVersion(0, 3))
    servicer = new_servicer(run)
    servicer._former.missing = missing  # type: ignore[attr-defined]
    with pytest.raises(Refused, match=f"^{re.escape(said)}"):
        await servicer.Register(hello_of(step), Call())
    await servicer.place.check_free(HELLO, Call())


def hello_of(step: int) -> trainer_pb2.TrainerHello:
    return trainer_pb2.TrainerHello(
        process="host here, process 1",
        world_size=1,
        layout_description="one rank",
        version=version_to_pb(PolicyVersion(0, step)),
    )


async def test_a_trainer_whose_batches_went_is_sent_for_the_newest_checkpoint(
    tmp_path,
) -> None:
    run = run_of(run={"name": "r", "steps": 9, "dir": str(tmp_path)})
    run.progress.reached(PolicyVersion(0, 3))
    servicer = new_servicer(run)
    servicer._former.missing = "the batch of step 1"  # type: ignore[attr-defined]
    save_checkpoint(run.config.run_dir / CHECKPOINTS, 2)
    removed = "was removed, and there is a checkpoint of version 2"
    with pytest.raises(Refused, match=removed) as refusal:
        await servicer.Register(hello_of(0), Call())
    assert refusal.value.reason == Reason.OUTDATED.value
    # Without a newer checkpoint the batch is lost.
    cause = "the batch of step 1 is missing; put it back"
    with pytest.raises(Refused, match=cause) as refusal:
        await servicer.Register(hello_of(2), Call())
    assert refusal.value.reason == Reason.WRONG_STATE.value


async def test_batches_that_go_while_a_trainer_waits_for_its_place_are_no_news_to_it() -> (
    None
):
    run = run_of()
    servicer = new_servicer(run)
    servicer._former.missing = "the batch of step 1"  # type: ignore[attr-defined]
    servicer.place.take(HELLO, Call())
    with pytest.raises(Refused, match="has the place in this run") as refusal:
        await servicer.Register(hello_of(0), Call())
    assert refusal.value.reason == Reason.PLACE_TAKEN.value


async def test_a_failure_of_who_has_no_place_fails_no_run_whose_trainer_lives() -> None:
    run = run_of()
    run.clock = clock = SetClock()
    run.progress = RunProgress(run, "r-1")
    servicer = new_servicer(run)
    failure = trainer_pb2.TrainerFailure(
        message="no such model",
        rank=1,
        final=True,
    )
    await servicer.ReportFailure(failure, Call())
    clock.time_s = HEARD_S
    assert (run.progress.has_failed, run.progress.unheard_failure) == (False, "")
    run.progress.trainer_registered(())
    clock.time_s = 3 * HEARD_S
    assert run.progress.unheard_failure == ""


async def test_a_failure_of_who_has_no_place_is_the_run_s_if_no_trainer_is_heard_of() -> (
    None
):
    run = run_of()
    run.clock = clock = SetClock()
    run.progress = RunProgress(run, "r-1")
    servicer = new_servicer(run)
    failure = trainer_pb2.TrainerFailure(
        message="no such model",
        rank=1,
        final=True,
    )
    await servicer.ReportFailure(failure, Call())
    clock.time_s = HEARD_S - 1
    # A second trainer loads its model.
    await servicer.ReportWork(trainer_pb2.WorkReport(), Call())
    clock.time_s = 2 * HEARD_S - 1
    assert run.progress.unheard_failure == ""
    clock.time_s = 2 * HEARD_S
    assert run.progress.unheard_failure == "trainer rank 1: no such model"


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_failure_of_who_has_no_place_blames_no_batch(rank: int) -> None:
    """Rank 0 of the trainer that has the place would have its epoch; its other ranks have none."""
    run = run_of()
    servicer = new_servicer(run)
    servicer._former.untried = FormedBatch(4, "b000004", ())  # type: ignore[attr-defined]
    servicer.place.take(HELLO, Call())
    failure = trainer_pb2.TrainerFailure(message="lost", rank=rank)
    await servicer.ReportFailure(failure, Call())
    run.progress.fail("the disk is full")
    assert ("batch b000004" in run.progress.cause) == (rank > 0)


async def test_a_failure_of_an_earlier_trainer_changes_nothing() -> None:
    run = run_of()
    servicer = servicer_of(run)
    failure = trainer_pb2.TrainerFailure(message="out of memory", rank=3, final=True)
    await servicer.ReportFailure(failure, Call(2))
    assert (run.progress.has_failed, [*run.events.kept()]) == (False, [])
    await servicer.ReportFailure(failure, Call(1))
    assert run.progress.cause == "trainer rank 3: out of memory"


@pytest.mark.parametrize(("num_steps", "what"), [(0, "untrained"), (1, "trained")])
async def test_a_model_that_no_step_has_changed_is_called_untrained(num_steps, what):
    run = run_of()
    servicer = servicer_of(run)
    for step in range(num_steps):
        await servicer.ReportStep(trainer_pb2.StepReport(step=step), Call(1))
    run.progress.stop("enough")
    await servicer.Finish(trainer_pb2.TrainerGoodbye(export_path="final"), Call(1))
    assert [event.text for event in run.events.kept()][
        -1
    ] == f"the {what} model lies in final"
    assert servicer.goodbye is not None and not run.progress.has_failed


@pytest.mark.parametrize("has_failed", [False, True])
async def test_a_run_that_has_failed_orders_no_export(*, has_failed: bool) -> None:
    """Nothing would wait for its end: whether there is a model would be chance."""
    run = run_of()
    if has_failed:
        run.progress.fail("the disk is full")
    else:
        run.progress.stop("enough")
    order = await new_servicer(run).orders.next(
        trainer_pb2.NextRequest(), 0.0, has_its_place
    )
    assert order.stop.reason == run.progress.cause
    assert order.stop.without_model is has_failed


HELLO = trainer_pb2.TrainerHello(process="host here, process 1")


class SetClock(LoopClock):
    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


async def test_a_place_that_is_not_kept_is_free_after_a_while() -> None:
    run = run_of()
    run.clock = clock = SetClock()
    place = TrainerPlace(run)
    place.take(HELLO, Call())
    clock.time_s = RESERVED_S - 0.1
    other = trainer_pb2.TrainerHello(process="host far, process 7")
    for _ in range(2):
        with pytest.raises(
            Refused, match="host here, process 1 has the place in this run"
        ):
            await place.check_free(other, Call())
    (warning,) = [event.text for event in run.events.kept()]
    waits = "a second trainer, of host far, process 7, waits: the trainer of host "
    assert warning.startswith(waits)
    assert warning.endswith(" s ago; end it, or wait until it is gone")
    clock.time_s = RESERVED_S
    await place.check_free(other, Call())


async def test_a_place_is_kept_for_as_long_as_a_stream_is_open() -> None:
    run = run_of()
    run.clock = clock = SetClock()
    place = TrainerPlace(run)
    epoch = place.take(HELLO, Call())
    async with aclosing(place.keep(Call(epoch))) as messages:
        await anext(messages)
        clock.time_s = 100 * RESERVED_S
        with pytest.raises(Refused, match="has the place in this run"):
            await place.check_free(HELLO, Call())
    await place.check_free(HELLO, Call())
    # The trainer may come back until another trainer has taken the place.
    await place.check(Call(epoch))
    place.take(HELLO, Call())
    for late in (place.check(Call(epoch)), anext(place.keep(Call(epoch)))):
        with pytest.raises(Refused, match="another trainer has taken over"):
            await late


async def test_who_waits_for_an_order_gets_none_when_another_trainer_takes_the_place() -> (
    None
):
    run = run_of()
    servicer = new_servicer(run)
    orders = servicer.orders = NoOrder(run)
    context = Call(servicer.place.take(HELLO, Call()))
    waiting = asyncio.create_task(
        anext(servicer.Next(trainer_pb2.NextRequest(), context))
    )
    while not orders.num_asked:
        await asyncio.sleep(0)
    servicer.place.take(HELLO, Call())
    with pytest.raises(Refused, match="another trainer has taken over"):
        await waiting


async def test_a_trainer_that_loads_says_how_much_it_has_read() -> None:
    run = run_of()
    servicer = new_servicer(run)
    report = trainer_pb2.WorkReport(loaded_bytes=3_210_000_000)
    await servicer.ReportWork(report, Call())
    assert run.progress.waiting_for == "the trainer to load its model, 3.2 GB so far"
    servicer.place.take(HELLO, Call())
    # Somebody else loads: it is no news of the trainer that is there.
    with pytest.raises(Refused, match="another trainer has taken over"):
        await servicer.ReportWork(report, Call())


@pytest.mark.parametrize("epoch", ["0", "1"])
async def test_nobody_has_the_place_before_a_trainer_has_registered(epoch: str) -> None:
    run = run_of()
    servicer = new_servicer(run)
    with pytest.raises(Refused, match="no trainer has registered since the"):
        await servicer.Finish(trainer_pb2.TrainerGoodbye(), Call(epoch))


async def test_a_second_process_of_a_name_is_turned_away_with_one_event() -> None:
    run = run_of()
    fleet = Fleet(run)
    joined(fleet, "s").hello.process = 1
    servicer = FleetServicer(fleet, run, Relay({}), GrpcReceiver(without_seal).waiting)
    hello = fleet_pb2.ServerHello(server_id="s", process=2, host="there")
    for _ in range(2):
        with pytest.raises(Refused):
            await servicer._check_name_is_free(hello, Call())  # type: ignore[arg-type]
    messages = [
        event.text for event in run.events.kept() if "on there, waits" in event.text
    ]
    assert len(messages) == 1


def test_a_wait_for_the_share_of_an_environment_is_named() -> None:
    book = book_of(groups_per_step=2)
    group = book.lease("slow", 0, 0, ServerKey(ServerId("a"), 1), 0)
    assert batch_wait(book, [group, group]) == (
        "2 groups of slow, which belong to the shares of step 1"
    )
    assert (
        batch_wait(book, []) == "groups for step 1: 0 of 2 are complete, 1 are leased"
    )
