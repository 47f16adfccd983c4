"""The transport of a communicator, and the servers that it leaves out."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.publishing.receivers import (
    Failures,
    PublishQuestions,
    choose_for,
    misfit,
)
from slipstream.learner.controller.run import ControlledRun, LoopClock
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.protocol.codec import version_to_pb
from slipstream.v1 import fleet_pb2, weights_pb2
from support.rigs.counted_work import counted
from support.rigs.publishing_scene import READY, joined, place


@pytest.fixture
def run(request: pytest.FixtureRequest) -> ControlledRun:
    values: dict[str, Any] = {
        "run": {"name": "placed", "steps": 1},
        "model": {"path": "model"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
        "weights": {"transport": request.param},
    }
    return ControlledRun(parse_config(values, source="test"), "placed")


def hello(name: str, place: weights_pb2.Place) -> fleet_pb2.ServerHello:
    return fleet_pb2.ServerHello(server_id=name, place=place)


@pytest.mark.parametrize("run", ["auto"], indirect=True)
def test_a_server_that_shares_no_host_is_left_out_where_the_others_share_a_gpu(
    run: ControlledRun,
) -> None:
    run.progress.trainer_registered((place("here", "GPU-0"),))
    servers = {
        "a": place("here", "GPU-0"),
        "b": place("there", "GPU-7"),
        "c": place("here", "GPU-1"),
    }
    transport, (a, b, c) = choose_for(run, servers)
    assert (transport, a, c) == ("ipc", "", "")
    assert "b runs on another one" in b
    assert choose_for(run, {"b": servers["b"]}) == ("nccl", [""])


class ScriptedClock(LoopClock):
    """A clock that tests set; its waits end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0
        self.limits_s: list[float] = []

    def now_s(self) -> float:
        return self.time_s

    async def wait(
        self, futures: Collection[asyncio.Future[Any]], limit_s: float
    ) -> None:
        self.limits_s.append(limit_s)


@pytest.mark.parametrize("run", ["auto"], indirect=True)
async def test_an_answered_question_prolongs_no_wait_for_an_earlier_one(
    run: ControlledRun,
) -> None:
    clock = ScriptedClock()
    run.clock = clock
    fleet = Fleet(run)
    early = joined(fleet, "early")
    later = joined(fleet, "later")
    prepare = fleet_pb2.PreparePublish(
        publish_id="p", version=version_to_pb(PolicyVersion(0, 1))
    )
    async with asyncio.TaskGroup() as tasks:
        questions = PublishQuestions(run, tasks, Failures(fleet, run))
        (still_open,) = questions.ask([early], prepare)
        clock.time_s = 7.0
        (answered,) = questions.ask([later], prepare)
        ready = fleet_pb2.PublishReport(phase=READY)
        answered.reply(ready)
        assert await questions.answers([early, later], prepare) == {later: ""}
        still_open.reply(ready)
    assert clock.limits_s[0] == run.config.weights.bucket_deadline_s - 7.0


@pytest.mark.parametrize("run", ["nccl"], indirect=True)
def test_a_server_that_never_fits_is_known_as_soon_as_the_trainer_is(
    run: ControlledRun,
) -> None:
    assert misfit(run, hello("a", place("here", "GPU-0"))) == ""
    run.progress.trainer_registered((place("here", "GPU-0"),))
    assert "joins no two processes on one GPU" in misfit(
        run, hello("a", place("here", "GPU-0"))
    )
    assert misfit(run, hello("b", place("here", "GPU-1"))) == ""


@pytest.mark.parametrize("run", ["auto"], indirect=True)
def test_a_server_that_tells_nccl_something_else_is_left_out_by_name(
    run: ControlledRun,
) -> None:
    run.progress.trainer_registered((place("here", "GPU-0", NCCL_CUMEM_ENABLE="0"),))
    server = place("there", "GPU-7")
    server.nccl["NCCL_CUMEM_ENABLE"] = "1"
    message = "NCCL_CUMEM_ENABLE is 0 in trainer rank 0 and 1 in b: set it on both, or on neither"
    assert message in misfit(run, hello("b", server))
    server.nccl["NCCL_CUMEM_ENABLE"] = "0"
    assert misfit(run, hello("b", server)) == ""


@pytest.mark.parametrize("run", ["auto"], indirect=True)
def test_a_server_that_gets_weights_otherwise_than_the_run_is_told_what_to_set(
    run: ControlledRun,
) -> None:
    near = hello("near", place("here"))
    far = fleet_pb2.ServerHello(
        server_id="far", place=place("there"), from_storage=True
    )
    both = "for the learner and every server of a run, or for none"
    message = f"it has a weights.storage_url, but the trainer sends the weights: set it {both}"
    assert [misfit(run, near), misfit(run, far)] == ["", message]
    weights = run.config.weights.model_copy(update={"storage_url": "s3://w"})
    stored = ControlledRun(run.config.model_copy(update={"weights": weights}), "stored")
    message = f"it has no weights.storage_url, but the run's weights are in storage: set it {both}"
    assert [misfit(stored, near), misfit(stored, far)] == [message, ""]


@pytest.mark.parametrize("run", ["auto"], indirect=True)
def test_a_large_fleet_that_fits_is_looked_at_once(run: ControlledRun) -> None:
    run.progress.trainer_registered(tuple(place("here", f"GPU-{n}") for n in range(64)))
    lines = []
    for number in (128, 512):
        servers = {f"s{n}": place(f"h{n}", f"GPU-{1000 + n}") for n in range(number)}
        with counted() as work:
            assert choose_for(run, servers) == ("nccl", [""] * number)
        lines.append(work.num_lines)
    # One after another takes the square of their number, before each step's publish.
    assert lines[1] < 5 * lines[0]
