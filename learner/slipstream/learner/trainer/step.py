"""One training step: a batch of whole groups trains version s into version s + 1."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.learner.trainer.batch import Batch
from slipstream.learner.trainer.context_parallel import share_of_rank
from slipstream.learner.trainer.loss import TokenLoss, policy_loss
from slipstream.learner.trainer.model import Policy
from slipstream.learner.trainer.offload import Part
from slipstream.learner.trainer.packing import (
    MicroBatch,
    TrainingSequence,
    build_micro_batch,
    round_up,
)
from slipstream.learner.trainer.planner import plan_micro_batches
from slipstream.learner.trainer.schedule import forward_backward, forward_logprobs
from slipstream.learner.trainer.sequences import training_sequences, weighted
from slipstream.learner.trainer.stages import StageTimes
from slipstream.learner.trainer.statistics import StepStatistics
from slipstream.protocol.config import AlgorithmSection, Config
from slipstream.protocol.errors import RunFailed
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


def learning_rate(algorithm: AlgorithmSection, step: int) -> float:
    """Linear warmup over the first `warmup_steps` steps, from the first on, then constant."""
    return algorithm.learning_rate * min(1.0, (step + 1) / max(1, algorithm.warmup_steps))


class TrainingStep:
    """Trains a policy, one batch at a time; on CPU the same batches give the same bits."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy = policy
        self._config = config
        self.stages = StageTimes()

    def run(self, batch: Batch) -> StepResult:
        """Trains the batch; collective, and every rank passes the same batch.

        StalenessError or RunFailed before any weight changes: a token that is too old, a loss or a
        gradient that is not finite (in the first mini-batch; in a later one, before that mini-batch
        changes the weights).
        """
        with self._policy.memory.resident(Part.PARAMETERS, Part.GRADIENTS):
            return self._run(batch)

    def _run(self, batch: Batch) -> StepResult:
        started = time.monotonic()
        algorithm = self._config.algorithm
        batch.check(algorithm.max_staleness)
        mini_batches = batch.mini_batches(algorithm.mini_batches)
        sequences = weighted(training_sequences(batch, self._config), mini_batches, self._config)
        shares = [self._micro_batches(sequences, members) for members in mini_batches]
        old_logprobs: list[list[Tensor]] = [[] for _ in shares]
        if len(shares) > 1:
            with self.stages.measure("forward"):
                old_logprobs = [
                    forward_logprobs(self._policy, share, temperature=self._temperature)
                    for share in shares
                ]
        rate = learning_rate(algorithm, batch.step)
        totals = _Totals()
        for share, old in zip(shares, old_logprobs, strict=True):
            self._train(share, old, rate, totals)
        metrics = batch.metrics() | self._metrics(totals, rate)
        return StepResult(metrics, time.monotonic() - started)

    @property
    def _temperature(self) -> float:
        return self._config.sampling.temperature

    def _micro_batches(
        self, sequences: Sequence[TrainingSequence], members: Sequence[int]
    ) -> list[MicroBatch]:
        """This rank's part of a mini-batch."""
        ranks = self._policy.ranks
        sequence_multiple = self._policy.sequence_multiple
        plan = plan_micro_batches(
            [round_up(len(sequences[index]), sequence_multiple) for index in members],
            max_tokens=self._config.learner.micro_batch_tokens * ranks.cp_size,
            dp_size=ranks.dp_size,
            multiple=self._policy.micro_batch_multiple,
            attention_length=self._policy.attention_length,
        )
        wholes = [
            build_micro_batch(
                sequences,
                [members[place] for place in places],
                multiple=self._policy.token_multiple,
                sequence_multiple=sequence_multiple,
            )
            for places in plan[ranks.dp_rank]
        ]
        return [share_of_rank(whole, ranks.cp_rank, ranks.cp_size) for whole in wholes]

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
