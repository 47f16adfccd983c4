"""The trainer's program publishes to receiving processes; one of them is killed in a publish.

Order of events: a publish that builds the communicator, some that keep it, one in which the last
receiver dies while a bucket travels, and one with a new communicator and a new receiver.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_to_pb
from slipstream.v1 import trainer_pb2, weights_pb2

from benchmarks.common.measure import visible
from support.fakes import weight_receiver_process
from support.fakes.fake_controller import FakeController, stop_order
from support.ranks.rank_pool import RankPool, start_ranks

LIMIT_S = 240.0


@dataclass
class Scenario:
    """What is started, and where. `gpus`: receivers follow the senders; over ipc they share one."""

    folder: Path
    model: Path
    transport: str
    num_receivers: int
    learner: dict = field(default_factory=dict)
    bucket_mib: int = 1
    dtype: str = "float32"
    num_kept: int = 2
    gpus: bool = False

    @property
    def world_size(self) -> int:
        return int(self.learner.get("world_size", 1))

    @property
    def bucket_deadline_s(self) -> float:
        """NCCL notices a dead member by it; without GPUs the end of its connection says so."""
        return 2.0 if self.gpus else 30.0


@dataclass
class Found:
    """Per publish: the trainer's result, what each receiver answered, and seconds of the wall."""

    results: list[trainer_pb2.PublishResult] = field(default_factory=list)
    answers: list[list[dict]] = field(default_factory=list)
    hello: trainer_pb2.TrainerHello | None = None
    # Seconds from the order's start to the trainer's report, for each publish.
    seconds: list[float] = field(default_factory=list)
    # Seconds from the order for a new communicator after the death to the end of that publish,
    # joining included.
    recovered_s: float = 0.0


