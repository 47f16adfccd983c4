"""Whole steps of training in one process, in milliseconds: a table of logits is the policy.

Everything between the engine's tokens and the gradient is the product's: filters, advantages,
weights, losses, statistics. The model alone is not, and an engine that samples from it as the
settings say, whose log-probabilities are those of what it sampled from.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slipstream.core.environment_rules import objectives_of, temperatures_of
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.config import Config
from slipstream.core.types import (
    GroupId,
    LogprobArray,
    PolicyVersion,
    ReferenceLogprobs,
    Status,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from slipstream.learner.algorithms.functions import is_trained
from slipstream.learner.algorithms.losses import step_columns
from slipstream.learner.controller.trajectories.formed_batch import equal_rewards
from slipstream.learner.trainer.algorithms.loss import (
    ModelEstimates,
    mean_advantages,
    policy_loss,
    training_sequences,
    weighted,
)
from slipstream.learner.trainer.algorithms.step_statistics import StepStatistics
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import MicroBatch
from torch import Tensor

from support.fakes.packed import packed
from support.fakes.plain_trajectory import plain_trajectory
from support.rigs.drawn_settings import OWN

VOCAB = 12
# The token at which a reply ends.
END = 0
# Every third task is one that no reply solves.
TASKS = 6
# The environments of the tasks; one of them may have values of its own.
ENVIRONMENTS = ("environment", OWN)
FILTERED = 50
# Stands for the log-probability of no chance, which times 0 is 0.
LARGE = 1e4


class OneRank:
    """Ranks of a world of one: sums over all are its own."""

    counts = True

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class Step:
    """A trained step: its row, its groups, and the mean advantages of their episodes."""

    row: dict[str, float]
    groups: list[list[Trajectory]]
    advantages: dict[TrajectoryId, float]


class TableTraining:
    """A run of `config`, of which each step is played and trained at once."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._random = np.random.default_rng(seed)
        logits = self._random.normal(0, 1, (VOCAB, VOCAB))
        start = torch.from_numpy(logits)
        self._table = start.to(torch.float32).requires_grad_()
        own_temperatures = temperatures_of(config)
        usual = config.sampling.temperature
        self._temperatures = dict.fromkeys(ENVIRONMENTS, usual)
        self._temperatures |= own_temperatures
        self._group_sizes = group_sizes_of(config)
        # A step moves logits at a low temperature as far as others.
        lowest = min(self._temperatures.values())
        self._rate = 0.1 * min(1.0, lowest)
        self._reference = self._logprobs(start)
        # The log-probabilities of all tokens behind each one, of each version, by environment.
        self._versions = [self._logprobs(self._table)]
        self._num_groups = 0

    def step(self) -> Step | None:
        """Plays and trains a step; None if the filter leaves too few groups."""
        step = len(self._versions) - 1
        groups = self._groups(step)
        if groups is None:
            return None
        trajectories = tuple(member for group in groups for member in group)
        batch = Batch(step, f"b{step}", trajectories)
        metrics, advantages = self._train(batch)
        self._versions.append(self._logprobs(self._table))
        lags: list[int] = []
        for trajectory in trajectories:
            lags += [step - span.version.step for span in trajectory.version_spans]
        row = {
            "step": step + 1.0,
            "lag_max": float(max(lags)),
            **metrics,
            **equal_rewards(groups, self._config),
        }
        return Step(row, groups, advantages)

    def _logprobs(self, table: Tensor) -> dict[str, np.ndarray]:
        logprobs: dict[str, np.ndarray] = {}
        for name, temperature in self._temperatures.items():
            logits = table.detach() / temperature
            rows = logits.log_softmax(-1)
            float_rows = rows.numpy()
            logprobs[name] = float_rows.astype(np.float64)
        return logprobs

    def _groups(self, step: int) -> list[list[Trajectory]] | None:
        algorithm = self._config.algorithm
        groups: list[list[Trajectory]] = []
        num_played = 0
        while len(groups) < algorithm.groups_per_step:
            if num_played >= FILTERED * algorithm.groups_per_step:
                return None
            group = self._group(step)
            num_played += 1
            if algorithm.filter == "none" or is_trained(group, self._config):
                groups.append(group)
        return groups

    def _group(self, step: int) -> list[Trajectory]:
        number = self._num_groups
        self._num_groups += 1
        task = number % TASKS
        environment = _environment_of(task)
        size = self._group_sizes.of(environment)
        members = range(size)
        return [self._episode(step, number, task, member) for member in members]

    def _episode(self, step: int, number: int, task: int, member: int) -> Trajectory:
        max_tokens = self._config.sampling.max_reply_tokens
        oldest = max(0, step - self._config.algorithm.max_staleness)
        version = int(self._random.integers(oldest, step + 1))
        environment = _environment_of(task)
        rows = self._versions[version][environment]
        first_token = 1 + task
        prompt = [first_token, first_token + 1]
        tokens = list(prompt)
        logprobs: list[float] = []
        sets: list[list[int]] = []
        while len(logprobs) < max_tokens and (not logprobs or tokens[-1] != END):
            last_token = tokens[-1]
            token, logprob, token_set = self._sampled(rows[last_token])
            tokens.append(token)
            logprobs.append(logprob)
            sets.append(token_set)
        is_solvable = task % 3 != 0
        return plain_trajectory(
            tokens,
            (len(prompt), len(logprobs)),
            logprobs,
            group_id=GroupId(f"g{number}"),
            member=member,
            task_index=task,
            environment=environment,
            num_turns=1,
            reward=float(is_solvable and tokens[len(prompt)] % 2),
            status=Status.COMPLETED if tokens[-1] == END else Status.TRUNCATED,
            version_spans=(VersionSpan(len(logprobs), PolicyVersion(0, version)),),
            kept_tokens=self._packed(sets),
        )

    def _packed(self, sets: list[list[int]]) -> bytes:
        if not self._config.replays_sampling:
            return b""
        return KeptTokens.of_sets(sets).packed()

    def _sampled(self, logprobs: np.ndarray) -> tuple[int, float, list[int]]:
        """Returns a token, its log-probability, and the tokens that it was drawn from."""
        sampling = self._config.sampling
        order = np.argsort(-logprobs)
        chances = np.exp(logprobs[order])
        # A token stays if those above it have less than top_p.
        chances_above = np.cumsum(chances) - chances
        stays = chances_above < sampling.top_p
        if sampling.top_k:
            stays[sampling.top_k :] = False
        least_chance = sampling.min_p * chances[0]
        stays &= chances >= least_chance
        chances = np.where(stays, chances, 0.0)
        total = chances.sum()
        chances /= total
        place = self._random.choice(VOCAB, p=chances)
        token = int(order[place])
        chance = chances[place]
        logprob = math.log(chance)
        token_set = order[stays]
        return token, logprob, token_set.tolist()

    def _train(
        self, batch: Batch
    ) -> tuple[dict[str, float], dict[TrajectoryId, float]]:
        config = self._config
        algorithm = config.algorithm
        objectives = [*objectives_of(config).values()]
        columns = step_columns(*objectives, has_reference=config.needs_reference)
        statistics = StepStatistics(algorithm.epochs, columns)
        estimates = [self._estimates(trajectory) for trajectory in batch.trajectories]
        sequences = training_sequences(batch, config, estimates)
        advantages = mean_advantages(batch, sequences)
        mini_batches = batch.mini_batches(algorithm.mini_batches)
        sequences = weighted(sequences, batch, mini_batches, config)
        micro_batches = [packed(sequences, members) for members in mini_batches]
        proximal: list[Tensor | None] = [None] * len(micro_batches)
        if len(micro_batches) * algorithm.epochs > 1:
            with torch.no_grad():
                proximal = [
                    self._policy(micro_batch)[0] for micro_batch in micro_batches
                ]
        for _ in range(algorithm.epochs):
            for micro_batch, old_logprobs in zip(micro_batches, proximal, strict=True):
                logprobs, entropy = self._policy(micro_batch)
                loss = policy_loss(
                    logprobs,
                    entropy,
                    old_logprobs,
                    micro_batch,
                    objectives,
                    columns,
                    step=batch.step,
                    group=None,
                )
                statistics.add([loss.statistics], OneRank())  # type: ignore[arg-type]
                self._update(loss.loss / loss.num_tokens.clamp(min=1))
        by_id = {TrajectoryId(name): value for name, value in advantages.items()}
        return statistics.metrics(), by_id

    def _policy(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities of the targets, and the entropies."""
        temperatures: float | Tensor = self._config.sampling.temperature
        if micro_batch.temperatures is not None:
            temperatures = micro_batch.temperatures.float()
            # Tokens of prompts have none.
            has_none = temperatures == 0
            temperatures = temperatures.masked_fill(has_none, 1.0)
            temperatures = temperatures[:, None]
        logits = self._table[micro_batch.token_ids] / temperatures
        if micro_batch.kept_ids is None:
            is_kept = torch.ones_like(logits, dtype=torch.bool)
        else:
            is_kept = flags_of(micro_batch.kept_ids)
        over_kept = logits.masked_fill(~is_kept, -torch.inf)
        every_logprob = over_kept.log_softmax(-1).masked_fill(~is_kept, -LARGE)
        targets = micro_batch.targets.clamp(max=VOCAB - 1)
        logprobs = every_logprob.gather(1, targets[:, None])[:, 0]
        return logprobs, -(every_logprob.exp() * every_logprob).sum(-1)

    def _update(self, loss: Tensor) -> None:
        (gradient,) = torch.autograd.grad(loss, [self._table])
        with torch.no_grad():
            self._table -= gradient.clamp(-1.0, 1.0) * self._rate

    def _estimates(self, trajectory: Trajectory) -> ModelEstimates:
        # Engine and learner are one here.
        versions: LogprobArray | None = None
        if self._config.algorithm.reads_versions:
            versions = trajectory.behavior_logprobs
        if not self._config.needs_reference:
            return ModelEstimates(versions=versions)
        tokens = trajectory.token_ids
        first = trajectory.run_lengths[0]
        replies = tokens[first:]
        contexts = tokens[first - 1 : -1]
        rows = self._reference[trajectory.environment][contexts]
        every_logprob = torch.from_numpy(rows)
        kept_tokens = KeptTokens.unpacked(
            trajectory.kept_tokens,
            len(replies),
        )
        table = kept_tokens.table(max(1, kept_tokens.width))
        is_kept = flags_of(torch.from_numpy(table))
        over_kept = every_logprob.masked_fill(~is_kept, -torch.inf)
        kept_logprobs = over_kept.log_softmax(-1).numpy()
        places = np.arange(len(replies))
        logprobs = kept_logprobs[places, replies]
        nothing = np.zeros((len(logprobs), 0))
        reference = ReferenceLogprobs(
            logprobs.astype(np.float32),
            nothing.astype(np.uint32),
            nothing.astype(np.float32),
        )
        return ModelEstimates(reference, versions=versions)


def _environment_of(task: int) -> str:
    place = task % len(ENVIRONMENTS)
    return ENVIRONMENTS[place]


def flags_of(kept_ids: Tensor) -> Tensor:
    """Flags the tokens of each row of ids plus 1, [rows, VOCAB]; all of a row of zeros."""
    num_columns = 1 + VOCAB
    columns = torch.zeros(
        len(kept_ids),
        num_columns,
        dtype=torch.bool,
    )
    columns.scatter_(1, kept_ids.long(), True)
    is_cut = kept_ids[:, :1] > 0
    return columns[:, 1:] | ~is_cut


def steps(config: Config, *, number: int, seed: int) -> Iterator[Step]:
    """Yields `number` steps of a run, or fewer if its filter leaves no groups."""
    training = TableTraining(config, seed)
    for _ in range(number):
        step = training.step()
        if step is None:
            return
        yield step


def are_equal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) < 1e-9
