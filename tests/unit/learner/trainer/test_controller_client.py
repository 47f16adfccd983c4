import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from slipstream.core import patience
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer import controller_client
from slipstream.learner.trainer.controller_client import (
    ControllerClient,
    ControllerLost,
    Outdated,
)
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.rich_errors import Reason
from slipstream.v1 import trainer_pb2 as pb
from support.fakes.fake_controller import (
    FakeController,
    batch_order,
    make_batch,
    stop_order,
)
from support.fakes.small_configs import small_config
from support.rigs.waiting import LIMIT_S, wait_until


def config(
    address: str, tmp_path: Path, *, stall_timeout_s: float = 600.0, **sections: object
) -> Config:
    return small_config(
        run={"name": "client", "steps": 1},
        model={"path": str(tmp_path)},
        algorithm={"groups_per_step": 1},
        controller={"address": address, "stall_timeout_s": stall_timeout_s},
        **sections,
    )


@contextlib.contextmanager
def connected(
    tmp_path: Path, orders: Sequence[list[pb.Directive]] = (), **sections: object
) -> Iterator[tuple[FakeController, ControllerClient]]:
    """A controller and a client of it, both closed at the end."""
    token = "t" * 40 if sections else None
    with FakeController(orders, token=token) as controller:
        client = ControllerClient(config(controller.address, tmp_path, **sections))
        yield controller, client
        client.close()


def ask(client: ControllerClient) -> list[pb.Directive]:
    digests = [b"one", b"two"]
    return [
        *client.next(
            PolicyVersion(0, 3),
            communicator_id="c-1",
            bucket_digests=digests,
        )
    ]


def test_next_hands_out_all_messages_of_an_order(tmp_path: Path) -> None:
    order = batch_order(
        make_batch(
            0,
            num_groups=2,
            group_size=3,
            vocab_size=9,
            max_tokens=8,
        )
    )
    with connected(tmp_path, [order]) as (controller, client):
        assert ask(client) == order
        (request,) = controller.requests
        assert (request.version.step, request.communicator_id) == (3, "c-1")
        assert list(request.bucket_digests) == [b"one", b"two"]


def test_calls_of_next_do_not_pile_up(tmp_path: Path) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(item).__name__ == "_CallState" for item in gc.get_objects())

    orders = [[pb.Directive(wait=pb.WaitOrder())]] * 20
    with connected(tmp_path, orders) as (_, client):
        before = kept()
        for _ in orders:
            ask(client)
        assert kept() <= before + 1


def test_a_batch_that_breaks_off_goes_on_behind_its_last_message(
    tmp_path: Path,
) -> None:
    batch = make_batch(
        0,
        num_groups=3,
        group_size=3,
        vocab_size=9,
        max_tokens=8,
    )
    order = batch_order(batch, chunk_size=2)
    # The second answer breaks before it brings anything new, and the third further on.
    answers = [
        [*order[:3], None],
        [*order[:2], None],
        [*order[:4], None],
        order,
    ]
    with connected(tmp_path, answers) as (controller, client):
        assert ask(client) == order
        assert len(controller.requests) == 4
        assert all(request == controller.requests[0] for request in controller.requests)


def test_a_batch_that_breaks_off_and_is_another_one_then_starts_the_trainer_again(
    tmp_path,
):
    first, second = (
        batch_order(
            make_batch(
                step,
                num_groups=2,
                group_size=3,
                vocab_size=9,
                max_tokens=8,
            )
        )
        for step in (0, 1)
    )
    with (
        connected(
            tmp_path,
            [[*first[:2], None], second],
        ) as (_, client),
        pytest.raises(
            RuntimeError, match="batch batch-0 broke off, and the controller gives ano"
        ),
    ):
        ask(client)


