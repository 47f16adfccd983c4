"""Signs in the rows of a run that nothing is learnt, or not what was meant.

The rules are pure: they read the settings and the rows so far. Each compares the last `WINDOW` rows
with each other or with the first ones. As long as the reward rises, signs that may go with learning
are not told. docs/guides/no-learning.md says what to do about each.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.environment_rules import algorithm_of
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.types import FULL_REWARD
from slipstream.learner.controller.reporting.invariants import (
    FEWEST_TOKENS,
    Notice,
    are_to_agree,
)

PAGE = "docs/guides/no-learning.md"
# Rows that a sign must last.
WINDOW = 10
# The first and the newest rows that are compared with each other.
EDGE = 5
# Steps without a gradient: one may be due to chance.
WITHOUT_GRADIENT = 3
# Part of the groups with equal rewards, on average, and the least in any row of the window.
MANY_EQUAL = 0.75
SOME_EQUAL = 0.5
# Part of the entropy of the first rows.
LITTLE_ENTROPY = 0.1
# An entropy in nats below which nothing can fall further.
LEAST_ENTROPY = 0.05
CUT = 0.1
CAPPED = 0.1
# A sum of weights that is worth this part of its tokens.
FEW_EFFECTIVE = 0.5
# Growth of the gap between engine and learner, and the part of what rounding may explain that it
# has reached by then.
GAP_GROWTH = 3.0
GAP_FLOOR = 0.25
# Mean lengths of replies, as parts of `sampling.max_reply_tokens`.
AT_LIMIT = 0.9
BELOW_LIMIT = 0.6
# Mean tokens of replies that say next to nothing, their end included; and of those that do not.
SILENT_TOKENS = 2.0
SPOKEN_TOKENS = 8.0
# Part of the rewards' range that counts as a rise from one half of the window to the other.
RISE = 0.02
# Part of what was missing at first that counts as learnt, and a level that counts as solved.
LEARNT = 0.3
SOLVED = 0.9
# Standard errors by which an evaluation must fall short of its best.
ERRORS = 3.0
EVALUATIONS = 3

Row = Mapping[str, float]
_EQUAL = "equal_rewards_fraction"


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation in one round, and the reward of training by then."""

    version: int
    mean: float
    # Of the mean, as if the episodes were independent.
    standard_error: float
    training_reward: float


def _compares_only_groups(algorithm: AlgorithmSection) -> bool:
    """Whether groups of equal rewards have no advantages by this algorithm."""
    estimator = algorithm.estimator
    return estimator is not None and estimator.compares_only_groups


@dataclass
class LearningState:
    """What the rules keep of the rows so far."""

    first: list[dict[str, float]] = field(default_factory=list)
    # The newest rows, at most `WINDOW`.
    newest: list[dict[str, float]] = field(default_factory=list)
    # The lowest and the highest reward.
    lowest: float = math.inf
    highest: float = -math.inf
    # Gaps of the steps with tokens that the newest weights sampled, the first and the last.
    first_gaps: list[float] = field(default_factory=list)
    newest_gaps: list[float] = field(default_factory=list)
    # The rounds of each evaluation.
    measured: dict[str, list[EvaluationPoint]] = field(default_factory=dict)


