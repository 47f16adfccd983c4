"""The servers that take part in a publish: by transport, by readiness, and after failures.

Consumes: the answers of servers. Produces: questions, of which each server has at most one open.
Waits for: answers, for `bucket_deadline_s`. Unblocked by: the answer, the loss of the server, or
the limit.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.core.errors import ConfigError
from slipstream.core.types import ServerId
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import STALE, ServerKey, ServerSession
from slipstream.protocol.weights.transports import choose_transport
from slipstream.v1 import fleet_pb2, weights_pb2

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# Failed publishes of one session after which the server is sent away.
MAX_FAILED_PUBLISHES = 8
# Failed publishes after which the server shares no publish with others.
MAX_JOINT_FAILURES = 2
# Failed publishes of one server, while no server serves, after which the run fails. By then the
# server was sent away once and came back.
MAX_FAILED_WHILE_NONE_SERVES = 2 * MAX_FAILED_PUBLISHES
# Largest number of servers, by name, whose failed publishes are counted; the oldest goes first.
MAX_FAILING = 1000


def retry_wait_s(num_failed: int) -> float:
    """Returns the seconds between a failure and the next attempt, after failures in a row."""
    return min(FIRST_RETRY_S * 2.0 ** max(num_failed - 1, 0), MAX_RETRY_S)


class Failures:
    """Counts the failed publishes of each server, over all of its epochs, and acts on them."""

    def __init__(self, fleet: Fleet, run: ControlledRun) -> None:
        self._fleet = fleet
        self._run = run
        # Failures in a row: the first counts since any server served last, the second since that
        # server served last.
        self._while_none_served: Counter[ServerId] = Counter()
        self._of_server: Counter[ServerId] = Counter()

    def together(self, due: Sequence[ServerSession]) -> list[ServerSession]:
        """Returns the servers of `due` that share the next publish.

        Servers whose last two publishes failed are left out, since a member that fails makes all
        others stale. Once only such servers are due, each gets a publish of its own.
        """
        failed = self._of_server
        sound = [s for s in due if failed[s.key.server_id] < MAX_JOINT_FAILURES]
        return sound or sorted(due, key=lambda s: failed[s.key.server_id])[:1]

    def served(self, session: ServerSession) -> None:
        """Notes that a publish to this server succeeded."""
        session.failed_publishes = 0
        self._while_none_served.clear()
        del self._of_server[session.key.server_id]

    def make_stale(self, session: ServerSession, cause: str) -> None:
        """Takes a server out of service until it has a whole version."""
        if self._fleet.find(session.key) is not session:
            return
        session.failed_publishes += 1
        session.become(STALE)
        if session.is_leaving:
            return
        session.cause = cause
        self._run.events.warn(f"rollout server {session.name} is stale: {cause}")
        self._follow(session, cause)

    def fetch_failed(self, session: ServerSession, cause: str) -> None:
        """Notes a failed fetch: a serving server keeps its version, any other becomes stale."""
        if not session.is_serving:
            self.make_stale(session, cause)
            return
        assert session.version is not None
        session.failed_publishes += 1
        self._run.events.warn(
            f"rollout server {session.name} keeps version {session.version.step}: {cause}"
        )
        self._follow(session, cause)

    def send_away(self, session: ServerSession, cause: str) -> None:
        """Ends the stream of a server; others get its leases, and it may join again."""
        self._fleet.remove(session, cause)
        self._note(session, cause)

    def _follow(self, session: ServerSession, cause: str) -> None:
        if self._note(session, cause):
            session.retry_publish_s = time.monotonic() + retry_wait_s(session.failed_publishes)
        else:
            cause = f"{session.failed_publishes} publishes failed: {cause}"
            self._fleet.remove(session, cause)

    def _note(self, session: ServerSession, cause: str) -> bool:
        """Counts a failed publish; returns whether its session may be sent the weights again.

        The run fails if no server serves and this one has failed for too long.
        """
        for failures in (self._of_server, self._while_none_served):
            failures[session.key.server_id] += 1
            if len(failures) > MAX_FAILING:
                del failures[next(iter(failures))]
        in_a_row = self._while_none_served[session.key.server_id]
        progress = self._run.progress
        may_fail = not self._fleet.serving() and not progress.is_over
        if in_a_row >= MAX_FAILED_WHILE_NONE_SERVES and may_fail:
            progress.fail(
                f"no rollout server serves, and {in_a_row} publishes in a row to "
                f"{session.name} failed, the last one: {cause}"
            )
            return False
        return session.failed_publishes < MAX_FAILED_PUBLISHES


class Membership:
    """The members of the newest communicator; a change of members or a fault replaces it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        # Number of the trainer's ranks that send; they are the first ranks of a communicator.
        self.num_senders = 1
        self.members: tuple[ServerKey, ...] = ()
        self._epoch = 0
        self._name = ""

    def forget(self, communicator_id: str | None = None) -> None:
        """Drops the newest communicator; with an id, only if the communicator has this id."""
        if communicator_id in (None, self._name):
            self.members = ()

    def order_for(
        self, targets: Sequence[ServerSession], transport: str, *, trainer_has: str
    ) -> weights_pb2.PublishOrder:
        """Returns an order to publish to `targets`, with their first ranks in the communicator.

        The newest communicator is used again if its members are the same and the trainer still has
        it: `trainer_has` is the trainer's communicator id. Otherwise the order names a new
        communicator.
        """
        members = tuple(session.key for session in targets)
        new = members != self.members or trainer_has != self._name
        if new:
            self.members = members
            self._epoch += 1
            # A secret that is sent only over gRPC: strangers cannot join by gloo or ipc.
            self._name = f"{self._run_id}-{self._epoch}-{secrets.token_hex(16)}"
        receivers = []
        rank = self.num_senders
        for session in targets:
            workers = session.hello.engine_workers
            receivers.append(
                weights_pb2.Receiver(server_id=session.name, first_rank=rank, num_workers=workers)
            )
            rank += workers
        return weights_pb2.PublishOrder(
            communicator=weights_pb2.Communicator(
                communicator_id=self._name,
                transport=transport,
                world_size=rank,
                num_senders=self.num_senders,
            ),
            new_communicator=new,
            receivers=receivers,
        )


