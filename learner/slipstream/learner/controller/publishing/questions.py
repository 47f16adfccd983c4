"""Asks servers whether they are ready for new weights; each has at most one open question.

Consumes: the servers' answers. Produces: questions. Waits for: answers, for `bucket_deadline_s`.
Unblocked by: the answer, the loss of the server, or the limit.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slipstream.learner.controller.publishing.failures import Failures
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.v1 import fleet_pb2

READY = fleet_pb2.PUBLISH_PHASE_READY
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED


@dataclass(eq=False)
class Question:
    """A question to one server, and the future of its answer: a READY or FAILED report."""

    publish_id: str
    session: ServerSession
    asked_s: float
    answer: asyncio.Future[fleet_pb2.PublishReport]
    # A publish left the server out while the question was open.
    is_late: bool = False

    @property
    def is_open(self) -> bool:
        return not self.answer.done()

    def reply(self, report: fleet_pb2.PublishReport) -> None:
        """Answers the question unless it has an answer."""
        if self.is_open:
            self.answer.set_result(report)


class Questions:
    """The open question of each server, and answers that no publish has used yet.

    `ask` sends the question. `answers` returns the answer for the next publish and forgets the
    question. If the server has not answered after `bucket_deadline_s`, the publish leaves the
    server out and `is_late` is true until the server answers; then the next publish may include it.
    Without an answer within `join_deadline_s` the controller ends the server's stream.
    """

    def __init__(self, run: Run, tasks: asyncio.TaskGroup, failures: Failures) -> None:
        self._run, self._settings = run, run.config.weights
        self._tasks, self._failures = tasks, failures
        self._asked: dict[ServerKey, Question] = {}

    def is_late(self, session: ServerSession) -> bool:
        """Whether a publish left this server out, and it has still not answered."""
        question = self._asked.get(session.key)
        return question is not None and question.is_late and question.is_open

    def ask(
        self, targets: Collection[ServerSession], prepare: fleet_pb2.PreparePublish
    ) -> list[Question]:
        """Asks these servers, unless their question is still open; returns the questions."""
        message = fleet_pb2.ControllerMessage(prepare=prepare)
        for session in targets:
            earlier = self._asked.get(session.key)
            if earlier is None or not earlier.is_open:
                self._asked[session.key] = Question(
                    prepare.publish_id,
                    session,
                    self._run.clock.now_s(),
                    asyncio.get_running_loop().create_future(),
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
        if unanswered := [question for question in questions if question.is_open]:
            clock = self._run.clock
            until_s = max(q.asked_s for q in unanswered) + self._settings.bucket_deadline_s
            await clock.wait([q.answer for q in unanswered], until_s - clock.now_s())
        problems = {}
        for question in questions:
            if question.is_open:
                self._leave_out(question, prepare.version.step)
                continue
            self.forget(question)
            report = question.answer.result()
            ready = report.phase == READY
            problems[question.session] = "" if ready else report.message or "it failed"
        return problems

    def _leave_out(self, question: Question, step: int) -> None:
        session, question.is_late = question.session, True
        keeps = "it serves nothing yet"
        if session.is_serving and session.version is not None:
            keeps = f"it keeps version {session.version.step}"
        waited_s = self._run.clock.now_s() - question.asked_s
        self._run.events.warn(
            f"rollout server {session.name} is left out of the publish of version {step}: "
            f"not ready {waited_s:.1f} s after it was asked; {keeps}"
        )
        self._tasks.create_task(self._follow(question))

    async def _follow(self, question: Question) -> None:
        """Waits for a late answer, then wakes the run; ends the server's stream if none comes."""
        limit_s, clock = self._settings.join_deadline_s, self._run.clock
        await clock.wait([question.answer], question.asked_s + limit_s - clock.now_s())
        if not question.is_open:
            self._run.signal.notify()
            return
        self.forget(question)
        if not question.session.is_leaving:
            self._failures.send_away(
                question.session,
                f"it did not say within {limit_s:g} s (weights.join_deadline_s) "
                "that it is ready for new weights",
            )

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
            question.reply(
                fleet_pb2.PublishReport(
                    publish_id=question.publish_id, phase=FAILED, message="the server is gone"
                )
            )

    def forget(self, question: Question) -> None:
        """Forgets a question; a later report is no answer to it."""
        if self._asked.get(question.session.key) is question:
            del self._asked[question.session.key]