def test_a_batch_that_arrives_comes_before_a_stop(tmp_path: Path) -> None:
    order = batch_order(
        make_batch(
            0,
            num_groups=3,
            group_size=3,
            vocab_size=9,
            max_tokens=8,
        )
    )
    with connected(tmp_path, [order]) as (_, client):
        messages = client.next(
            PolicyVersion(0, 3),
            communicator_id="",
            bucket_digests=[],
        )
        first = next(messages)
        client.stop("now")
        assert [first, *messages] == order
        assert ask(client) == stop_order("now", without_model=True)


def test_stop_ends_a_call_of_next_that_waits(tmp_path: Path) -> None:
    with connected(tmp_path) as (controller, client):
        requests = controller.asked
        waiter = threading.Thread(
            target=lambda: (
                requests.wait(LIMIT_S),
                client.stop("now"),
            )
        )
        waiter.start()
        assert ask(client) == stop_order("now", without_model=True)
        assert ask(client) == stop_order("now", without_model=True)
        waiter.join()


def test_controller_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    controller = FakeController([])
    client = ControllerClient(config(controller.address, tmp_path))
    timer = threading.Timer(1.0, controller.__enter__)
    timer.start()
    assert client.register(pb.TrainerHello(world_size=1)).run_id == "run"
    timer.join()
    controller.__exit__()
    client.close()


def test_a_controller_that_stays_away_is_lost(tmp_path: Path) -> None:
    client = ControllerClient(config("127.0.0.1:1", tmp_path, stall_timeout_s=1.0))
    # Not a RunFailed, after which nobody would start the ranks again.
    with pytest.raises(
        ControllerLost, match=r"127\.0\.0\.1:1 failed Register: UNAVAILABLE"
    ):
        client.register(pb.TrainerHello(world_size=1))
    client.report_failure(pb.TrainerFailure(message="unheard"))
    client.close()


class Unanswered(grpc.RpcError):
    """The error of a call that had no answer in its time."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Slow:
    """Takes the given seconds of a clock for each call without an answer, then answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *took_s: float) -> None:
        self._now_s, self._took_s = 0.0, list(took_s)
        clock = SimpleNamespace(monotonic=lambda: self._now_s, sleep=self._pass)
        for module in (controller_client, patience):
            monkeypatch.setattr(module, "time", clock)

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds

    def __call__(self, request: object, *, timeout: float, **_: object) -> str:
        if not self._took_s:
            return f"answered within {timeout:g} s"
        self._pass(self._took_s.pop(0))
        raise Unanswered


def test_a_deadline_that_passed_while_the_trainer_stood_still_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ControllerClient(config("127.0.0.1:1", tmp_path))
    asleep = Slow(monkeypatch, 5400.0, 29.0)
    assert client._retried("ReportStep", asleep, None, 30.0) == "answered within 30 s"
    client.close()


def test_a_controller_that_stands_still_is_waited_for_as_long_as_servers_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ControllerClient(config("127.0.0.1:1", tmp_path))
    still = Slow(monkeypatch, *[30.0] * 19)
    assert client._retried("ReportStep", still, None, 30.0) == "answered within 30 s"
    still = Slow(monkeypatch, *[30.0] * 20)
    with pytest.raises(Unanswered):
        client._retried("ReportStep", still, None, 30.0)
    client.close()


def test_other_ranks_are_told_to_ask_again_while_no_controller_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ControllerClient(config("127.0.0.1:1", tmp_path))
    # The other ranks wait for 600 s in a collective; the controller may be away for longer.
    client._stub = SimpleNamespace(Next=Slow(monkeypatch, 200.0, 150.0, 250.0))
    assert ask(client) == [pb.Directive(wait=pb.WaitOrder())]
    with pytest.raises(ControllerLost, match="failed Next: DEADLINE_EXCEEDED"):
        ask(client)
    client.close()


def until_places(controller: FakeController, count: int) -> None:
    wait_until(lambda: controller.places >= count)