READY = fleet_pb2.PUBLISH_PHASE_READY
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED


@dataclass(eq=False)
class PublishQuestion:
    """A question to one server, and the future of its answer: a READY or FAILED report."""

    publish_id: str
    session: ServerSession
    asked_s: float
    answer: asyncio.Future[fleet_pb2.PublishReport]
    # A publish left the server out while the question was open.
    is_late: bool = False

    def reply(self, report: fleet_pb2.PublishReport) -> None:
        """Answers the question unless it has an answer."""
        if not self.answer.done():
            self.answer.set_result(report)


class PublishQuestions:
    """The open question of each server, and answers that no publish has used yet.

    `ask` sends the question. `answers` returns the answer for the next publish and forgets the
    question. If the server has not answered after `bucket_deadline_s`, the publish leaves the
    server out and `is_late` is true until the server answers; then the next publish may include it.
    Without an answer within `join_deadline_s` the controller ends the server's stream.
    """

    def __init__(self, run: ControlledRun, tasks: asyncio.TaskGroup, failures: Failures) -> None:
        self._run = run
        self._settings = run.config.weights
        self._tasks = tasks
        self._failures = failures
        self._asked: dict[ServerKey, PublishQuestion] = {}

    def is_late(self, session: ServerSession) -> bool:
        """Whether a publish left this server out, and it has still not answered."""
        question = self._asked.get(session.key)
        return question is not None and question.is_late and not question.answer.done()

    def ask(
        self, targets: Collection[ServerSession], prepare: fleet_pb2.PreparePublish
    ) -> list[PublishQuestion]:
        """Asks these servers, unless their question is still open; returns the questions."""
        message = fleet_pb2.ControllerMessage(prepare=prepare)
        for session in targets:
            earlier = self._asked.get(session.key)
            if earlier is None or earlier.answer.done():
                answer = asyncio.get_running_loop().create_future()
                asked_s = self._run.clock.now_s()
                self._asked[session.key] = PublishQuestion(
                    prepare.publish_id, session, asked_s, answer
                )
                session.send(message)
        return [self._asked[session.key] for session in targets]

    async def answers(
        self, targets: Sequence[ServerSession], prepare: fleet_pb2.PreparePublish
    ) -> dict[ServerSession, str]:
        """Returns the answer of each server that answered: why it stays out, or "" if it is ready.

        Servers that were not asked before are asked now. Waits until `bucket_deadline_s` after the
        newest open question; servers that have not answered by then are left out of this publish.
        """
        self.ask([session for session in targets if session.key not in self._asked], prepare)
        questions = [self._asked[session.key] for session in targets]
        clock = self._run.clock
        if unanswered := [question for question in questions if not question.answer.done()]:
            until_s = max(q.asked_s for q in unanswered) + self._settings.bucket_deadline_s
            await clock.wait([q.answer for q in unanswered], until_s - clock.now_s())
        problems = {}
        for question in questions:
            if not question.answer.done():
                session = question.session
                question.is_late = True
                keeps = "it serves nothing yet"
                if session.is_serving and session.version is not None:
                    keeps = f"it keeps version {session.version.step}"
                self._run.events.warn(
                    f"rollout server {session.name} is left out of the publish of version "
                    f"{prepare.version.step}: not ready {clock.now_s() - question.asked_s:.1f} s "
                    f"after it was asked; {keeps}"
                )
                self._tasks.create_task(self._follow(question))
                continue
            self.forget(question)
            report = question.answer.result()
            ready = report.phase == READY
            problems[question.session] = "" if ready else report.message or "it failed"
        return problems

    async def _follow(self, question: PublishQuestion) -> None:
        """Waits for a late answer, then wakes the run; ends the server's stream if none comes."""
        limit_s = self._settings.join_deadline_s
        clock = self._run.clock
        await clock.wait([question.answer], question.asked_s + limit_s - clock.now_s())
        if question.answer.done():
            self._run.signal.notify()
            return
        self.forget(question)
        if not question.session.is_leaving:
            within = f"within {limit_s:g} s (weights.join_deadline_s)"
            cause = f"it did not say {within} that it is ready for new weights"
            self._failures.send_away(question.session, cause)

    def report(self, session: ServerSession, report: fleet_pb2.PublishReport) -> None:
        """Takes a server's report, if it answers the server's question."""
        question = self._asked.get(session.key)
        is_its = question is not None and question.publish_id == report.publish_id
        if question is not None and is_its and report.phase in (READY, FAILED):
            question.reply(report)

    def server_lost(self, session: ServerSession) -> None:
        """Ends the wait for a lost server."""
        question = self._asked.pop(session.key, None)
        if question is not None:
            question.reply(fleet_pb2.PublishReport(phase=FAILED, message="the server is gone"))

    def forget(self, question: PublishQuestion) -> None:
        """Forgets a question; a later report is no answer to it."""
        if self._asked.get(question.session.key) is question:
            del self._asked[question.session.key]


