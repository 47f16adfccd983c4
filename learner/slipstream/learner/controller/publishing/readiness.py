"""Asks servers in advance if they are ready for a publish; a publish leaves late servers out.

Consumes: the servers' answers. Produces: questions, and the end of servers that never answer.
Waits for: answers. Unblocked by: an answer, the loss of the server, or the question's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.publishing.delivery import Deliveries
from slipstream.learner.controller.publishing.phases import READY, PhaseReports
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.protocol.codec import version_to_pb
from slipstream.v1 import fleet_pb2


@dataclass(eq=False)
class _Question:
    publish_id: str
    session: ServerSession
    asked_s: float
    answer: asyncio.Future[fleet_pb2.PublishReport]
    # A publish left the server out while the question was open.
    is_late: bool = False

    @property
    def is_open(self) -> bool:
        return not self.answer.done()


class Readiness:
    """One question at a time to each server; its answer counts until the next publish to it.

    Life of a question: `ask` sends it, `answers` collects it for a publish and forgets it. If the
    server has not answered after `bucket_deadline_s`, the publish leaves it out and `is_late` is
    true. A late answer makes the server due again. Without an answer within `join_deadline_s` its
    stream is ended.
    """

    def __init__(
        self,
        run: Run,
        tasks: asyncio.TaskGroup,
        reports: PhaseReports,
        deliveries: Deliveries,
    ) -> None:
        self._run, self._settings = run, run.config.weights
        self._tasks, self._reports, self._deliveries = tasks, reports, deliveries
        self._questions: dict[ServerKey, _Question] = {}

    def is_late(self, session: ServerSession) -> bool:
        """Whether a publish left this server out, and it has still not answered."""
        question = self._questions.get(session.key)
        return question is not None and question.is_late and question.is_open

    def ask(
        self, targets: Sequence[ServerSession], publish_id: str, version: PolicyVersion
    ) -> None:
        """Asks these servers if they are ready, except servers whose question is still open."""
        message = fleet_pb2.ControllerMessage(
            prepare=fleet_pb2.PreparePublish(publish_id=publish_id, version=version_to_pb(version))
        )
        for session in targets:
            earlier = self._questions.get(session.key)
            if earlier is not None and earlier.is_open:
                continue
            self._forget(session)
            answer = self._reports.expect(publish_id, session.key, READY)
            now_s = self._run.clock.now_s()
            self._questions[session.key] = _Question(publish_id, session, now_s, answer)
            session.send(message)

    async def answers(
        self, targets: Sequence[ServerSession], publish_id: str, version: PolicyVersion
    ) -> dict[ServerKey, str]:
        """Maps each server that answered to its reason for staying out; "" means ready.

        Servers that were not asked before are asked now. Waits until `bucket_deadline_s` after the
        newest open question; servers that have not answered by then are left out of this publish.
        """
        unasked = [session for session in targets if session.key not in self._questions]
        self.ask(unasked, publish_id, version)
        questions = [self._questions[session.key] for session in targets]
        await self._wait_for([question for question in questions if question.is_open])
        problems = {}
        for question in questions:
            if question.is_open:
                self._leave_out(question, version)
                continue
            if self._questions.get(question.session.key) is question:
                self._forget(question.session)
            report = question.answer.result()
            ready = report.phase == READY
            problems[question.session.key] = "" if ready else report.message or "it failed"
        return problems

    def server_lost(self, session: ServerSession) -> None:
        """Forgets the question to a server that is gone."""
        self._forget(session)

    async def _wait_for(self, questions: Sequence[_Question]) -> None:
        if questions:
            until_s = max(q.asked_s for q in questions) + self._settings.bucket_deadline_s
            clock = self._run.clock
            await clock.wait([q.answer for q in questions], until_s - clock.now_s())

    def _leave_out(self, question: _Question, version: PolicyVersion) -> None:
        session, question.is_late = question.session, True
        keeps = "it serves nothing yet"
        if session.is_serving and session.version is not None:
            keeps = f"it keeps version {session.version.step}"
        waited_s = self._run.clock.now_s() - question.asked_s
        self._run.events.add(
            f"rollout server {session.name} is left out of the publish of version {version.step}: "
            f"not ready {waited_s:.1f} s after it was asked; {keeps}",
            Severity.WARNING,
        )
        self._tasks.create_task(self._follow(question))

    async def _follow(self, question: _Question) -> None:
        """Waits for the answer, which makes the server due, or for the deadline of the question."""
        limit_s = self._settings.join_deadline_s
        clock = self._run.clock
        await clock.wait([question.answer], question.asked_s + limit_s - clock.now_s())
        if not question.is_open:
            self._run.signal.notify()
            return
        self._forget(question.session)
        if not question.session.is_leaving:
            self._deliveries.send_away(
                question.session,
                f"it did not say within {limit_s:g} s (weights.join_deadline_s) "
                "that it is ready for new weights",
            )

    def _forget(self, session: ServerSession) -> None:
        question = self._questions.pop(session.key, None)
        if question is not None:
            self._reports.forget(question.publish_id, session.key, READY)
