"""Makes the weights by which the tasks of environments are drawn, from the results so far.

Weights are made for each step whose batch has got its groups, in a thread, while leases go on by
the weights before. A record of the journal says from which results they are and from where on they
hold, so that a controller that starts again draws the same tasks.

Consumes: the results by task of the run's state. Produces: weights, records of them. Waits for: a
batch, an environment that is ready. Unblocked by: the run's signal, or the time limit of a look.
"""

import asyncio
import logging

import numpy as np
from slipstream.core.errors import RunFailed
from slipstream.core.waits import awake_timeout
from slipstream.extensions.task_weights.settings import (
    SamplerSection,
    TaskWeightsSection,
    own_functions,
    section_of,
    setting_of,
)
from slipstream.learner.algorithms.functions import check_sources
from slipstream.learner.algorithms.task_results import FloatArray, TaskSampler
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.task_table import MAX_TASKS, Event, TaskTable
from slipstream.learner.controller.tasks import DrawnTasks, EnvironmentEntry

LOOK_S = 1.0
# Limit of a call; in the check of functions one for 100,000 tasks must return, too.
WEIGHING_LIMIT_S = 60.0


class TaskWeighing(Part):
    """Keeps `EnvironmentBook.drawn` up to date for the environments of the table."""

    def __init__(self, kernel: Kernel) -> None:
        """Loads the functions; raises ConfigError if one cannot be used."""
        self._run = kernel.run
        self._environments = kernel.books.environments
        self._journal = kernel.books.journal
        self._state = kernel.books.state
        self._intake = kernel.intake
        table: TaskWeightsSection = section_of(kernel.run.config)
        check_sources(kernel.run.config, own_functions(kernel.run.config))
        self._samplers: dict[str, TaskSampler] = {}
        self._drawn: dict[str, DrawnTasks] = {}
        for name, entry in table.environments.items():
            self._samplers[name] = load(name, entry)
            self._drawn[name] = DrawnTasks(pass_reward=entry.pass_reward)
        # The table of which the newest weights of an environment are.
        self._weighed: dict[str, TaskTable] = {}
        self._environments.drawn |= self._drawn
        configured = {section.name for section in kernel.run.config.environments}
        absent = self._drawn.keys() - configured
        for name in sorted(absent):
            self._run.events.add(
                f"{setting_of(name)} waits for a client that serves or submits environment {name}: "
                "the settings have none of that name",
                logging.WARNING,
            )

    def restore(self, history: RunHistory) -> None:
        """Leaves all to the journal's state: weights are made again from the same results."""

    def tasks(self) -> Tasks:
        return {"task weights": self._weigh_forever()}

    async def _weigh_forever(self) -> None:
        while True:
            for name in self._samplers:
                await self._weigh(name)
            await self._run.signal.changes(LOOK_S)

    async def _weigh(self, name: str) -> None:
        """Makes weights if those of the environment are missing or of an earlier step.

        Raises RunFailed if the function is faulty or does not return.
        """
        entry = self._environments.entries.get(name)
        if entry is None or not entry.is_ready:
            return
        if not 0 < entry.num_tasks <= MAX_TASKS:
            self._intake.suspend(name, _unfit(entry))
            return
        table = self._state.task_tables.get(name)
        if table is None or table.num_tasks != entry.num_tasks:
            self._record(
                name,
                entry.num_tasks,
                events=0,
                step=self._state.next_step,
            )
            table = self._state.task_tables[name]
        if self._weighed.get(name) is not table:
            # The first ones of this controller: from the results up to the newest record.
            self._drawn[name].cumulative = None
            cumulative = await self._made(name, table, [], table.step)
            if not self._has(name, table):
                return
        else:
            events = table.pending[:]
            step = self._state.next_step
            if step <= table.step or not events:
                return
            cumulative = await self._made(name, table, events, step)
            if not self._has(name, table):
                return
            self._record(
                name,
                table.num_tasks,
                events=len(events),
                step=step,
            )
        self._weighed[name] = table
        self._drawn[name].cumulative = cumulative
        self._run.signal.notify()

    def _has(self, name: str, table: TaskTable) -> bool:
        return self._state.task_tables.get(name) is table

    async def _made(
        self,
        name: str,
        table: TaskTable,
        events: list[Event],
        step: int,
    ) -> FloatArray:
        sampler = self._samplers[name]

        def make() -> FloatArray:
            results = table.results(name, events, step)
            weights = sampler.weights(results)
            return np.cumsum(weights)

        try:
            async with awake_timeout(WEIGHING_LIMIT_S):
                return await asyncio.to_thread(make)
        except TimeoutError:
            raise RunFailed(
                f"task sampler {sampler.name} of environment {name} gave no weights within "
                f"{WEIGHING_LIMIT_S:g} s"
            ) from None

    def _record(
        self,
        name: str,
        num_tasks: int,
        *,
        events: int,
        step: int,
    ) -> None:
        record = kinds.TaskWeights(
            environment=name,
            num_tasks=num_tasks,
            events=events,
            step=step,
        )
        self._journal.append(record)


def load(name: str, section: SamplerSection) -> TaskSampler:
    """Returns the function of one environment; raises ConfigError if it cannot be used."""
    return TaskSampler.load(section.function, section.args, setting=setting_of(name))


def _unfit(entry: EnvironmentEntry) -> str:
    name = entry.spec.name
    if entry.num_tasks == 0:
        return f"{setting_of(name)} needs a number of tasks, and tasks() has no end"
    return f"{setting_of(name)} is for at most {MAX_TASKS:,} tasks, got {entry.num_tasks:,}"
