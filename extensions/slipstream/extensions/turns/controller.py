"""Orders engines to rest (sleep) while the learner trains on their device.

Consumes: the moments at which the trainer begins and ends a step, the answers of servers. Produces:
orders to rest and to wake. Waits for: all engines to rest, before the trainer gets its batch.
Unblocked by: the answer, the loss of the server, or `weights.join_deadline_s`, after which the
controller ends the server's stream.
"""

import asyncio
from collections.abc import Collection, Sequence

from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import LOADING, SERVING, ServerSession
from slipstream.v1 import fleet_pb2
from slipstream.v1.weights_pb2 import Place


class EngineTurns(Part):
    """Orders engines on devices of the learner to rest while it trains, and to wake.

    With `controller.turns = "auto"` these are the engines on the learner's GPUs; processes name
    their GPUs when they join. Engines and learners on CPUs then compute at the same time.

    await turns.before_batch()
    turns.trainer_asks(["server-0"])  # all but server-0, which receives weights, wake
    await turns.before_stop()
    turns.trainer_away()
    """

    def __init__(self, fleet: Fleet, run: ControlledRun) -> None:
        self._fleet = fleet
        self._run = run
        self._setting = run.config.controller.turns
        self._gives_back = self._setting == "sleep"
        self._number = 0
        # True between the orders to rest and `trainer_asks`.
        self._is_learners_turn = False
        # Servers that were told to rest and not to wake; new weights wake them too.
        self._resting: set[ServerSession] = set()
        self._answers: dict[ServerSession, asyncio.Future[None]] = {}
        # Whether an engine rested at the last log line about it. None before the first line.
        self._told: bool | None = None

    def are_taken_by(self, session: ServerSession) -> bool:
        """Whether the engine of this server rests while the learner trains."""
        server = session.hello.place
        if self._setting == "auto" and not server.gpus:
            return False
        return any(shares(server, rank) for rank in self._run.progress.learner_places)

    async def before_batch(self) -> None:
        """Orders the engines on the learner's devices to rest; returns when all of these rest.

        Ends the streams of servers that do not answer within `weights.join_deadline_s`.
        """
        sharing = self._sharing()
        self._tell(sharing)
        self._order(sharing)
        limit_s = self._run.config.weights.join_deadline_s
        await self._run.clock.wait(list(self._answers.values()), limit_s)
        for session in sharing:
            if not self._answers[session].done():
                late = f"within {limit_s:g} s (weights.join_deadline_s)"
                self._fleet.remove(session, f"its engine did not rest {late}")

    def trainer_asks(self, receivers: Collection[str]) -> None:
        """Wakes all resting engines but those of `receivers`, which get weights while they rest."""
        self._is_learners_turn = False
        for session in [resting for resting in self._resting if resting.name not in receivers]:
            self._resting.remove(session)
            session.served.note(self._run.clock.now_s(), running=session.is_serving)
            session.send(fleet_pb2.ControllerMessage(wake=fleet_pb2.Wake()))

    async def before_stop(self) -> None:
        """Wakes all engines, or orders them to rest if the trainer needs their memory to save."""
        if self._gives_back:
            await self.before_batch()
        else:
            self.trainer_asks(())

    def trainer_away(self) -> None:
        """Wakes resting engines; with `controller.turns = "sleep"`, orders engines to rest instead.

        A new trainer needs the memory of the engines on its devices; its first request for an order
        wakes them. After the end of the run no engine is ordered to rest.
        """
        if not self._gives_back:
            self.trainer_asks(())
        elif not self._run.progress.is_over:
            self._order(self._sharing())

    def joined(self, session: ServerSession) -> None:
        """Orders the engine of a new server to rest if the learner is training on its device."""
        if self._is_learners_turn and session in self._sharing():
            self._rest(session)

    def lost(self, session: ServerSession) -> None:
        self._resting.discard(session)
        self._answered(session)

    def rested(self, session: ServerSession, answer: fleet_pb2.Rested) -> None:
        if answer.number == self._number:
            self._answered(session)

    def _tell(self, sharing: Sequence[ServerSession]) -> None:
        """Logs whether "auto" lets engines rest; warns once if another setting has no effect."""
        rests = bool(sharing)
        setting = self._setting
        events = self._run.events
        if self._told in (True, rests) or not self._fleet.serving():
            return
        self._told = rests
        if setting == "auto" and any(rank.gpus for rank in self._run.progress.learner_places):
            turns = "off"
            who = "no rollout server"
            if rests:
                turns = "pause"
                who = f"rollout server {sharing[0].name}"
            events.add(f"turns: {turns}, because {who} shares a GPU with the learner")
        elif setting in ("pause", "sleep") and not rests:
            if len(self._fleet.serving()) < self._run.config.rollout_server.count:
                # A server that shares the device may still load.
                self._told = None
                return
            events.warn(
                f'controller.turns = "{setting}" has no effect: no rollout server computes on a '
                "device of the learner"
            )

    def _order(self, sessions: Collection[ServerSession]) -> None:
        self._number += 1
        self._is_learners_turn = True
        self._answers.clear()
        for session in sessions:
            self._answers[session] = asyncio.get_running_loop().create_future()
            self._rest(session)

    def _rest(self, session: ServerSession) -> None:
        self._resting.add(session)
        # Episodes make no progress meanwhile: their leases are not late.
        session.served.note(self._run.clock.now_s(), running=False)
        order = fleet_pb2.Rest(number=self._number, give_back=self._gives_back)
        session.send(fleet_pb2.ControllerMessage(rest=order))

    def _answered(self, session: ServerSession) -> None:
        answer = self._answers.get(session)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _sharing(self) -> list[ServerSession]:
        """Returns the servers whose engines sample, or are about to, on a device of the learner.

        If resting engines free their memory, servers in all other states are included.
        """
        return [
            session
            for session in self._fleet.sessions.values()
            if (self._gives_back or session.state in (SERVING, LOADING))
            and self.are_taken_by(session)
        ]


def shares(server: Place, rank: Place) -> bool:
    """Whether a server and a trainer rank use the same GPU, or CPUs of the same host."""
    if server.host_id != rank.host_id:
        return False
    if not server.gpus and not rank.gpus:
        return True
    return bool(set(server.gpus) & set(rank.gpus))


def part(kernel: Kernel) -> EngineTurns | None:
    """Returns the part that lets engines rest; None if servers load weights while it trains."""
    if kernel.run.config.weights.storage_url is not None:
        return None
    return EngineTurns(kernel.books.fleet, kernel.run)
