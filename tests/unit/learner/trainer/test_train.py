"""The order in which the trainer's loop does things, and which of its failures would come again."""

import contextlib
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from slipstream.core.errors import (
    FINAL_ERROR,
    NOT_STARTED,
    ConfigError,
    RunFailed,
    UntrainableBatch,
)
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.__main__ import exit_code
from slipstream.learner.trainer.batches.batch import Batch, Order
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.learner.trainer.train import StartAgain, Trainer
from slipstream.v1 import trainer_pb2, weights_pb2
from support.fakes.fake_controller import make_batch


class Loop(Trainer):
    """A trainer that only notes its orders."""

    def __init__(self, *orders: Order) -> None:
        self.seen: list[str] = []
        self._orders = list(orders)
        self._ranks = SimpleNamespace(is_main=True, activity=Activity())
        self._version = PolicyVersion(0, 0)
        self._publisher = SimpleNamespace(
            run=lambda order, _: self.seen.append(order.publish_id)
        )
        self._client = SimpleNamespace()
        self.stages = SimpleNamespace(measure=lambda _: contextlib.nullcontext())
        self._checkpointer = SimpleNamespace(poll=lambda: self.seen.append("poll"))
        self._periodic = SimpleNamespace(poll=lambda: None)

    def _register(self) -> None:
        self.seen.append("register")

    def _next_order(self) -> Order:
        return self._orders.pop(0)

    def _tell(self, saved: object) -> None:
        assert saved is None

    def _finish(self, order: trainer_pb2.StopOrder) -> None:
        self.seen.append(order.reason)


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Judge(Trainer):
    """A trainer of one rank whose controller answers whether it sets a batch aside."""

    def __init__(self, *, sets_aside: bool, num_updates: int = 0) -> None:
        self.failures: list[trainer_pb2.TrainerFailure] = []
        self._ranks = SimpleNamespace(
            is_main=True,
            activity=Activity(),
            broadcast_bytes=lambda data: data,
        )
        self._step = SimpleNamespace(num_updates=num_updates)

        def set_batch_aside(failure: trainer_pb2.TrainerFailure) -> bool:
            self.failures.append(failure)
            return sets_aside

        self._client = SimpleNamespace(set_batch_aside=set_batch_aside)

    def judge(self, batch: Batch, fault: UntrainableBatch) -> None:
        self._set_aside(batch, fault)


BATCH = make_batch(
    3,
    num_groups=3,
    group_size=2,
    vocab_size=9,
    max_tokens=8,
)


def fault_of(*places: int) -> UntrainableBatch:
    ids = [BATCH.trajectories[place].trajectory_id for place in places]
    return UntrainableBatch("the loss is nan", ids)


def test_a_batch_is_set_aside_by_the_groups_of_its_faulty_episodes_alone() -> None:
    judge = Judge(sets_aside=True)
    judge.judge(BATCH, fault_of(2, 3))
    (failure,) = judge.failures
    assert failure.message == "the loss is nan"
    assert failure.data == trainer_pb2.DataFault(
        step=3,
        batch_id="batch-3",
        group_ids=["group-3-1"],
    )


def test_a_batch_that_the_controller_keeps_ends_the_trainer_with_its_fault() -> None:
    with pytest.raises(UntrainableBatch, match="the loss is nan"):
        Judge(sets_aside=False).judge(BATCH, fault_of(0))


def test_a_trainer_whose_weights_have_changed_before_a_fault_starts_again() -> None:
    with pytest.raises(StartAgain, match="step 4 changed weights before it failed"):
        Judge(sets_aside=True, num_updates=1).judge(BATCH, fault_of(0))


def test_servers_do_not_wait_for_a_checkpoint_that_is_finished() -> None:
    stop = trainer_pb2.StopOrder(reason="the end")
    loop = Loop(
        weights_pb2.PublishOrder(publish_id="p1"), trainer_pb2.WaitOrder(), stop
    )
    loop.run()
    assert loop.seen == ["register", "p1", "poll", "poll", "poll", "the end"]


@pytest.mark.parametrize(
    ("error", "while_loading", "afterwards"),
    [
        (ConfigError("learner.master must be ..."), FINAL_ERROR, FINAL_ERROR),
        (RunFailed("the controller is gone"), FINAL_ERROR, FINAL_ERROR),
        (KeyError("model.layers.0.mlp.gate"), FINAL_ERROR, 1),
        (ModuleNotFoundError("transformer_engine"), FINAL_ERROR, 1),
        (FileNotFoundError("model.safetensors"), FINAL_ERROR, 1),
        (AssertionError("num_query_groups"), FINAL_ERROR, 1),
        (torch.OutOfMemoryError("CUDA out of memory"), NOT_STARTED, 1),
        (dist.DistBackendError("NCCL error"), NOT_STARTED, 1),
        (OSError(5, "Input/output error"), NOT_STARTED, 1),
        (TimeoutError("of 2 ranks 1 did not come"), 1, 1),
        (ConnectionResetError("by peer"), 1, 1),
        (StartAgain("step 2 changed weights before it failed"), NOT_STARTED, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_final_when_it_would_come_again(error, while_loading, afterwards):
    assert exit_code(error, has_loaded=False) == while_loading
    assert exit_code(error, has_loaded=True) == afterwards
