"""Adds environments to a run: from the configuration, by `submit`, or served by a client.

Waits for: a rollout server's report that it has loaded a submitted environment. Unblocked by: that
report, or the time limit.
"""

import json
import math
import os
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
from google.protobuf import json_format
from slipstream.core.errors import ProtocolError
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.settings.config import Config
from slipstream.core.settings.section import REFERENCE_FORM
from slipstream.core.settings.sections import EnvironmentSection
from slipstream.core.template_values import read_object, read_values, values_json
from slipstream.core.types import Purpose
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import CallContext, ServerSession
from slipstream.learner.controller.tasks import EnvironmentEntry, Relay, first_message
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.bounds import one_line, shown
from slipstream.protocol.release import unknown_fact
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import environment_pb2_grpc, fleet_pb2, trajectory_pb2

LOAD_LIMIT_S = 90.0
# Seconds within which a client must send its hello.
HELLO_TIMEOUT_S = 10.0
NAME = re.compile(r"\w[\w.:-]{0,99}")
# Largest number of worker processes of all submitted environments on one rollout server.
MAX_WORKERS = 256
MAX_ENVIRONMENTS = 256
MIN_WEIGHT = 1e-6


class EnvironmentServicer(Part, environment_pb2_grpc.EnvironmentServiceServicer):
    """Adds the configured environments, and others that clients or an earlier start have added."""

    def __init__(self, run: ControlledRun, books: Books, intake: Intake) -> None:
        self._run = run
        self._progress = run.progress
        self._environments = books.environments
        self._fleet = books.fleet
        self._book = books.leases
        self._journal = books.journal
        self._intake = intake
        self._group_sizes = group_sizes_of(run.config)
        # Environments that the run itself starts, from the folder in which it looks for modules.
        self._folder = os.getcwd()
        self._own = environment_specs(run.config, search_path=self._folder)
        for spec in self._own:
            self._environments.add(spec, starts_run=True)
        self.relay = Relay(self._environments.entries)

    def restore(self, history: RunHistory) -> None:
        """Adds the environments of earlier starts; closes open groups whose environment is gone."""
        for name, text in history.submitted.items():
            if name in self._environments.entries:
                continue
            try:
                spec = json_format.Parse(text, pb.EnvironmentSpec())
            except json_format.ParseError as error:
                what = f"the submitted environment {name}"
                fact = one_line(str(error), 200)
                raise ProtocolError(unknown_fact(what, fact)) from error
            if problem := self._problem(spec):
                # The settings may allow less than before.
                self._run.events.warn(f"environment {name} is not submitted again: {problem}")
            else:
                self._environments.add(spec)
        entries = self._environments.entries
        for group in [g for g in self._book.groups.values() if g.environment not in entries]:
            self._intake.withdraw([group], f"environment {group.environment} is not in the run")

    def lost(self, session: ServerSession) -> None:
        self._environments.server_lost(session.key)

    def joined(self, session: ServerSession) -> None:
        for entry in self._environments.entries.values():
            if entry.client_episodes is None and not entry.is_suspended:
                session.send(_load_order(entry.spec))

    def environment_reported(
        self, session: ServerSession, report: fleet_pb2.EnvironmentReport
    ) -> None:
        cause = report.failure.message if report.HasField("failure") else ""
        entry = self._environments.entries.get(report.environment)
        if entry is None or entry.is_suspended or entry.client_episodes is not None:
            # The environment left the run meanwhile, or a client serves it: no rollout server does.
            return
        if not cause:
            # Tasks are leased by their number, which must name the same task on every server.
            has_others = bool(report.digest) and entry.counts.digest != report.digest
            is_elsewhere = bool(entry.loaded_on - {session.key})
            there = "on other rollout servers: all hosts must have the same data"
            if is_elsewhere and entry.num_tasks != report.num_tasks:
                cause = f"it has {report.num_tasks} tasks here and {entry.num_tasks} {there}"
            elif has_others and entry.loaded_on:
                if session.key in entry.loaded_on:
                    there = "in another process of this server: "
                    there += "tasks() must give the same at every call"
                cause = f"it has other tasks than {there}"
            elif has_others:
                self._take_tasks(entry, report.num_tasks, report.digest)
        if cause:
            entry.load_failed(session.key, cause)
            self._run.events.warn(f"environment {report.environment} on {session.name}: {cause}")
        else:
            entry.loaded(session.key, report.num_tasks)
        self._run.signal.notify()

    def _take_tasks(self, entry: EnvironmentEntry, num_tasks: int, digest: str) -> None:
        """Journals the tasks of an environment; tells if they are others than at the last start."""
        name = entry.spec.name
        if entry.counts.digest:
            # The new tasks come once each, as at the start.
            entry.skipped_in_a_row = 0
            entry.order.clear()
            text = f"the tasks of environment {name} have changed since the run began: there are "
            text += f"{num_tasks:,} now" if num_tasks else "others now"
            if entry.is_training:
                cause = f"the tasks of environment {name} have changed"
                for group in [g for g in self._book.again if g.environment == name]:
                    # The group's number names another task now; the group has left the book before.
                    self._book.again.remove(group)
                    closed = kinds.Closed(group=group.group_id, how="withdrawn", cause=cause)
                    self._journal.append(closed)
                groups = [g for g in self._book.groups.values() if g.environment == name]
                self._intake.withdraw(groups, cause)
                text += f"; {len(groups)} open groups are withdrawn, and each task comes afresh"
            else:
                text += "; results before and after cannot be compared"
            self._run.events.warn(text)
        self._journal.append(kinds.Tasks(environment=name, num_tasks=num_tasks, digest=digest))

    async def SubmitEnvironment(  # noqa: N802
        self, request: pb.SubmitEnvironmentRequest, context: CallContext
    ) -> pb.SubmitEnvironmentResponse:
        """Adds an environment to the running mixture; waits until a server has loaded it.

        Rejects an invalid specification. Removes the environment again if all servers fail to load
        it.
        """
        spec = request.spec
        spec.search_path = spec.search_path or self._folder
        problem = self._problem(spec)
        if not problem and REFERENCE_FORM.fullmatch(spec.reference) is None:
            problem = f"a reference is package.module:Class, got {spec.reference!r}"
        if problem:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, problem, Reason.BAD_ARGUMENT)
        text = json_format.MessageToJson(spec, indent=None)
        self._journal.append(kinds.Submitted(environment=spec.name, spec=text))
        entry = self._enter(spec)
        self._fleet.broadcast(_load_order(spec, try_reset=True))
        self._run.events.add(f"environment {spec.name} was submitted")
        clock = self._run.clock
        # The limit includes `timeout_s` because servers also reset the first task.
        until_s = clock.now_s() + LOAD_LIMIT_S + spec.timeout_s
        while not entry.is_ready and self._fleet.sessions and clock.now_s() < until_s:
            if all(session.key in entry.failed_on for session in self._fleet.sessions.values()):
                self._environments.entries.pop(spec.name, None)
                self._journal.append(kinds.Unsubmitted(environment=spec.name))
                self._fleet.unload(spec)
                entry.state = pb.ENVIRONMENT_STATE_SUSPENDED
                break
            await self._run.signal.changes(1.0)
        return pb.SubmitEnvironmentResponse(status=entry.describe())

    async def ListEnvironments(  # noqa: N802
        self, request: pb.ListEnvironmentsRequest, context: CallContext
    ) -> pb.ListEnvironmentsResponse:
        entries = self._environments.entries.values()
        return pb.ListEnvironmentsResponse(environments=[entry.describe() for entry in entries])

    async def ServeEpisodes(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: CallContext
    ) -> AsyncIterator[pb.WorkerCommand]:
        """Serves one client from its hello to the end of its stream; yields commands for it."""
        clock = self._run.clock
        limit_s = HELLO_TIMEOUT_S
        hello = (await first_message(request_iterator, context, clock, limit_s=limit_s)).hello
        if refusal := self._client_came(hello):
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, refusal, Reason.BAD_ARGUMENT)
        entry = self._environments.entries[hello.spec.name]
        try:
            async with aclosing(self.relay.serve_episodes(entry, request_iterator)) as commands:
                async for command in commands:
                    yield command
            if self._progress.has_failed:
                cause = f"the run failed: {self._progress.cause}"
                await abort(context, grpc.StatusCode.ABORTED, cause, Reason.WRONG_STATE)
        finally:
            if entry.is_ready and not self._progress.is_over:
                self._intake.suspend(entry.spec.name, "the client that served it left")

    def _problem(self, spec: pb.EnvironmentSpec) -> str:
        if self._progress.is_over:
            return "the run is over"
        if NAME.fullmatch(spec.name) is None:
            return (
                f"a name has 1 to 100 letters, digits and ._:-, a letter or digit first, "
                f"got {shown(spec.name)}"
            )
        entry = self._environments.entries.get(spec.name)
        if entry is not None and not entry.is_suspended:
            return f"the run has an environment {spec.name} already; choose another name"
        if not MIN_WEIGHT <= spec.weight <= 1 / MIN_WEIGHT:
            return (
                f"weight must be between {MIN_WEIGHT:g} and {1 / MIN_WEIGHT:g}, got {spec.weight}"
            )
        if not (math.isfinite(spec.timeout_s) and spec.timeout_s > 0):
            return f"timeout_s must be above 0, got {spec.timeout_s}"
        if spec.reference and (problem := self._start_problem(spec)):
            return problem
        if refusal := self._run.config.lora.refusal(spec.adapter):
            return refusal
        if refusal := self._run.config.teacher_refusal(spec.name):
            return refusal
        if entry is not None and entry.spec.adapter != spec.adapter:
            return (
                f"adapter of {spec.name} must stay {entry.spec.adapter!r}, got {spec.adapter!r}: "
                "its leased groups are sampled with it; choose another name"
            )
        lasting = len(self._environments.entries) - len(self._left())
        if lasting >= MAX_ENVIRONMENTS and entry is None:
            return f"a run has at most {MAX_ENVIRONMENTS} environments"
        if spec.purpose != trajectory_pb2.EPISODE_PURPOSE_TRAINING:
            return "only environments to train on can be submitted"
        try:
            read_object("args", spec.args_json)
            read_values(spec.chat_template_kwargs_json)
        except ValueError as error:
            return str(error)
        return ""

    def _left(self) -> list[str]:
        """Returns the suspended environments that clients had added, oldest first."""
        own_names = {spec.name for spec in self._own}
        entries = self._environments.entries.items()
        return [name for name, entry in entries if entry.is_suspended and name not in own_names]

    def _start_problem(self, spec: pb.EnvironmentSpec) -> str:
        """Returns why rollout servers may not start the workers of `spec`, or "" if they may."""
        left_out = {spec.name, *(own_spec.name for own_spec in self._own)}
        left_out |= {*self._left()}
        other_specs = (
            e.spec for name, e in self._environments.entries.items() if name not in left_out
        )
        used_workers = sum(spec.num_workers for spec in other_specs if spec.reference)
        if not 1 <= spec.num_workers <= MAX_WORKERS - used_workers:
            return (
                f"num_workers must be between 1 and {MAX_WORKERS} with the {used_workers} of other "
                f"submitted environments, got {spec.num_workers}"
            )
        if refusal := self._run.config.submission_refusal(spec.reference):
            return refusal
        folder = Path(self._folder)
        allowed = {str(folder / path) for path in self._run.config.security.submitted_paths}
        interpreters = {own_spec.python for own_spec in self._own}
        for name, value, usual in (
            ("python", spec.python, interpreters),
            ("search_path", spec.search_path, {self._folder}),
        ):
            if value and value not in usual | allowed:
                return (
                    f"{name} must be empty, that of the run or one of security.submitted_paths, "
                    f"got {shown(value)}"
                )
        return ""

    def _enter(self, spec: pb.EnvironmentSpec) -> EnvironmentEntry:
        """Adds an environment to the running mixture, level with the others."""
        entries = self._environments.entries
        if spec.name not in entries and len(entries) >= MAX_ENVIRONMENTS:
            del entries[self._left()[0]]
        entry = self._environments.add(spec)
        head_start = self._environments.head_start(entry)
        if head_start > entry.counts.head_start:
            self._journal.append(kinds.HeadStart(environment=spec.name, head_start=head_start))
        return entry

    def _client_came(self, hello: pb.WorkerHello) -> str:
        group_size = self._group_sizes.of(hello.spec.name)
        problem = self._problem(hello.spec)
        if problem:
            return problem
        if hello.max_episodes < group_size:
            return (
                f"episodes must be at least the group size {group_size}, got {hello.max_episodes}"
            )
        entry = self._enter(hello.spec)
        entry.client_episodes = hello.max_episodes
        entry.num_tasks = hello.num_tasks
        if hello.digest and hello.digest != entry.counts.digest:
            self._take_tasks(entry, hello.num_tasks, hello.digest)
        entry.state = pb.ENVIRONMENT_STATE_READY
        self._run.events.add(f"a client serves environment {hello.spec.name}")
        self._run.signal.notify()
        return ""


def _load_order(
    spec: pb.EnvironmentSpec, *, try_reset: bool = False
) -> fleet_pb2.ControllerMessage:
    order = fleet_pb2.EnvironmentOrder(spec=spec, try_reset=try_reset)
    return fleet_pb2.ControllerMessage(environment=order)


def environment_specs(config: Config, *, search_path: str) -> list[pb.EnvironmentSpec]:
    """Returns the configured environments, then evaluations, imported from `search_path`."""
    specs = []
    for section in config.played:
        weight = 1.0
        purpose = Purpose.EVALUATION
        if isinstance(section, EnvironmentSection):
            weight = section.weight
            purpose = Purpose.TRAINING
        spec = pb.EnvironmentSpec(
            name=section.name,
            reference=section.reference,
            args_json=json.dumps(section.args),
            weight=weight,
            timeout_s=section.timeout_s,
            num_workers=section.num_workers,
            search_path=search_path,
            purpose=trajectory_pb2.EpisodePurpose.Name(purpose.value),
            chat_template_kwargs_json=values_json(section.chat_template_kwargs),
            python=str(Path(search_path) / section.python) if section.python else "",
            adapter=section.adapter or "",
        )
        specs.append(spec)
    return specs
