"""The samples of clients, from their prompts to their replies.

Consumes: samples, replies. Produces: leases of prompts, results. It waits for nothing: the loop of
the operations calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from slipstream.core.errors import ProtocolError
from slipstream.core.types import Status, Trajectory
from slipstream.extensions.tinker.models import NEWEST, Entry, Model, Models, Named
from slipstream.learner.controller.leasing.groups import Group, RawPrompt
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import Outbox, ServerSession
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.codec import version_to_pb
from slipstream.v1 import fleet_pb2, trajectory_pb2
from slipstream.v1 import operations_pb2 as pb

# The name of the environment in leases of prompts; "client-a" if adapter a samples.
CLIENT = "client"


class Samples:
    """The samples that are not over; each ends by `end`, with its result."""

    def __init__(
        self,
        run: Run,
        books: Books,
        intake: Intake,
        scheduler: Scheduler,
        models: Models,
        end: Callable[[Entry, pb.OperationResult], None],
    ) -> None:
        self._progress, self._book, self._fleet = run.progress, books.leases, books.fleet
        self._signal = run.signal
        self._intake, self._scheduler, self._models, self._end = intake, scheduler, models, end
        # Whether servers sample by version 0, too, whatever they serve.
        self._keeps_start = run.config.lora.publishes_adapters
        # In the order in which they came.
        self.open: dict[Entry, None] = {}
        # Those that the current publish waits for.
        self.awaited: list[Entry] = []

    async def take(
        self,
        requests: AsyncIterator[pb.Operation],
        outbox: Outbox[pb.OperationResult],
        known: dict[str, Entry],
    ) -> None:
        """Adds the samples of a stream to these and to all operations that are `known`.

        Their results go to `outbox`.
        """
        try:
            async for request in requests:
                if not request.HasField("sample"):
                    raise ProtocolError(f"{request.id} is no sample")
                entry = known.get(request.id)
                if entry is None:
                    entry = Entry(request, num_wanted=request.sample.num_samples)
                    known[request.id] = entry
                    self.open[entry] = None
                    self._signal.notify()
                for name in request.told:
                    if told := known.get(name):
                        told.is_told = True
                del request.told[:]
                entry.outbox = outbox
                if entry.ended.is_set():
                    tell(entry)
        finally:
            outbox.close()

    def await_before(self, model: Model) -> None:
        """Notes the samples that end before a publish of `model` does."""
        named = ((one, self._named(one)) for one in self.open)
        self.awaited = [
            one
            for one, found in named
            if self._is_of(found, model) and (found is None or found.step != NEWEST)
        ]

    @property
    def are_awaited(self) -> bool:
        """Whether samples that the current publish waits for are not over."""
        return any(each in self.open for each in self.awaited)

    def lease(self, publisher: Model | None) -> None:
        """Leases prompts to servers of their version as far as these have room.

        The model with the fewest replies under way comes first. Of the model of a publish that is
        under way, `publisher`, only those are leased that the publish waits for.
        """
        ready: dict[str, list[tuple[Entry, list[ServerSession]]]] = {}
        granted: dict[ServerSession, list[Group]] = {}
        # Most calls find that all samples are leased.
        for entry in [one for one in self.open if one.num_leased < one.num_wanted]:
            named = self._named(entry)
            if named is None:
                name = entry.operation.sample.name
                self._over(entry, f"{name} is no name of a publish of this run")
                continue
            is_newest, model = named.step == NEWEST, named.model
            waits = publisher is not None and self._is_of(named, publisher)
            if waits and entry not in self.awaited and not is_newest:
                continue
            sessions, gone = self._sessions(named)
            if self._is_stale(entry, model.served if model and is_newest else named.since):
                # One in flight waits for the next publish.
                sessions, gone = [], "" if is_newest else self._too_stale(named)
            if sessions:
                ready.setdefault(self._stream(entry), []).append((entry, sessions))
            elif gone:
                self._over(entry, gone)
        running: Counter[str] = Counter()
        for entry in self.open if ready else ():
            running[self._stream(entry)] += len(entry.groups)
        while ready:
            stream = min(ready, key=running.__getitem__)
            entry, sessions = ready[stream][0]
            session = max(sessions, key=self._scheduler.room)
            if self._scheduler.room(session) < 1 or not self._scheduler.may_send(1):
                del ready[stream]
                continue
            granted.setdefault(session, []).append(self._granted(entry, session))
            running[stream] += 1
            if entry.num_leased == entry.num_wanted:
                ready[stream].pop(0)
            if not ready[stream]:
                del ready[stream]
        for session, groups in granted.items():
            # The records of one pass are written together.
            self._scheduler.send_evaluation(session, groups)

    def _named(self, entry: Entry) -> Named | None:
        """Returns what a sample is by, or None if its name is not known.

        Values of prompts are those of a reference or a teacher, so they are by the version of the
        session's own publish, also where its replies are by whatever is served.
        """
        sample = entry.operation.sample
        named = self._models.named.get(sample.name)
        if named is None or named.step != NEWEST or not sample.sampling.prompt_logprobs:
            return named
        return replace(named, step=named.since)

    def _stream(self, entry: Entry) -> str:
        named = self._named(entry)
        return "" if named is None or named.model is None else named.model.stream

    def _is_of(self, named: Named | None, model: Model) -> bool:
        """Whether a publish of `model` changes what `named` samples by."""
        return not self._models.are_several or (named is not None and named.model is model)

    def _sessions(self, named: Named) -> tuple[list[ServerSession], str]:
        """Returns the servers that sample by a publish, or why no one will any more."""
        step, model, serving = named.step, named.model, self._fleet.serving()
        if not step and self._keeps_start:
            return serving, ""
        if self._models.are_several:
            assert model is not None
            if not self._models.is_there(model):
                return [], f"the place of model {model.stream} has another model now"
            newest = model.served
            if step in (NEWEST, newest):
                # Later versions have the same values of this model, earlier ones another model's.
                return [one for one in serving if one.version and one.version.step >= newest], ""
        elif step == NEWEST:
            return serving, ""
        else:
            there = [one.version.step for one in serving if one.version is not None]
            if step in there or not serving or step == self._progress.version.step:
                return [one for one in serving if one.version and one.version.step == step], ""
            newest = max(there)
        return [], (
            f"version {step} is not served any more, version {newest} is: "
            "save_weights_and_get_sampling_client makes a client of the newest weights"
        )

    def _granted(self, entry: Entry, session: ServerSession) -> Group:
        sample = entry.operation.sample
        assert session.version is not None
        named = self._named(entry)
        assert named is not None
        sample.sampling.by_start = self._keeps_start and not named.step
        environment = CLIENT
        if named.model is not None:
            adapter = sample.sampling.adapter = named.model.adapter.name
            environment = f"{CLIENT}-{adapter}" if adapter else CLIENT
            named.model.touch()
        taken = {one.task_index for one in entry.groups.values()}
        taken |= {one.task_index for one in entry.finished}
        place = next(one for one in range(entry.num_wanted) if one not in taken)
        sampling = sample.sampling
        if sampling.HasField("seed"):
            sampling = fleet_pb2.SamplingSettings()
            sampling.CopyFrom(sample.sampling)
            sampling.seed += place
        prompt, served = RawPrompt(sample.prompt_token_ids, sampling), session.version.step
        group = self._book.lease_episode(
            environment, session.key, served, task_index=place, prompt=prompt
        )
        entry.groups[group.group_id] = group
        entry.num_leased += 1
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
                    entry.num_leased -= 1
                else:
                    continue
                del entry.groups[group_id]
            if len(entry.finished) == entry.num_wanted:
                self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        """Ends a sample, unless replies are too stale, which are sampled anew or refused."""
        named = self._named(entry)
        fresh = [
            one
            for one in entry.finished
            if not any(self._is_stale(entry, span.version.step) for span in one.version_spans)
        ]
        if named is None or len(fresh) == entry.num_wanted:
            self._over(entry)
        elif named.step != NEWEST:
            self._over(entry, self._too_stale(named))
        else:
            entry.num_leased -= len(entry.finished) - len(fresh)
            entry.finished = fresh

    def _is_stale(self, entry: Entry, version: int) -> bool:
        """Whether replies by a version are too far behind; values of prompts are meant to be."""
        named = self._named(entry)
        if named is None or named.model is None or entry.operation.sample.sampling.prompt_logprobs:
            return False
        return named.model.is_stale(version)

    @staticmethod
    def _too_stale(named: Named) -> str:
        assert named.model is not None
        return (
            f"version {named.since} is more than max_staleness = {named.model.max_staleness} steps "
            "behind its model: save_weights_and_get_sampling_client makes a client of the newest "
            "weights"
        )

    def _over(self, entry: Entry, error: str = "") -> None:
        """Ends a sample; with an error, what servers still run for it is withdrawn."""
        del self.open[entry]
        if error:
            self._intake.withdraw(list(entry.groups.values()), error)
            entry.groups.clear()
        in_order = sorted(entry.finished, key=lambda one: one.task_index)
        found = () if error else map(_sampled, in_order)
        result = pb.OperationResult(id=entry.operation.id, error=error, samples=found)
        self._end(entry, result)
        # The result has its replies.
        entry.finished.clear()


def tell(entry: Entry) -> None:
    """Gives the result of a sample to the stream that asked for it."""
    if entry.outbox is not None:
        if not entry.outbox.put(entry.result):
            # Its reader does not read; whoever asks by id gets the result.
            entry.outbox.close()
        entry.outbox = None


def _sampled(trajectory: Trajectory) -> pb.Sampled:
    start = trajectory.run_lengths[0]
    return pb.Sampled(
        token_ids=trajectory.token_ids[start:].astype("<u4").tobytes(),
        logprobs=trajectory.behavior_logprobs.astype("<f4").tobytes(),
        truncated=trajectory.status is Status.TRUNCATED,
        version_spans=[
            trajectory_pb2.VersionSpan(length=span.length, version=version_to_pb(span.version))
            for span in trajectory.version_spans
        ],
        prompt_logprobs=trajectory.prompt_logprobs,
    )
