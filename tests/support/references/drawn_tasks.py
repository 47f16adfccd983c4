"""The tasks that a journal's leases must have where they are drawn by weights, by its records."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from slipstream.learner.algorithms.task_results import TaskResults
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.records.kinds import parsed
from slipstream.learner.controller.records.state import RunState


def drawn_tasks(
    journal: Path,
    environment: str,
    weigh: Callable[[TaskResults], np.ndarray],
    *,
    seed: int,
) -> Iterator[tuple[int, int]]:
    """Yields the task of each new group's lease, and the one that the records before it give."""
    state = RunState()
    for fields in read_records(journal):
        record = parsed(fields)
        if (
            isinstance(record, kinds.GroupLease)
            and record.environment == environment
            and record.replaces is None
            and int(record.group[1:]) >= state.next_group
        ):
            table = state.task_tables[environment]
            sums = np.cumsum(weigh(table.results(environment, [], table.step)))
            drawn = random.Random(f"{seed}/{environment}/draw/{record.number}").random()
            place = min(drawn * float(sums[-1]), math.nextafter(float(sums[-1]), 0.0))
            yield record.task, int((sums <= place).sum())
        state.apply(record)