class _Receivers:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._processes = [self._start(number) for number in range(scenario.num_receivers)]
        for process in self._processes:
            _await_ready(process)

    def _start(self, number: int) -> subprocess.Popen[str]:
        environ = dict(os.environ)
        if self._scenario.gpus:
            # Over ipc all are on the learner's own.
            first = 0 if self._scenario.transport == "ipc" else self._scenario.world_size + number
            environ["CUDA_VISIBLE_DEVICES"] = visible([first])
        return subprocess.Popen(
            [sys.executable, weight_receiver_process.__file__, self._scenario.transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )

    def tell(self, start: trainer_pb2.PublishStart, *, is_new: bool, die_at: int | None) -> None:
        last = len(self._processes) - 1
        for number, process in enumerate(self._processes):
            command = {
                "communicator": start.communicator.SerializeToString().hex(),
                "layout": start.layout.SerializeToString().hex(),
                "rank": start.communicator.num_senders + number,
                "is_new": is_new,
                "die_at": die_at if number == last else None,
            }
            assert process.stdin is not None
            print(json.dumps(command), file=process.stdin, flush=True)

    def answers(self) -> list[dict]:
        """One answer of each live receiver; {} of a dead one, which is started again."""
        found = []
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            found.append(json.loads(line) if line else {})
            if not line:
                process.wait()
                self._processes[number] = self._start(number)
                _await_ready(self._processes[number])
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def _await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["ready"]


class _Controller(FakeController):
    """Gives the orders of the scenario and lets the receivers take part."""

    def __init__(self, scenario: Scenario, receivers: _Receivers) -> None:
        self._scenario, self._receivers = scenario, receivers
        self.found = Found()
        self._is_new, self._die_at = False, None
        super().__init__(self._orders_of(), on_start_publish=self._start_receivers)

    def _orders_of(self) -> Iterator[list[trainer_pb2.Directive]]:
        yield self._publish("members-1", is_new=True)
        for _ in range(self._scenario.num_kept):
            yield self._publish("members-1")
        yield self._publish("members-1", die=True)
        died_s = time.monotonic()
        yield self._publish("members-2", is_new=True)
        self.found.recovered_s = time.monotonic() - died_s
        yield stop_order(without_model=True)

    def _publish(
        self, communicator_id: str, *, is_new: bool = False, die: bool = False
    ) -> list[trainer_pb2.Directive]:
        self._is_new, self._die_at = is_new, (1 if die else None)
        count = len(self.found.seconds)
        order = weights_pb2.PublishOrder(
            publish_id=f"p{count}",
            version=version_to_pb(PolicyVersion(0, 0)),
            communicator=weights_pb2.Communicator(
                communicator_id=communicator_id, transport=self._scenario.transport
            ),
            new_communicator=is_new,
            receivers=[
                weights_pb2.Receiver(server_id=f"server-{number}", num_workers=1)
                for number in range(self._scenario.num_receivers)
            ],
            bucket_deadline_s=self._scenario.bucket_deadline_s,
            join_deadline_s=60.0,
        )
        return [trainer_pb2.Directive(publish=order)]

    def _start_receivers(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        self._started_s = time.monotonic()
        self._receivers.tell(start, is_new=self._is_new, die_at=self._die_at)
        return [
            weights_pb2.Receiver(server_id=f"server-{number}", num_workers=1)
            for number in range(self._scenario.num_receivers)
        ]

    def FinishPublish(
        self, request: trainer_pb2.PublishResult, context: object
    ) -> trainer_pb2.PublishReceipt:
        self.found.seconds.append(time.monotonic() - self._started_s)
        self.found.answers.append(self._receivers.answers())
        return super().FinishPublish(request, context)


def run(scenario: Scenario, *, pool: RankPool | None = None) -> Found:
    """Runs until the trainer has ended; raises AssertionError with its log if it failed.

    The pool forks the trainer's ranks; without one they are started as users do.
    """
    receivers = _Receivers(scenario)
    try:
        with _Controller(scenario, receivers) as controller:
            _run_trainer(scenario, controller.address, pool)
            controller.found.results = controller.results
            controller.found.hello = controller.hello
            assert controller.failures == []
            return controller.found
    finally:
        receivers.close()


def _run_trainer(scenario: Scenario, address: str, pool: RankPool | None) -> None:
    config = parse_config(
        {
            "run": {"name": "program", "steps": 1, "dir": str(scenario.folder)},
            "model": {"path": str(scenario.model), "dtype": scenario.dtype},
            "algorithm": {"group_size": 4, "groups_per_step": 4, "learning_rate": 1e-3},
            "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 24},
            "controller": {"address": address},
            "learner": {"timeout_s": 120.0, **scenario.learner},
            "weights": {
                "bucket_mib": scenario.bucket_mib,
                "bucket_deadline_s": scenario.bucket_deadline_s,
            },
        },
        source="test",
    )
    path = scenario.folder / "resolved.toml"
    path.write_text(dump_config(config))
    gpus = {"CUDA_VISIBLE_DEVICES": visible(range(scenario.world_size))} if scenario.gpus else {}
    processes = start_ranks(path, scenario.world_size, gpus, pool=pool)
    try:
        end = time.monotonic() + LIMIT_S
        statuses = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
    finally:
        logs = [
            (scenario.folder / f"rank-{rank}.log").read_text()[-3000:]
            for rank in range(scenario.world_size)
        ]
        for process in processes:
            process.kill()
        print("\n".join(logs))
    assert statuses == [0] * scenario.world_size, "\n".join(logs)


def check(found: Found, *, num_senders: int, num_receivers: int, num_kept: int = 2) -> None:
    """All publishes but the one with the death arrived everywhere, whole."""
    assert found.hello is not None
    assert found.hello.num_senders == num_senders
    failed = num_kept + 1
    assert len(found.results) == failed + 2
    for number, (result, answers) in enumerate(zip(found.results, found.answers, strict=True)):
        if number == failed:
            assert result.error
            assert not result.bucket_digests
            assert answers[-1] == {}
            assert all("error" in answer for answer in answers[:-1])
            continue
        assert result.error == "", found.answers
        expected = [digest.hex() for digest in result.bucket_digests]
        assert expected
        assert [answer.get("digests") for answer in answers] == [expected] * num_receivers
    assert len({tuple(r.bucket_digests) for n, r in enumerate(found.results) if n != failed}) == 1
