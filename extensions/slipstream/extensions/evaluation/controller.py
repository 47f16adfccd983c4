"""Measures held-out environments at one version during training.

Consumes: trajectories of evaluation episodes. Produces: evaluation leases and results. Waits for: a
server that serves the wanted version. Unblocked by: the run's signal. That server keeps its version
until the round is over.
"""

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.types import FULL_REWARD, GroupId, PolicyVersion, Status, Trajectory
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.results import RunResults
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.trajectories.formed_batch import Trained, means_of_metrics
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import trainer_pb2

# The tasks of each evaluation whose replies a run keeps as text: the first ones, in every round.
KEPT_TASKS = 3


@dataclass(frozen=True)
class EvaluatedEpisode:
    """The facts that an evaluation keeps about each episode that got a reward."""

    task_index: int
    reward: float
    # Number of sampled tokens of each reply.
    reply_tokens: tuple[int, ...]
    truncated: bool
    metrics: tuple[tuple[str, float], ...] = ()


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k: the chance that any of `k` replies passes.

    The `k` replies are drawn without replacement from `num_samples` replies, of which `num_passed`
    passed: 1 - C(n - c, k) / C(n, k), the estimator of arXiv:2107.03374. Needs k <= num_samples.
    """
    assert 0 <= num_passed <= num_samples
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def has_unknown_scale(rewards: Sequence[float], pass_reward: float | None) -> bool:
    """Whether nobody said which reward passes, and it is not 1: one of the rewards is above."""
    # Rounding may raise a sum of rewards.
    return pass_reward is None and max(rewards, default=0.0) > 2 - FULL_REWARD


def evaluation_statistics(
    episodes: Sequence[EvaluatedEpisode],
    *,
    num_failed: int,
    samples: int,
    pass_reward: float | None = None,
) -> dict[str, float]:
    """Returns the statistics of one evaluation in one round, by the names in docs/metrics.md.

    Returns only the counts if there is no episode. For `samples`, the episodes of a task, and for
    each power of two below, k, the statistic `pass_at_k` is the mean over the tasks that have at
    least k episodes that did not fail; it is left out if there is no such task. An episode passes
    with `pass_reward`, by default 1: then there is no rate if a reward is above 1.
    """
    counts = {"num_episodes": float(len(episodes)), "num_failed": float(num_failed)}
    if not episodes:
        return counts
    rewards = [episode.reward for episode in episodes]
    replies = [tokens for episode in episodes for tokens in episode.reply_tokens]
    lowest_pass = FULL_REWARD
    if pass_reward is not None:
        lowest_pass = pass_reward - (1 - FULL_REWARD)
    passed: dict[int, list[bool]] = {}
    for episode in episodes:
        passed.setdefault(episode.task_index, []).append(episode.reward >= lowest_pass)
    rates: dict[str, float] = {}
    numbers = [1 << power for power in range((samples - 1).bit_length())]
    for k in (*numbers, samples):
        if has_unknown_scale(rewards, pass_reward):
            break
        estimates = [pass_at_k(len(p), sum(p), k) for p in passed.values() if len(p) >= k]
        if estimates:
            rates[f"pass_at_{k}"] = statistics.fmean(estimates)
    return {
        **means_of_metrics([dict(episode.metrics) for episode in episodes]),
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "reward_median": statistics.median(rewards),
        "reply_tokens_mean": statistics.fmean(replies) if replies else 0.0,
        "reply_tokens_max": float(max(replies, default=0)),
        "truncated_fraction": statistics.fmean(episode.truncated for episode in episodes),
        **rates,
        **counts,
    }


@dataclass(eq=False)
class Round:
    """One evaluation of all held-out environments at one version."""

    version: PolicyVersion
    session: ServerSession
    # Environment and task index of the episodes that are not leased yet.
    waiting: list[tuple[str, int]]
    running: dict[GroupId, Group] = field(default_factory=dict)
    episodes: dict[str, list[EvaluatedEpisode]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    # The first reply to each of the first tasks, by evaluation and task index.
    replies: dict[tuple[str, int], Trajectory] = field(default_factory=dict)
    started_s: float = field(default_factory=lambda: time.monotonic())


class Evaluator(Part):
    """Runs evaluation rounds: before the first step, after every n-th step and after the last step.

    Life of a round: `stepped` requests a version; `run_forever` pins a server that serves this
    version, leases the episodes to the server as the server has room, collects the episodes, and
    gives the result to `results`. If the server is lost or serves another version, the round starts
    again on another server.
    """

    def __init__(
        self,
        run: ControlledRun,
        books: Books,
        intake: Intake,
        publisher: Publisher,
        scheduler: Scheduler,
        results: RunResults,
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._sections = run.config.evaluations
        self._book = books.leases
        self._environments = books.environments
        self._fleet = books.fleet
        self._intake = intake
        self._publisher = publisher
        self._scheduler = scheduler
        self._results = results
        self._round: Round | None = None
        self._wanted_step: int | None = 0
        # Names of evaluations about which the log has warned that they have too few tasks.
        self._warned: set[str] = set()
        # Names of those of which it has said that they have no pass rates.
        self._unscaled: set[str] = set()

    def restore(self, history: RunHistory) -> None:
        """Requests the newest due evaluation if it has no result."""
        measured = max((record.version for record in history.evaluations), default=-1)
        # The start is always due.
        versions = range(history.version.step, 0, -1)
        newest_due = next(filter(self._is_due, versions), 0)
        self._wanted_step = newest_due if newest_due > measured else None

    async def run_forever(self) -> None:
        """Starts rounds and leases their episodes until the task is cancelled."""
        while True:
            if self._progress.has_trainer and not self._progress.is_over:
                self._turn()
            await self._run.signal.changes(0.5)

    def tasks(self) -> Tasks:
        return {"evaluator": self.run_forever()}

    def drains(self, session: ServerSession) -> None:
        self.lost(session)
        self._publisher.pinned.discard(session.key)

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, given_s: float | None
    ) -> None:
        """Requests an evaluation of a new version; `restore` did so for one that is made again."""
        if not trained.again and self._is_due(trained.version.step):
            self._wanted_step = trained.version.step

    def _is_due(self, step: int) -> bool:
        return step >= self._progress.last_step or any(
            e.every_steps and step % e.every_steps == 0 for e in self._sections
        )

    def is_done(self) -> bool:
        return self._round is None and self._wanted_step is None

    def lost(self, session: ServerSession) -> None:
        round_ = self._round
        if round_ is None or round_.session is not session:
            return
        self._round = None
        self._wanted_step = max(round_.version.step, self._wanted_step or 0)
        self._scheduler.reserved.pop(session.key, None)
        self._intake.withdraw(list(round_.running.values()), "its server is gone")

    def _turn(self) -> None:
        if self._round is not None and not self._round.session.is_serving:
            # The server will serve another version next.
            self._publisher.pinned.discard(self._round.session.key)
            self.lost(self._round.session)
        if self._round is None:
            self._start()
        if self._round is not None:
            self._collect(self._round)
            self._lease(self._round)
            if not self._round.waiting and not self._round.running:
                self._finish(self._round)

    def _start(self) -> None:
        session = self._chosen()
        if session is None:
            return
        version = session.version
        assert version is not None
        held_out = self._environments.evaluations()
        broken = [entry for entry in held_out if session.key in entry.failed_on]
        if broken:
            self._wanted_step = None
            self._publisher.pinned.discard(session.key)
            cause = f"no evaluation: {broken[0].spec.name}: {broken[0].cause}"
            self._run.events.add(cause, logging.ERROR)
            self._run.signal.notify()
            return
        # The server keeps its version from here on, even while its environments are loading.
        if self._publisher.pin(session) and self._is_ready(session):
            self._round = Round(version, session, self._tasks())
            if self._suits(version):
                self._wanted_step = None
            self._scheduler.reserved[session.key] = len(self._round.waiting)

    def _chosen(self) -> ServerSession | None:
        """Returns the server for the next round, or None if no server suits or no round is due.

        Prefers a server with the environments loaded, then a pinned server, then any other that
        serves a suitable version. Unpins all other servers, because nothing else would unpin them.
        """
        if self._wanted_step is None:
            return None
        serving = self._fleet.serving()
        pinned = self._publisher.pinned
        waiting = [session for session in serving if session.key in pinned]
        suitable = [s for s in serving if s.version is not None and self._suits(s.version)]
        ready = [session for session in waiting + suitable if self._is_ready(session)]
        session_of_round = next(iter(ready + waiting + suitable), None)
        pinned.difference_update(
            session.key for session in waiting if session is not session_of_round
        )
        return session_of_round

    def _is_ready(self, session: ServerSession) -> bool:
        return all(entry.runs_on(session.key) for entry in self._environments.evaluations())

    def _suits(self, version: PolicyVersion) -> bool:
        """Whether the round may measure `version`: the wanted version or a newer one.

        Once the last version is wanted, only that version qualifies.
        """
        wanted_step = self._wanted_step
        last = self._progress.last_step
        assert wanted_step is not None
        return version.step >= wanted_step and (wanted_step < last or version.step == last)

    def _tasks(self) -> list[tuple[str, int]]:
        tasks = []
        for section in self._sections:
            num_asked = section.num_episodes // section.samples_per_task
            num_tasks = self._environments.entries[section.name].num_tasks
            # A task that is taken twice would count twice in the reward, and once in pass@k.
            count = min(num_asked, num_tasks) if num_tasks else num_asked
            samples = section.samples_per_task
            if count < num_asked and section.name not in self._warned:
                self._warned.add(section.name)
                self._run.events.warn(
                    f"evaluation {section.name} has {count} task{'s' * (count != 1)}, and "
                    f"num_episodes = {section.num_episodes} with samples_per_task = {samples} asks "
                    f"for {num_asked}: a round takes each task once, {count * samples} episodes"
                )
            for index in range(count):
                tasks += [(section.name, index)] * samples
        return tasks

    def _lease(self, round_: Round) -> None:
        scheduler = self._scheduler
        granted = []
        key = round_.session.key
        step = round_.version.step
        room = round_.session.hello.max_episodes - self._book.episodes_by_holder()[key]
        for _ in range(min(room, scheduler.free_episodes, len(round_.waiting))):
            name, task_index = round_.waiting.pop()
            # The seed is the task's number: every round, and every sample, sees the same task.
            group = self._book.lease_episode(
                name, key, step, task_index=task_index, seed=task_index
            )
            round_.running[group.group_id] = group
            granted.append(group)
        if granted:
            scheduler.send_evaluation(round_.session, granted)
        scheduler.reserved[key] = len(round_.waiting)

    def _collect(self, round_: Round) -> None:
        for group_id, group in list(round_.running.items()):
            if group.is_complete:
                trajectory = group.finished[0]
                episode = EvaluatedEpisode(
                    trajectory.task_index,
                    trajectory.reward,
                    reply_tokens=trajectory.run_lengths[1::2],
                    truncated=trajectory.status is Status.TRUNCATED,
                    metrics=tuple(trajectory.metrics.items()),
                )
                round_.episodes.setdefault(group.environment, []).append(episode)
                if trajectory.task_index < KEPT_TASKS:
                    round_.replies.setdefault(
                        (group.environment, trajectory.task_index), trajectory
                    )
                self._intake.end_evaluated(group)
                del round_.running[group_id]
            elif group_id not in self._book.groups:
                round_.failed[group.environment] += 1
                del round_.running[group_id]
            elif group.holder is None:
                # The server handed the lease back.
                self._intake.start_afresh(group)
                round_.waiting.append((group.environment, group.task_index))
                del round_.running[group_id]

    def _finish(self, round_: Round) -> None:
        self._round = None
        self._publisher.pinned.discard(round_.session.key)
        self._scheduler.reserved.pop(round_.session.key, None)
        rewards = [e.reward for episodes in round_.episodes.values() for e in episodes]
        result = kinds.Evaluation(
            version=round_.version.step,
            episodes=len(rewards),
            failed=round_.failed.total(),
            reward_mean=statistics.fmean(rewards) if rewards else None,
            evaluations={
                section.name: evaluation_statistics(
                    round_.episodes.get(section.name, []),
                    num_failed=round_.failed[section.name],
                    samples=section.samples_per_task,
                    pass_reward=section.pass_reward,
                )
                for section in self._sections
            },
            wall_s=time.monotonic() - round_.started_s,
        )
        replies = [(place[0], round_.replies[place]) for place in sorted(round_.replies)]
        self._results.evaluated(result, replies)
        self._tell_scales(round_)
        for name, values in result.evaluations.items():
            self._run.events.add(_line(result.version, name, values))
        self._run.signal.notify()

    def _tell_scales(self, round_: Round) -> None:
        for section in self._sections:
            rewards = [episode.reward for episode in round_.episodes.get(section.name, [])]
            is_unscaled = has_unknown_scale(rewards, section.pass_reward)
            if section.name in self._unscaled or not is_unscaled:
                continue
            self._unscaled.add(section.name)
            self._run.events.warn(
                f"evaluation {section.name} has no pass rates: it gave rewards up to "
                f"{max(rewards):g}, and which of them passes is not said; set pass_reward of it"
            )


def _line(step: int, name: str, values: Mapping[str, float]) -> str:
    parts = []
    if "reward_mean" in values:
        spread = f"{values['reward_min']:.3g} to {values['reward_max']:.3g}"
        parts.append(f"reward {values['reward_mean']:.3f} ({spread})")
        rates = [key for key in values if key.startswith("pass_at_")]
        parts += [f"pass@{key.removeprefix('pass_at_')} {values[key]:.3f}" for key in rates]
        parts.append(f"{values['reply_tokens_mean']:.1f} tokens a reply")
        parts.append(f"{values['truncated_fraction']:.0%} cut off")
    parts.append(f"{values['num_episodes']:.0f} episodes")
    if values["num_failed"]:
        parts.append(f"{values['num_failed']:.0f} failed")
    return f"evaluation {name} at version {step}: {', '.join(parts)}"


def part(kernel: Kernel) -> Evaluator:
    """Returns the part of the controller that evaluates."""
    return Evaluator(
        kernel.run,
        kernel.books,
        kernel.intake,
        kernel.publisher,
        kernel.scheduler,
        kernel.results,
    )
