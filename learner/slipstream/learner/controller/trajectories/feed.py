"""Watches what a run is fed: replies that nobody can read, judges that fail, prompts that differ.

Consumes: trajectories and complete groups. Produces: an event when something is seen for the first
time in an environment, and the numbers for the summary, both since the controller's start.
"""

from collections import Counter
from collections.abc import Sequence

from pydantic import JsonValue
from slipstream.core.environment_rules import PLAIN, environment_rules
from slipstream.core.types import (
    DROPPED_METRICS,
    IGNORED,
    UNASKED_CALLS,
    WITHOUT_END,
    Purpose,
    Status,
    Trajectory,
)
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.tasks import EnvironmentEntry

# Metrics of verdicts that are above 0 where a judge could read an answer.
READ = ("readable", "well_formed")
# The metric that is above 0 where a judge gave up.
GAVE_UP = "judge_timeout"
# Number of episodes after which the share of unreadable replies is looked at, and its bound.
LOOKED_AT = 256
MOST_UNREADABLE = 0.5


class Feed:
    """Counts by environment, and tells what is new."""

    def __init__(self, run: ControlledRun, books: Books) -> None:
        self._run = run
        self._entries = books.environments.entries
        self._rules = environment_rules(run.config)
        self._counts: dict[str, Counter[str]] = {}
        # The newest episodes with a verdict on a reading: all, those unread, those cut.
        self._newest: dict[str, Counter[str]] = {}

    def note(self, trajectory: Trajectory) -> None:
        """Counts a trajectory that has arrived."""
        entry = self._entries.get(trajectory.environment)
        if entry is None:
            return
        counts = self._of(entry)
        metrics = trajectory.metrics
        counts["episodes"] += 1
        counts["failed_episodes"] += trajectory.status is Status.FAILED
        counts["truncated_episodes"] += trajectory.status is Status.TRUNCATED
        gave_up = metrics.get(GAVE_UP, 0.0) > 0.0
        counts["judge_timeouts"] += gave_up
        if gave_up and entry.is_news("judge"):
            self._warn(entry, "the judge took too long for a reply, which then earned 0")
        if left_out := int(metrics.get(DROPPED_METRICS, 0.0)):
            counts[DROPPED_METRICS] += left_out
            if entry.is_news(DROPPED_METRICS):
                what = "16 are kept, each by the first 40 characters of its name"
                self._warn(entry, f"{left_out} metrics of an episode are left out: {what}")
        if without_end := int(metrics.get(WITHOUT_END, 0.0)):
            counts[WITHOUT_END] += without_end
            if entry.is_news(WITHOUT_END):
                self._warn(
                    entry,
                    f"{without_end} replies of an episode stopped at none of the ends that the "
                    "run told at its start: the engine has an end of its own, which exports lack",
                )
        if unasked := int(metrics.get(UNASKED_CALLS, 0.0)):
            counts[UNASKED_CALLS] += unasked
            if entry.is_news(UNASKED_CALLS):
                self._warn(
                    entry,
                    f"an agent that was played again did not ask for {unasked} of its recorded "
                    "calls: its course depends on something else than the model's replies",
                )
        known_names = entry.told.setdefault("ignored", set())
        ignored = {n.removeprefix(IGNORED) for n in metrics if n.startswith(IGNORED)} - known_names
        if ignored:
            known_names |= ignored
            self._run.events.warn(
                f"agents of {entry.spec.name} ask for {', '.join(sorted(ignored))}, which "
                "changes nothing: docs/guides/agents.md says what holds"
            )
        rules = self._rules.get(trajectory.environment, PLAIN)
        estimator = (rules.algorithm or self._run.config.algorithm).estimator
        sums_turns = estimator is not None and estimator.sums_turns
        if sums_turns and trajectory.token_rewards is not None and entry.is_news("sums"):
            self._run.events.add(
                f"rewards of several turns of {trajectory.environment} are added up: all turns of "
                "an episode learn from the sum"
            )
        read = [metrics[name] for name in READ if name in metrics]
        if read and trajectory.purpose is Purpose.TRAINING:
            self._look_at_reading(entry, is_read=min(read) > 0.0, status=trajectory.status)

    def complete(self, group: Sequence[Trajectory]) -> None:
        """Compares the prompts of a complete group."""
        entry = self._entries.get(group[0].environment)
        prompts = {
            trajectory.token_ids[: sum(trajectory.run_lengths[:1])].tobytes()
            for trajectory in group
        }
        if entry is None or len(prompts) <= 1:
            return
        self._of(entry)["groups_with_unequal_prompts"] += 1
        if entry.is_news("prompts"):
            self._warn(
                entry,
                f"the {len(group)} members of group {group[0].group_id} read {len(prompts)} "
                "different prompts, so their rewards cannot be compared",
            )

    def count(self, environment: str, name: str) -> int:
        """Returns one of the numbers of an environment, 0 if nothing was counted."""
        return self._counts.get(environment, Counter())[name]

    def summary(self) -> dict[str, JsonValue]:
        """Returns the numbers of each environment that are not 0."""
        summaries: dict[str, JsonValue] = {}
        for name, entry in self._entries.items():
            # No episode of an environment may have begun.
            counts = {**self._of(entry), "skipped_tasks": entry.tasks_skipped}
            numbers: dict[str, JsonValue] = {key: n for key, n in counts.items() if n}
            if numbers:
                summaries[name] = numbers
        return summaries

    def _of(self, entry: EnvironmentEntry) -> Counter[str]:
        return self._counts.setdefault(entry.spec.name, Counter())

    def _warn(self, entry: EnvironmentEntry, what: str) -> None:
        counted = "summary.json counts such cases"
        self._run.events.warn(f"environment {entry.spec.name}: {what}; {counted}")

    def _look_at_reading(self, entry: EnvironmentEntry, *, is_read: bool, status: Status) -> None:
        newest = self._newest.setdefault(entry.spec.name, Counter())
        newest["all"] += 1
        newest["unread"] += not is_read
        newest["cut"] += status is Status.TRUNCATED
        self._of(entry)["unreadable_replies"] += not is_read
        if newest["all"] < LOOKED_AT:
            return
        unread = newest["unread"] / newest["all"]
        cut = newest["cut"] / newest["all"]
        newest.clear()
        if unread > MOST_UNREADABLE and entry.is_news("unreadable"):
            self._warn(
                entry,
                f"{unread:.0%} of the last {LOOKED_AT} replies hold no answer that the judge can "
                f"read, and {cut:.0%} were cut at a length limit",
            )