def choose_for(
    run: ControlledRun, places: Mapping[str, weights_pb2.Place]
) -> tuple[str, list[str]]:
    """Returns the transport for servers at `places`, and for each the reason why it is left out.

    A server with the reason "" takes part. The transport is "" if no server takes part.
    """
    setting = run.config.weights.transport
    parallel = run.config.learner.parallel
    choose = partial(choose_transport, setting, run.progress.learner_places, parallel=parallel)
    # Usually all servers fit; to add them one by one takes quadratic time.
    with contextlib.suppress(ConfigError):
        return choose(places) if places else "", [""] * len(places)
    fitting: dict[str, weights_pb2.Place] = {}
    transport = ""
    problems = []
    for name, place in places.items():
        wider = fitting | {name: place}
        try:
            transport = choose(wider)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems.append("")
            fitting = wider
    return transport, problems


def misfit(run: ControlledRun, hello: fleet_pb2.ServerHello) -> str:
    """Returns why a server can never get weights, or "" if it can.

    Also returns "" if no trainer has registered yet, unless only one side uses storage.
    """
    is_by_storage = run.config.weights.storage_url is not None
    if hello.from_storage != is_by_storage:
        both = "for the learner and every server of a run, or for none"
        differs = "it has a weights.storage_url, but the trainer sends the weights"
        if is_by_storage:
            differs = "it has no weights.storage_url, but the run's weights are in storage"
        return f"{differs}: set it {both}"
    if is_by_storage or not run.progress.learner_places:
        return ""
    _, (problem,) = choose_for(run, {hello.server_id: hello.place})
    return problem
