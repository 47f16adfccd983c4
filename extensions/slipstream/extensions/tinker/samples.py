"""The samples of clients, from their prompts to their replies.

Consumes: samples, replies. Produces: leases of prompts, results. It waits for nothing: the loop of
the operations calls it.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.types import Status, Trajectory
from slipstream.extensions.tinker.models import Entry, Model, Models, Named
from slipstream.learner.controller.leasing.groups import Group, RawPrompt
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import Outbox, ServerSession
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import fleet_pb2
from slipstream.v1 import operations_pb2 as pb

# The name of the environment in leases of prompts; "client-a" if adapter a samples.
CLIENT = "client"
NEWER = "save_weights_and_get_sampling_client makes a client of the newest weights"

# A sample that lacks replies, what it is by, and the servers that may sample it.
_Ready: TypeAlias = tuple[Entry, Named, list[ServerSession]]


class Samples:
    """The samples that are not over; each ends by `end`, with its result."""

    def __init__(
        self,
        run: ControlledRun,
        books: Books,
        intake: Intake,
        scheduler: Scheduler,
        models: Models,
        entries: dict[str, Entry],
        *,
        end: Callable[..., None],
    ) -> None:
        """Takes all operations by id, of which samples are a part, and what ends one."""
        self._run = run
        self._book = books.leases
        self._fleet = books.fleet
        self._intake = intake
        self._scheduler = scheduler
        self._models = models
        self._entries = entries
        self._end = end
        # Whether servers sample by version 0, too, whatever they serve.
        self._keeps_start = run.config.lora.publishes_adapters
        # In the order in which they came.
        self.open: dict[Entry, None] = {}
        # The samples that the current publish waits for.
        self.awaited: list[Entry] = []

    async def take(
        self, requests: AsyncIterator[pb.Operation], outbox: Outbox[pb.OperationResult]
    ) -> None:
        """Adds the samples of a stream, whose results go to `outbox`."""
        async for request in requests:
            if not request.HasField("sample"):
                raise ProtocolError(f"{request.id} is no sample")
            for name in request.told:
                if told_entry := self._entries.get(name):
                    told_entry.is_told = True
            del request.told[:]
            entry = self._entries.get(request.id)
            if entry is None:
                entry = Entry(request)
                self._entries[request.id] = entry
                self.open[entry] = None
                self._run.signal.notify(gathered=True)
            elif entry.operation != request:
                error = f"{request.id} is known with other content: number the new sample anew"
                outbox.put(pb.OperationResult(id=request.id, is_done=True, error=error))
                continue
            entry.outbox = outbox
            if entry.ended.is_set():
                entry.tell()

    def await_before(self, model: Model) -> None:
        """Notes the samples that end before a publish of `model` does."""
        self.awaited = [
            entry for entry in self.open if self._is_changed_by(self._named(entry), model)
        ]

    @property
    def are_awaited(self) -> bool:
        """Whether samples that the current publish waits for are not over."""
        return any(entry in self.open for entry in self.awaited)

    def _is_changed_by(self, target: Named | None, model: Model) -> bool:
        """Whether a publish of `model` would give samples by `target` another version."""
        if target is not None and target.in_flight:
            return False
        return not self._models.are_several or (target is not None and target.model is model)

    def _named(self, entry: Entry) -> Named | None:
        """Returns what a sample is by, or None if its name is not known.

        Values of prompts are those of a reference or a teacher, so they are by the version of the
        session's own publish, also where its replies are by whatever is served.
        """
        sample = entry.operation.sample
        target = self._models.named.get(sample.name)
        scores = target is not None and sample.sampling.prompt_logprobs
        return replace(target, in_flight=False) if target and scores else target

    def lease(self, publisher: Model | None) -> None:
        """Leases prompts to servers of their version as far as these have room.

        The model with the fewest replies under way comes first. Of the model of a publish that is
        under way, `publisher`, only those are leased that the publish waits for.
        """
        ready = self._ready(publisher)
        if not ready:
            # Most calls find that all samples are leased.
            return
        running: Counter[Model | None] = Counter()
        for entry in self.open:
            if target := self._named(entry):
                running[target.model] += len(entry.groups)
        granted: dict[ServerSession, list[Group]] = {}
        # Both look at all groups.
        held_episodes = self._book.episodes_by_holder()
        free_episodes = self._scheduler.free_episodes
        room = {
            session: session.hello.max_episodes - held_episodes[session.key]
            for session in self._fleet.serving()
        }
        while ready:
            model = min(ready, key=running.__getitem__)
            entry, target, sessions = ready[model][0]
            session = max(sessions, key=room.__getitem__)
            if room[session] < 1 or free_episodes < 1:
                del ready[model]
                continue
            granted.setdefault(session, []).append(self._granted(entry, target, session))
            room[session] -= 1
            free_episodes -= 1
            running[model] += 1
            if not entry.num_missing:
                ready[model].pop(0)
            if not ready[model]:
                del ready[model]
        for session, groups in granted.items():
            # The records of one pass are written together.
            self._scheduler.send_evaluation(session, groups)

    def _ready(self, publisher: Model | None) -> dict[Model | None, list[_Ready]]:
        """Returns the samples that lack replies, with what may sample them, by their models.

        Samples that nothing will sample any more end here.
        """
        ready: dict[Model | None, list[_Ready]] = {}
        for entry in [entry for entry in self.open if entry.num_missing]:
            target = self._named(entry)
            if target is None:
                name = entry.operation.sample.name
                self._over(entry, f"{name} is no name of a publish of this run")
                continue
            waits = publisher is not None and self._is_changed_by(target, publisher)
            if waits and entry not in self.awaited:
                continue
            sessions, gone = self._sessions(target)
            served = target.model.served if target.model and target.in_flight else target.step
            if stale := self._stale(entry, target, served):
                # A sample in flight waits for the next publish.
                sessions = []
                gone = "" if target.in_flight else stale
            if sessions:
                ready.setdefault(target.model, []).append((entry, target, sessions))
            elif gone:
                self._over(entry, gone)
        return ready

    def _sessions(self, target: Named) -> tuple[list[ServerSession], str]:
        """Returns the servers that sample by a publish, or why no one will any more."""
        step = target.step
        model = target.model
        serving = self._fleet.serving()
        versions = {
            session: session.version.step for session in serving if session.version is not None
        }
        is_start = self._keeps_start and not step and not target.in_flight
        if is_start or (target.in_flight and not self._models.are_several):
            return serving, ""
        if self._models.are_several:
            assert model is not None
            if not self._models.is_there(model):
                return [], f"the place of model {model.stream} has another model now"
            newest = model.served
            if target.in_flight or step == newest:
                # Later versions have the same values of this model, earlier ones another model's.
                return [session for session in versions if versions[session] >= newest], ""
        else:
            sessions = [session for session in versions if versions[session] == step]
            if sessions or not serving or step == self._run.progress.version.step:
                return sessions, ""
            newest = max(versions.values())
        return [], f"version {step} is not served any more, version {newest} is: {NEWER}"

    def _granted(self, entry: Entry, target: Named, session: ServerSession) -> Group:
        """Leases the next reply to a sample."""
        sample = entry.operation.sample
        environment = CLIENT
        leased_places = {group.task_index for group in entry.groups.values()}
        leased_places |= {reply.task_index for reply in entry.finished}
        places = range(sample.num_samples)
        place = next(place for place in places if place not in leased_places)
        sampling = fleet_pb2.SamplingSettings()
        sampling.CopyFrom(sample.sampling)
        sampling.by_start = self._keeps_start and not target.step and not target.in_flight
        if sampling.HasField("seed"):
            sampling.seed += place
        if target.model is not None:
            sampling.adapter = target.model.adapter.name
            environment = f"{CLIENT}-{sampling.adapter}" if sampling.adapter else CLIENT
            target.model.touch()
        assert session.version is not None
        group = self._book.lease_episode(
            environment,
            session.key,
            session.version.step,
            task_index=place,
            prompt=RawPrompt(sample.prompt_token_ids, sampling),
        )
        entry.groups[group.group_id] = group
        return group

    def collect(self) -> None:
        """Takes replies that have come, and ends samples that have all of theirs."""
        for entry in list(self.open):
            for group_id, group in list(entry.groups.items()):
                if group.is_complete:
                    entry.finished.append(group.finished[0])
                    self._intake.end_evaluated(group)
                elif group_id not in self._book.groups:
                    self._over(entry, "the engine could not sample the reply")
                    break
                elif group.holder is None:
                    # The server handed the lease back, or is lost: another one samples anew.
                    self._intake.start_afresh(group)
                else:
                    continue
                del entry.groups[group_id]
            if len(entry.finished) == entry.operation.sample.num_samples:
                self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        """Ends a sample, unless replies are too stale, which are sampled anew or refused."""
        target = self._named(entry)
        fresh = []
        stale = ""
        for reply in entry.finished:
            versions = [span.version.step for span in reply.version_spans]
            cause = self._stale(entry, target, min(versions)) if versions else ""
            stale = stale or cause
            if not cause:
                fresh.append(reply)
        if target is not None and target.in_flight and stale:
            entry.finished = fresh
        else:
            self._over(entry, stale)

    @staticmethod
    def _stale(entry: Entry, target: Named | None, version: int) -> str:
        """Returns why replies by a version are too far behind, or "" if they are not.

        Values of prompts are meant to be.
        """
        scores = entry.operation.sample.sampling.prompt_logprobs
        model = None if target is None or scores else target.model
        if target is None or model is None or not model.is_stale(version):
            return ""
        return (
            f"version {target.step} is more than max_staleness = {model.max_staleness} steps "
            f"behind its model: {NEWER}"
        )

    def _over(self, entry: Entry, error: str = "") -> None:
        """Ends a sample; with an error, what servers still run for it is withdrawn."""
        del self.open[entry]
        if error:
            self._intake.withdraw(list(entry.groups.values()), error)
            entry.groups.clear()
            entry.finished.clear()
        samples = [
            pb.Sampled(
                token_ids=reply.token_ids[reply.run_lengths[0] :].astype("<u4").tobytes(),
                logprobs=_logprobs(reply, entry.operation.sample.sampling),
                truncated=reply.status is Status.TRUNCATED,
                prompt_logprobs=reply.prompt_logprobs,
            )
            for reply in sorted(entry.finished, key=lambda reply: reply.task_index)
        ]
        self._end(entry, id=entry.operation.id, error=error, samples=samples)
        # The result has its replies.
        entry.finished.clear()


def _logprobs(reply: Trajectory, sampling: fleet_pb2.SamplingSettings) -> bytes:
    """Returns the log-probabilities of a reply's tokens, NaN where tokens were left out.

    The engine's are then of a part of the vocabulary, and a loss that compares them with the
    model's, of all of it, would train by a wrong ratio.
    """
    logprobs = reply.behavior_logprobs
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        logprobs = np.full_like(logprobs, np.nan)
    return logprobs.astype("<f4").tobytes()
