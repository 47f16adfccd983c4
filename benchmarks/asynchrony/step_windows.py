"""Windows of a run in which one fleet works alone, or both under a bound on the lag.

Consumes: a run with a steered controller. Produces: a row of figures for each window. Waits for:
steps and groups. Unblocked by: these, the end of a process, or the limit of the window.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from benchmarks.common.rig import Rig

WARMUP_STEPS = 2
BOUNDS = 4
Row = dict[str, float]


def rate(seen: Sequence[tuple[int, float]]) -> float:
    """Returns tokens per second between the first and the last heartbeat; RuntimeError without two.

    `seen` has counts of tokens and their seconds, the first one at the start; a heartbeat brought
    each new count. So the publish before the first token does not count, nor does the time since
    the newest heartbeat.
    """
    beats = [after for before, after in itertools.pairwise(seen) if after[0] != before[0]]
    if len(beats) < 2:
        raise RuntimeError("generation alone took less than two heartbeats: give more --steps")
    (first, first_s), (last, last_s) = beats[0], beats[-1]
    return (last - first) / (last_s - first_s)


def means(seen: Sequence[tuple[float, int, bool]]) -> tuple[float, float]:
    """Returns the mean of open episodes, and the share of time with the trainer held up.

    `seen` has seconds, open episodes, and whether groups that are due held up the trainer.
    """
    total_s = seen[-1][0] - seen[0][0]
    episodes, held_up = (
        sum(one[which] * (after[0] - one[0]) for one, after in itertools.pairwise(seen)) / total_s
        for which in (1, 2)
    )
    return episodes, held_up


class Windows:
    """Measures one window after another in a run that is under way."""

    def __init__(self, rig: Rig, *, steps: int, limit_s: float) -> None:
        """A window has `steps` steps, or `BOUNDS` times its bound on the lag if that is more.

        RuntimeError when a part of it takes longer than `limit_s`.
        """
        self._rig = rig
        self._controller = rig.controller
        self._steps = steps
        self._limit_s = limit_s

    async def alone(self) -> Row:
        """Measures generation without training, then training without generation, per step."""
        controller = self._controller
        await self._drain()
        controller.former.hold = True
        wanted = self._steps * self._rig.config.algorithm.groups_per_step
        # With this bound the groups of all `self._steps` batches may be leased at once.
        controller.bound(self._steps - 1)
        before = controller.generated_tokens()
        started = time.monotonic()
        beats = [(before, started)]

        def all_leased() -> bool:
            beats.append((controller.generated_tokens(), time.monotonic()))
            return len(controller.group_ids()) >= wanted

        await self._rig.until(all_leased, "generation alone", self._limit_s)
        # Slots stay empty from here on, so the rate is taken now, with the engine still full.
        tokens_per_s = rate(beats)
        await self._rig.until(
            lambda: controller.complete_groups() >= wanted, "generation alone", self._limit_s
        )
        makespan_s = time.monotonic() - started
        await asyncio.sleep(2 * self._rig.config.controller.heartbeat_s)
        tokens = controller.generated_tokens() - before
        # With this bound no new lease fits beside the complete groups.
        controller.bound(0)
        first = len(controller.rows)
        controller.former.hold = False
        await self._until_rows(first + self._steps)
        rows = controller.rows[first : first + self._steps]
        return {
            "generation_s": tokens / tokens_per_s / self._steps,
            "training_s": sum(row["training_s"] for row in rows) / self._steps,
            "makespan_s": makespan_s / self._steps,
            "tokens": tokens / self._steps,
            "tokens_per_s": tokens_per_s,
        }

    async def bounded(self, max_staleness: int) -> Row:
        """Measures the steps of one setting, which begins without groups of another, as a run does.

        Steps count after as many steps as a group may wait. A window is several times as long: in a
        shorter one, short replies could go ahead of long ones, for which later steps wait.
        """
        controller = self._controller
        await self._drain()
        controller.bound(max_staleness)
        await self._until_rows(len(controller.rows) + max_staleness + WARMUP_STEPS)
        steps = max(self._steps, BOUNDS * max_staleness)
        first = len(controller.rows)
        before = controller.generated_tokens()
        seen: list[tuple[float, int, bool]] = []

        def all_done() -> bool:
            seen.append((time.monotonic(), controller.open_episodes(), controller.is_held_up()))
            return len(controller.rows) >= first + steps

        await self._rig.until(all_done, f"step {first + steps}", self._limit_s)
        open_episodes, held_up = means(seen)
        generated = controller.generated_tokens() - before
        rows = controller.rows[first - 1 : first + steps]
        wall_s = rows[-1]["wall_s"] - rows[0]["wall_s"]
        return {
            "steps": steps,
            "step_s": wall_s / steps,
            **{
                name: sum(row[name] for row in rows[1:]) / steps
                for name in ("training_s", "publish_s", "waiting_s", "pause_s")
            },
            # Share of the window in which the trainer waited for groups that were due.
            "held_up_share": held_up,
            "open_episodes": open_episodes,
            "lag_mean": sum(row["lag_mean"] for row in rows[1:]) / steps,
            "tokens": sum(row["trained_tokens"] for row in rows[1:]) / steps,
            # Counted at heartbeats: as many as were trained, unless the window used older groups.
            "generated": generated / steps,
            "ledger_difference": rows[-1]["ledger_difference"],
        }

    async def _drain(self) -> None:
        """Trains with a bound of 0 until no group is left that was leased before."""
        controller = self._controller
        controller.bound(0)
        before = controller.group_ids()
        await self._rig.until(
            lambda: before.isdisjoint(controller.group_ids()), "the groups before", self._limit_s
        )
        await self._until_rows(len(controller.rows) + WARMUP_STEPS)

    async def _until_rows(self, count: int) -> None:
        controller = self._controller
        await self._rig.until(lambda: len(controller.rows) >= count, f"step {count}", self._limit_s)