def report(step: int) -> pb.StepReport:
    version = version_to_pb(PolicyVersion(0, step + 1))
    return pb.StepReport(
        step=step, version=version, weight_digest=f"d{step + 1}".encode()
    )


@pytest.mark.parametrize("ends_in_order", [False, True])
def test_a_trainer_registers_again_with_its_version_while_it_trains(
    tmp_path, ends_in_order
):
    hello = pb.TrainerHello(world_size=1, weight_digest=b"d0")
    with connected(tmp_path) as (controller, client):
        controller.ends_in_order = ends_in_order
        client.register(hello)
        assert client.report_step(report(0)) == PolicyVersion(0, 1)
        until_places(controller, 1)
        controller.forget()
        # No call of the trainer is needed, which may be in a long step.
        until_places(controller, 2)
        again = controller.hellos[1]
        assert (
            again.version.step,
            again.weight_digest,
            again.world_size,
        ) == (1, b"d1", 1)
        controller.forget()
        # A call that comes before the trainer is registered again waits for that.
        assert client.report_step(report(1)) == PolicyVersion(0, 2)
        assert [hello.version.step for hello in controller.hellos] == [
            0,
            1,
            1,
        ]


def test_a_trainer_of_another_version_than_the_run_starts_again(tmp_path: Path) -> None:
    with connected(tmp_path) as (controller, client):
        client.register(pb.TrainerHello(world_size=1))
        until_places(controller, 1)
        controller.incarnation = 1
        controller.forget()
        until_places(controller, 2)
        # The trainer has registered again meanwhile, so that the controller would take each call.
        with pytest.raises(
            RuntimeError, match="the run calls the trainer's version 0 0/1 now"
        ):
            client.report_step(report(0))
        assert controller.steps == []


def test_an_outdated_trainer_is_told_so_and_may_register_again(tmp_path: Path) -> None:
    with connected(tmp_path) as (controller, client):
        controller.refusals.append(Reason.OUTDATED)
        with pytest.raises(Outdated, match="outdated"):
            client.register(pb.TrainerHello(world_size=1))
        newer = pb.TrainerHello(
            world_size=1,
            version=version_to_pb(PolicyVersion(0, 4)),
        )
        assert client.register(newer).version.step == 4


def test_a_trainer_that_another_one_left_behind_starts_again(tmp_path: Path) -> None:
    with connected(tmp_path) as (controller, client):
        client.register(pb.TrainerHello(world_size=1))
        until_places(controller, 1)
        controller.refusals.append(Reason.OUTDATED)
        controller.forget()
        wait_until(lambda: not controller.refusals)
        # Not a RunFailed: the ranks start again, from the newest checkpoint.
        with pytest.raises(Outdated):
            client.report_step(report(0))


def test_every_call_carries_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 40)
    security = {"token_file": str(tmp_path / "token")}
    methods = pb.DESCRIPTOR.services_by_name["TrainerService"].methods_by_name
    orders = [[pb.Directive(wait=pb.WaitOrder())]]
    with connected(tmp_path, orders, security=security) as (controller, client):
        client.register(pb.TrainerHello(world_size=1))
        ask(client)
        client.report_step(pb.StepReport())
        client.report_pass(pb.PassReport())
        client.start_publish(pb.PublishStart(publish_id="p"), join_deadline_s=1.0)
        client.has_all_receivers("p", 1)
        client.finish_publish(pb.PublishResult())
        client.report_checkpoint(pb.CheckpointReport())
        client.report_stored(pb.StoredReport())
        client.report_work(Activity())
        client.report_failure(pb.TrainerFailure())
        client.set_batch_aside(pb.TrainerFailure())
        client.finish(pb.TrainerGoodbye())
        until_s = time.monotonic() + LIMIT_S
        while controller.guard.admitted < set(methods) and time.monotonic() < until_s:
            time.sleep(0.005)
    assert controller.guard.refused == set()
    assert controller.guard.admitted == set(methods)
