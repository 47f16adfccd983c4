"""The part of the controller that keeps the answered calls of agents, and hands them out.

Consumes: calls of rollout servers. Produces: files of open episodes. Waits for: the end of groups.
Unblocked by: the run's signal.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from slipstream.core.run_folder import CALLS
from slipstream.core.types import GroupId, PolicyVersion, Purpose
from slipstream.extensions.agent_recovery.call_store import CallStore, EpisodeFull
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import ControlledRun
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import calls_pb2 as pb
from slipstream.v1 import calls_pb2_grpc

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Context = Any

# Seconds between two looks for files whose episodes are over.
LOOK_S = 5.0


class CallRecordServicer(calls_pb2_grpc.CallRecordServiceServicer):
    """Keeps the calls of attempts that a lease allows, and returns them to later attempts."""

    def __init__(self, run: ControlledRun, book: LeaseBook, store: CallStore) -> None:
        self._run = run
        self._book = book
        self._store = store
        # What the last call met, which is told once; "" if it was kept.
        self._problem = ""

    async def Begin(  # noqa: N802
        self, request: pb.BeginEpisodeRequest, context: Context
    ) -> AsyncIterator[pb.CallRecord]:
        episode = request.episode
        group = await self._group(episode, context)
        if request.anew:
            await asyncio.to_thread(self._store.forget, episode)
            return
        try:
            calls = await asyncio.to_thread(self._store.calls, episode)
        except OSError as error:
            self._run.events.warn(
                f"the kept calls of episode {episode.member} of group {group.group_id} cannot be "
                f"read: {error}; they are sampled again"
            )
            return
        cause = self._misfit(group, calls)
        if cause:
            await asyncio.to_thread(self._store.forget, episode)
            self._run.events.warn(
                f"episode {episode.member} of group {group.group_id} begins anew, without its "
                f"{len(calls)} kept calls: {cause}"
            )
            return
        for call in calls:
            yield call.record

    async def Keep(  # noqa: N802
        self, request: pb.KeepCallRequest, context: Context
    ) -> pb.KeepCallResponse:
        episode = request.episode
        await self._group(episode, context)
        problem = ""
        try:
            await asyncio.to_thread(self._store.keep, request)
        except EpisodeFull:
            problem = (
                f"episode {episode.member} of group {episode.group_id} has no room for more kept "
                "calls: if it is lost, the later ones are sampled again"
            )
        except OSError as error:
            problem = f"calls of agents cannot be kept, and are sampled again if lost: {error}"
        if problem and problem != self._problem:
            self._run.events.warn(problem)
        self._problem = problem
        return pb.KeepCallResponse()

    async def _group(self, episode: pb.EpisodeName, context: Context) -> Group:
        """Returns the group of an attempt, or ends the call if no lease of it is open."""
        group = self._book.groups.get(GroupId(episode.group_id))
        if (
            group is None
            or group.purpose is not Purpose.TRAINING
            or episode.member not in group.missing
            or group.excess(episode.server_epoch, episode.attempt)
            or not group.may_end(episode.server_epoch, episode.attempt)
        ):
            text = (
                f"attempt {episode.attempt} at episode {episode.member} of {episode.group_id} has "
                "no open lease"
            )
            code = grpc.StatusCode.FAILED_PRECONDITION
            await abort(context, code, text, Reason.WRONG_STATE)
        assert group is not None
        return group

    def _misfit(self, group: Group, calls: Sequence[pb.KeepCallRequest]) -> str:
        """Returns why no trajectory of the group may have the tokens of `calls`, or ""."""
        progress = self._run.progress
        newest = PolicyVersion(progress.newest_incarnation, progress.version.step)
        versions = [span.version for call in calls for span in call.record.version_spans]
        for version in versions:
            if version.step > newest.step or version.incarnation > newest.incarnation:
                return f"version {version.step} sampled one, the newest is {newest}"
        oldest = min((version.step for version in versions), default=group.deadline_step)
        max_staleness = self._run.config.algorithm.max_staleness
        if group.deadline_step - oldest > max_staleness:
            return (
                f"version {oldest} sampled one, step {group.deadline_step + 1} may train the "
                f"group, and max_staleness is {max_staleness}"
            )
        return ""


class CallKeeping(Part):
    """Serves the kept calls, and removes those of episodes that are over."""

    def __init__(self, run: ControlledRun, book: LeaseBook) -> None:
        self._run = run
        self._book = book
        self._store = CallStore(run.config.run_dir / CALLS)

    def serve(self, server: grpc.aio.Server) -> None:
        servicer = CallRecordServicer(self._run, self._book, self._store)
        calls_pb2_grpc.add_CallRecordServiceServicer_to_server(servicer, server)

    def restore(self, history: RunHistory) -> None:  # noqa: ARG002 - the book has it already
        self._store.forget_others(self._store.paths(), self._open_episodes())

    def tasks(self) -> Tasks:
        return {"kept calls": self._clean()}

    async def close_files(self) -> None:
        if not self._run.progress.may_go_on:
            await asyncio.to_thread(self._store.close)

    def _open_episodes(self) -> set[tuple[str, int]]:
        return {
            (group.group_id, member)
            for group in self._book.training_groups()
            for member in group.missing
        }

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            # The groups of a run that was stopped are open for the start that resumes it.
            if not self._run.progress.is_over:
                paths = await asyncio.to_thread(self._store.paths)
                await asyncio.to_thread(self._store.forget_others, paths, self._open_episodes())


def part(kernel: Kernel) -> CallKeeping:
    """Makes the part."""
    return CallKeeping(kernel.run, kernel.books.leases)
