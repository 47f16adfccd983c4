"""One training step: a batch of whole groups trains version s into version s + 1."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.learner.trainer.algorithms.loss import TokenLoss, policy_loss
from slipstream.learner.trainer.algorithms.statistics import StepStatistics
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.packing import MicroBatch, TrainingSequence
from slipstream.learner.trainer.batches.sequences import (
    ModelEstimates,
    training_sequences,
    weighted,
)
from slipstream.learner.trainer.batches.shares import rank_micro_batches
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.offload import Part
from slipstream.learner.trainer.model.router_replay import check_experts, routing_metrics
from slipstream.learner.trainer.model.schedule import forward_backward, forward_logprobs
from slipstream.learner.trainer.roles.roles import NO_ROLES, Roles
from slipstream.learner.trainer.stages import StageTimes
from slipstream.protocol.errors import RunFailed
from slipstream.protocol.settings.config import Config
from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank but for the times."""

    metrics: dict[str, float]
    wall_s: float


@dataclass
class _Totals:
    """What the mini-batches of a step add up to."""

    statistics: StepStatistics = field(default_factory=StepStatistics)
    grad_norms: list[float] = field(default_factory=list)
    num_micro_batches: int = 0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0


def learning_rate(config: Config, step: int) -> float:
    """Linear warmup over the first `warmup_steps` steps, from the first on, then constant.

    Before it 0, as long as the critic is trained alone.
    """
    algorithm = config.algorithm
    place = step - config.critic.warmup_steps if config.critic is not None else step
    if place < 0:
        return 0.0
    return algorithm.learning_rate * min(1.0, (place + 1) / max(1, algorithm.warmup_steps))


class TrainingStep:
    """Trains a policy, one batch at a time; on CPU the same batches give the same bits.

    `roles` are the models beside it that its algorithm needs.
    """

    def __init__(self, policy: Policy, config: Config, roles: Roles = NO_ROLES) -> None:
        self._policy = policy
        self._roles = roles
        self._config = config
        self.stages = StageTimes()

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return self._policy

    def run(self, batch: Batch) -> StepResult:
        """Trains the batch; collective, and every rank passes the same batch.

        StalenessError or RunFailed before any weight changes: a token that is too old, experts of
        another model, a loss or a gradient that is not finite (in the first mini-batch; in a later
        one, before that mini-batch changes the weights).
        """
        started = time.monotonic()
        batch.check(self._config.algorithm.max_staleness)
        if self._replays:
            check_experts(batch.trajectories, self._policy.chunks[0].config)
        mini_batches = batch.mini_batches(self._config.algorithm.mini_batches)
        sequences = training_sequences(batch, self._config, self._estimates(batch))
        sequences = weighted(sequences, mini_batches, self._config)
        with self._policy.memory.resident(Part.PARAMETERS, Part.GRADIENTS):
            metrics = batch.metrics() | self._train_policy(sequences, mini_batches, batch.step)
        if self._replays:
            policy = self._policy
            metrics |= routing_metrics(policy.chunks, policy.ranks, batch.trajectories)
        if self._roles.critic is not None:
            with self.stages.measure("critic"):
                metrics |= self._roles.critic.train(sequences, mini_batches)
        self._roles.follow(self._policy, batch.step + 1)
        return StepResult(metrics, time.monotonic() - started)

    def _train_policy(
        self,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        step: int,
    ) -> dict[str, float]:
        shares = [
            rank_micro_batches(
                self._policy,
                sequences,
                members,
                max_tokens=self._config.learner.micro_batch_tokens,
            )
            for members in mini_batches
        ]
        old_logprobs: list[list[Tensor]] = [[] for _ in shares]
        if len(shares) > 1:
            with self.stages.measure("forward"):
                old_logprobs = [
                    forward_logprobs(self._policy, share, temperature=self._temperature)
                    for share in shares
                ]
        rate = learning_rate(self._config, step)
        totals = _Totals()
        for share, old in zip(shares, old_logprobs, strict=True):
            self._train(share, old, rate, totals)
        return self._metrics(totals, rate)

    @property
    def _replays(self) -> bool:
        return self._config.algorithm.router_replay != "off"

    @property
    def _temperature(self) -> float:
        return self._config.sampling.temperature

    def _estimates(self, batch: Batch) -> list[ModelEstimates] | None:
        """What the models beside the policy say; None without any."""
        if self._roles == NO_ROLES:
            return None
        with self.stages.measure("estimates"):
            return self._roles.estimates(batch)

    def _train(
        self, share: Sequence[MicroBatch], old: Sequence[Tensor], rate: float, totals: _Totals
    ) -> None:
        algorithm, ranks = self._config.algorithm, self._policy.ranks

        def loss(
            place: int, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor
        ) -> TokenLoss:
            before = old[place] if old else None
            return policy_loss(
                logprobs, entropy, before, micro_batch, algorithm, group=ranks.cp_group
            )

        started = time.monotonic()
        self._policy.zero_grad()
        losses = forward_backward(
            self._policy,
            share,
            loss,
            temperature=self._temperature,
            entropy_gradient=algorithm.entropy_coefficient > 0,
        )
        total = totals.statistics.add([one.statistics for one in losses], ranks)
        totals.forward_backward_s += time.monotonic() - started
        if not math.isfinite(total):
            raise RunFailed(f"the loss is {total}; the weights were not changed")
        started = time.monotonic()
        totals.grad_norms.append(self._policy.optimizer_step(rate))
        ranks.activity.note()
        totals.optimizer_s += time.monotonic() - started
        totals.num_micro_batches += len(share) * ranks.dp_size

    def _metrics(self, totals: _Totals, rate: float) -> dict[str, float]:
        return totals.statistics.metrics() | {
            "grad_norm": sum(totals.grad_norms) / len(totals.grad_norms),
            "learning_rate": rate,
            "num_micro_batches": float(totals.num_micro_batches),
            "forward_backward_s": totals.forward_backward_s,
            "optimizer_s": totals.optimizer_s,
        }