class LearningWatch:
    """Takes the rows of a run in order, those of steps and of evaluation rounds."""

    def __init__(self, config: Config, state: LearningState | None = None) -> None:
        """Goes on from `state`, which it changes."""
        self._config = config
        self._state = state or LearningState()

    def take(self, row: Row) -> Iterator[Notice]:
        """Yields what the rows show with `row`, also if it was yielded before."""
        if "evaluation_step" in row:
            yield from self._take_evaluation(row)
            return
        if "reward_mean" not in row:
            # A client has ordered the step.
            return
        critic = self._config.critic
        if critic is not None and row["step"] <= critic.warmup_steps:
            # The policy stays as it is until the critic has learnt.
            return
        state = self._state
        if len(state.first) < EDGE:
            state.first.append(dict(row))
        state.newest = [*state.newest, dict(row)][-WINDOW:]
        state.lowest = min(state.lowest, row.get("reward_min", math.inf))
        state.highest = max(state.highest, row.get("reward_max", -math.inf))
        yield from self._of_gradients()
        yield from self._of_gaps(row)
        if len(state.newest) == WINDOW:
            yield from self._of_groups()
            yield from self._of_weights()
            yield from self._of_lengths()
            if not self._is_learning:
                yield from self._of_entropy()
                yield from self._of_cut_replies()

    @property
    def _step(self) -> str:
        return f"step {self._state.newest[-1]['step']:.0f}"

    def _values(self, name: str) -> list[float]:
        """Returns a column of the window."""
        return [row.get(name, math.nan) for row in self._state.newest]

    def _newest(self, name: str) -> float:
        return statistics.fmean(self._values(name)[-EDGE:])

    def _at_first(self, name: str) -> float:
        return statistics.fmean(row.get(name, math.nan) for row in self._state.first)

    def _level(self, reward: float) -> float:
        """Returns where a reward lies between the lowest and the highest of the run, 0 to 1."""
        lowest = self._state.lowest
        highest = self._state.highest
        if highest > lowest:
            return (reward - lowest) / (highest - lowest)
        return float(reward >= FULL_REWARD)

    @property
    def _has_learnt(self) -> bool:
        """Whether a good part of the reward that was missing at first has been gained."""
        before = self._level(self._at_first("reward_mean"))
        now = self._level(self._newest("reward_mean"))
        return now - before >= LEARNT * (1.0 - before) and now > before

    @property
    def _is_learning(self) -> bool:
        """Whether the reward rises, has risen, or has no room to rise."""
        rewards = self._values("reward_mean")
        middle = len(rewards) // 2
        before = self._level(statistics.fmean(rewards[:middle]))
        now = self._level(statistics.fmean(rewards[middle:]))
        return now - before > RISE or now >= SOLVED or self._has_learnt

    def _of_groups(self) -> Iterator[Notice]:
        """Groups whose rewards are equal have no advantages."""
        algorithm = self._config.algorithm
        if algorithm.filter == "unequal_rewards":
            if _compares_only_groups(algorithm):
                yield from self._of_filtered_groups(algorithm.groups_per_step)
            return
        environments = [
            name.removesuffix(f"/{_EQUAL}")
            for name in self._state.newest[-1]
            if name.endswith(f"/{_EQUAL}")
        ]
        algorithms = {name: algorithm_of(self._config, name) for name in environments}
        if all(map(_compares_only_groups, algorithms.values() or [algorithm])):
            yield from self._of_equal_groups("", _EQUAL, "reward_mean")
        for environment in environments if len(environments) > 1 else ():
            if not _compares_only_groups(algorithms[environment]):
                continue
            column = f"{environment}/{_EQUAL}"
            yield from self._of_equal_groups(environment, column, f"{environment}/reward")

    def _of_equal_groups(self, environment: str, column: str, reward: str) -> Iterator[Notice]:
        fractions = self._values(column)
        mean = statistics.fmean(fractions)
        if not (mean >= MANY_EQUAL and min(fractions) > SOME_EQUAL):
            return
        place = f" of {environment}" if environment else ""
        groups = (
            f"{self._step}: {mean:.0%} of the groups{place} have had equal rewards for {WINDOW}"
        )
        earned = statistics.fmean(self._values(reward))
        if self._level(earned) > SOME_EQUAL:
            yield Notice(
                f"solved {environment}",
                f"{groups} steps because nearly all replies earn the most, {earned:.3g} on "
                f"average: little is left to learn from these tasks ({PAGE})",
                is_warning=not self._has_learnt,
            )
        elif not self._is_learning:
            yield Notice(
                f"no reward {environment}",
                f"{groups} steps for want of reward, {earned:.3g} on average: they teach nothing; "
                f"give easier tasks, partial rewards or demonstrations ({PAGE})",
            )

    def _of_filtered_groups(self, groups_per_step: int) -> Iterator[Notice]:
        filtered = self._values("filtered_groups")
        fractions = [number / (number + groups_per_step) for number in filtered]
        mean = statistics.fmean(fractions)
        if mean >= MANY_EQUAL and min(fractions) > SOME_EQUAL:
            yield Notice(
                "filtered",
                f"{self._step}: algorithm.filter has left out {mean:.0%} of the groups for "
                f"{WINDOW} steps, whose rewards are equal: most of what is sampled teaches "
                f"nothing ({PAGE})",
                is_warning=not self._has_learnt,
            )

    def _of_entropy(self) -> Iterator[Notice]:
        before = self._at_first("entropy")
        now = self._newest("entropy")
        if before > LEAST_ENTROPY and now < LITTLE_ENTROPY * before:
            yield Notice(
                "entropy",
                f"{self._step}: the entropy has fallen from {before:.3g} to {now:.3g} and the "
                "reward does not rise: replies hardly differ any more, so that no better one is "
                f"found ({PAGE})",
            )

    def _of_cut_replies(self) -> Iterator[Notice]:
        fractions = self._values("truncated_fraction")
        if min(fractions) > CUT:
            yield Notice(
                "cut",
                f"{self._step}: {statistics.fmean(fractions):.0%} of the episodes were cut at a "
                f"limit for {WINDOW} steps and the reward does not rise: raise "
                "sampling.max_reply_tokens or sampling.max_episode_tokens, or set "
                f"algorithm.leave_out_truncated ({PAGE})",
            )

    def _of_gradients(self) -> Iterator[Notice]:
        newest = self._state.newest[-WITHOUT_GRADIENT:]
        if len(newest) < WITHOUT_GRADIENT:
            return
        for column, what in (
            ("grad_norm", "the gradient"),
            ("learning_rate", "the learning rate"),
        ):
            if all(row.get(column) == 0.0 for row in newest):
                yield Notice(
                    column,
                    f"{self._step}: {what} has been 0 for {WITHOUT_GRADIENT} steps: the weights "
                    f"stay as they are ({PAGE})",
                )

    def _of_gaps(self, row: Row) -> Iterator[Notice]:
        """Engine and learner agree as well on the newest weights as they did on the first ones."""
        gap = row.get("logprob_gap_mean", math.nan)
        num_tokens = row.get("logprob_gap_tokens", 0.0)
        if not (num_tokens >= FEWEST_TOKENS and gap >= 0.0 and are_to_agree(self._config)):
            return
        state = self._state
        if len(state.first_gaps) < EDGE:
            state.first_gaps.append(gap)
            return
        state.newest_gaps.append(gap)
        del state.newest_gaps[:-EDGE]
        before = max(state.first_gaps)
        now = min(state.newest_gaps)
        least = max(GAP_GROWTH * before, GAP_FLOOR * self._config.probe_tolerance)
        if len(state.newest_gaps) == EDGE and now > least:
            yield Notice(
                "gap grows",
                f"{self._step}: the gap between the log-probabilities of engine and learner on "
                f"tokens of the newest weights has grown from {before:.2g} to {now:.2g}: the "
                "engine computes with something older than its weights, or in another way than at "
                f"first ({PAGE})",
            )

    def _of_weights(self) -> Iterator[Notice]:
        capped = statistics.fmean(self._values("importance_capped_fraction"))
        effective = statistics.fmean(self._values("effective_sample_size"))
        advice = f"lower algorithm.max_staleness or the learning rate ({PAGE})"
        if capped > CAPPED:
            yield Notice(
                "capped",
                f"{self._step}: the importance weights of {capped:.0%} of the tokens were capped "
                f"in the last {WINDOW} steps, so that their gradients are biased: {advice}",
            )
        if effective < FEW_EFFECTIVE:
            yield Notice(
                "effective",
                f"{self._step}: by their importance weights the tokens of the last {WINDOW} steps "
                f"are worth {effective:.0%} of their number: {advice}",
            )

    def _of_lengths(self) -> Iterator[Notice]:
        limit = self._config.sampling.max_reply_tokens
        before = self._at_first("reply_tokens_mean")
        lengths = self._values("reply_tokens_mean")
        now = statistics.fmean(lengths)
        is_long = min(lengths) >= AT_LIMIT * limit and before <= BELOW_LIMIT * limit
        if is_long and not self._is_learning:
            yield Notice(
                "long",
                f"{self._step}: replies have grown from {before:.0f} to {now:.0f} tokens, up to "
                f"sampling.max_reply_tokens = {limit}, and the reward does not rise: a longer "
                f"reply may earn more by itself ({PAGE})",
            )
        if max(lengths[-EDGE:]) <= SILENT_TOKENS and before >= SPOKEN_TOKENS:
            newest = self._newest("reply_tokens_mean")
            yield Notice(
                "silent",
                f"{self._step}: replies have shrunk from {before:.0f} to {newest:.1f} tokens: "
                f"saying nothing earns as much as an answer ({PAGE})",
            )

    def _take_evaluation(self, row: Row) -> Iterator[Notice]:
        version = int(row["evaluation_step"])
        if not self._state.newest:
            return
        for column, mean in row.items():
            name, separator, number = column.rpartition("/")
            if not separator or number != "reward_mean":
                continue
            count = row.get(f"{name}/num_episodes", math.nan)
            deviation = row.get(f"{name}/reward_std", math.nan)
            if not count > 0:
                continue
            history = self._state.measured.setdefault(name, [])
            history.append(
                EvaluationPoint(
                    version, mean, deviation / math.sqrt(count), self._newest("reward_mean")
                )
            )
            if is_overfit(history):
                best = best_before(history)
                newest = history[-1]
                yield Notice(
                    f"evaluation {name}",
                    f"evaluation {name} has fallen from {best.mean:.3g} at version {best.version} "
                    f"to {newest.mean:.3g} at version {newest.version} while the reward of "
                    f"training has risen from {best.training_reward:.3g} to "
                    f"{newest.training_reward:.3g}: what is rewarded is not what is measured "
                    f"({PAGE})",
                )


def best_before(history: Sequence[EvaluationPoint]) -> EvaluationPoint:
    """Returns the best round before the last two."""
    return max(history[:-2], key=lambda measured: measured.mean)


def is_overfit(history: Sequence[EvaluationPoint]) -> bool:
    """Whether the last two rounds are worse than an earlier one, and training is better."""
    if len(history) < EVALUATIONS:
        return False
    best = best_before(history)
    return history[-1].training_reward > best.training_reward and all(
        best.mean - later.mean > ERRORS * math.hypot(best.standard_error, later.standard_error)
        for later in history[-2:]
    )
