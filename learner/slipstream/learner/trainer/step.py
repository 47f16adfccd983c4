"""One training step: a batch of whole groups turns policy version s into version s + 1."""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.settings.algorithm_section import DecayKind
from slipstream.core.settings.config import Config
from slipstream.learner.algorithms.functions import load_functions
from slipstream.learner.algorithms.token_functions import report_names
from slipstream.learner.trainer.adapters.lora import dropping
from slipstream.learner.trainer.algorithms.loss import StepStatistics, TokenLoss, policy_loss
from slipstream.learner.trainer.algorithms.sequences import (
    Reports,
    mean_advantages,
    training_sequences,
    weighted,
)
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.checks import (
    check_advantages,
    check_data,
    check_experts,
    check_pixels,
    check_references,
    check_staleness,
)
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.batches.prefix_tree import SavedWork
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.layers.router_replay import routing_metrics
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.offload import Part
from slipstream.learner.trainer.model.schedule import forward_backward, forward_logprobs
from slipstream.learner.trainer.model.shares import rank_micro_batches
from slipstream.learner.trainer.roles.roles import NO_ROLES, Roles
from slipstream.learner.trainer.step_faults import check_weights, loss_fault
from torch import Tensor

# Stages that are reported for every step, even if they took no time.
ALWAYS = ("waiting", "forward", "export", "publish", "checkpoint")
# Metrics that each adapter has too, where there are several.
BY_ADAPTER = ("loss", "entropy", "kl", "grad_norm", "trained_tokens")


@dataclass(frozen=True)
class TrainedStep:
    """The result of a training step, the same on every rank except for the times."""

    metrics: dict[str, float]
    wall_s: float
    # The mean advantage of the trained tokens, by trajectory id.
    advantages: dict[str, float]
    # The work that shared prefixes saved, over all replicas.
    saved: SavedWork = SavedWork()


@dataclass
class _Totals:
    """The sums over the mini-batches of a step, in all its passes over the batch."""

    statistics: StepStatistics
    grad_norms: list[float] = field(default_factory=list)
    # Passes that were made again, with half the scale of the loss.
    overflows: int = 0
    # The smallest scale of the loss that was used.
    loss_scale: float = math.inf
    num_micro_batches: int = 0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0

    def join(self, others: _Totals) -> None:
        """Adds the totals of another adapter's part of the same step."""
        self.statistics.join(others.statistics)
        self.grad_norms += others.grad_norms
        self.overflows += others.overflows
        self.loss_scale = min(self.loss_scale, others.loss_scale)
        self.num_micro_batches += others.num_micro_batches
        self.forward_backward_s += others.forward_backward_s
        self.optimizer_s += others.optimizer_s


class TrainingStep:
    """Trains a policy, one batch at a time; on CPU equal batches give bitwise equal weights.

    `roles` are the other models that the algorithm needs.
    """

    def __init__(self, policy: Policy, config: Config, roles: Roles = NO_ROLES) -> None:
        self._policy, self._roles, self._config = policy, roles, config
        self._max_tokens = config.learner.micro_batch_tokens
        self._algorithms = config.algorithms.distinct
        load_functions(config)
        self._reports = report_names(self._algorithms, has_reference=config.needs_reference)
        self.stages = StageTimes()
        # Number of weight updates of the newest `run`.
        self.num_updates = 0

    @property
    def policy(self) -> Policy:
        """The policy that is being trained."""
        return self._policy

    def run(self, batch: Batch) -> TrainedStep:
        """Trains the batch; collective, and every rank must pass the same batch.

        Raises StalenessError for a token that is too old. Raises UntrainableBatch, on all ranks,
        for images that cannot be read, for experts of another model, or for a loss or gradient that
        is not finite although the weights are. This happens before the faulty mini-batch changes a
        weight; `num_updates` says if an earlier mini-batch changed weights. Raises RunFailed if the
        weights are not finite.
        """
        self.num_updates = 0
        if self._policy.sharing is not None:
            self._policy.sharing.saved = SavedWork()
        try:
            return self._run(batch)
        except UntrainableBatch as fault:
            check_weights(self._policy, self._roles, fault)
            raise

    def _run(self, batch: Batch) -> TrainedStep:
        started = time.monotonic()
        rate = learning_rate(self._config, batch.step)
        check_staleness(batch, self._config.algorithm.max_staleness)
        check_data(
            batch,
            max_tokens=self._max_tokens * self._policy.ranks.cp_size,
            multiple=self._policy.sequence_multiple,
            vocab_size=self._policy.vocab_size,
        )
        check_pixels(batch.trajectories, self._policy.ranks)
        if self._replays:
            check_experts(batch.trajectories, self._policy.chunks[0].config)
        reference = self._config.reference
        if reference is not None and reference.server is not None:
            vocab_size = self._policy.vocab_size
            check_references(batch, top_k=reference.top_k, vocab_size=vocab_size)
        totals = _Totals(StepStatistics(self._config.algorithm.epochs, self._reports))
        metrics: dict[str, float] = {}
        reports: Reports = {}
        advantages: dict[str, float] = {}
        adapters = self._policy.adapters
        for name, part in batch.by_adapter(adapters.names):
            mini_batches = part.mini_batches(
                self._config.algorithm.mini_batches, or_fewer=adapters.are_several
            )
            with adapters.active(name):
                found, of_critic = self._train_part(part, mini_batches, rate, reports, advantages)
            totals.join(found)
            metrics |= of_critic
            if adapters.are_several:
                own = self._metrics(found, 0.0)
                metrics |= {f"adapter/{name}/{key}": own[key] for key in BY_ADAPTER}
        metrics |= {name: statistics.fmean(values) for name, values in reports.items()}
        metrics |= self._metrics(totals, rate)
        if self._replays:
            policy = self._policy
            metrics |= routing_metrics(policy.chunks, policy.ranks, batch.unrecorded_fraction)
        self._roles.follow(self._policy, batch.step + 1)
        saved = SavedWork() if self._policy.sharing is None else self._policy.sharing.saved
        metrics["shared_tokens"] = float(saved.tokens)
        return TrainedStep(metrics, time.monotonic() - started, advantages, saved)

    def _train_part(
        self,
        batch: Batch,
        mini_batches: Sequence[Sequence[int]],
        rate: float,
        reports: Reports,
        advantages: dict[str, float],
    ) -> tuple[_Totals, dict[str, float]]:
        """Trains the active adapter, or all of the policy, and then the critic if there is one.

        `rate` is the policy's learning rate. Returns the policy's totals and the critic's metrics.
        Adds to `reports` what the algorithm's functions report, and to `advantages` the mean of
        each trajectory by its id.
        """
        estimates = None
        if self._roles != NO_ROLES:
            with self.stages.measure("estimates"):
                estimates = self._roles.estimates(batch)
        sequences = training_sequences(batch, self._config, estimates, reports)
        check_advantages(batch, sequences)
        advantages |= mean_advantages(batch, sequences)
        environments = [batch.trajectories[owner].environment for owner in batch.owners]
        sequences = weighted(sequences, mini_batches, self._config, environments)
        with self._policy.memory.resident(Part.PARAMETERS, Part.GRADIENTS):
            totals = self._train_policy(batch, sequences, mini_batches, rate)
        if self._roles.critic is None:
            return totals, {}
        with self.stages.measure("critic"):
            return totals, self._roles.critic.train(
                sequences, [*mini_batches] * self._config.algorithm.epochs
            )

    def _train_policy(
        self,
        batch: Batch,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        rate: float,
    ) -> _Totals:
        policy, max_tokens = self._policy, self._max_tokens
        shares = [
            rank_micro_batches(policy, sequences, members, max_tokens=max_tokens)
            for members in mini_batches
        ]
        old_logprobs: list[list[Tensor]] = [[] for _ in shares]
        epochs = self._config.algorithm.epochs
        # Passes that drop inputs of adapters do not compute the policy's own log-probabilities.
        if len(shares) * epochs > 1 or self._config.lora.dropout:
            with self.stages.measure("forward"):
                old_logprobs = [
                    forward_logprobs(self._policy, share, temperature=self._temperature)
                    for share in shares
                ]
        totals = _Totals(StepStatistics(epochs, self._reports))
        one_pass = list(zip(mini_batches, shares, old_logprobs, strict=True))
        for members, share, old in one_pass * epochs:
            seeds = (batch.step, len(totals.grad_norms), self._policy.rank_of_inputs)
            gradients = functools.partial(self._add_gradients, share, old, seeds)
            started = time.monotonic()
            losses = gradients()
            total = totals.statistics.add([one.statistics for one in losses], self._policy.ranks)
            totals.forward_backward_s += time.monotonic() - started
            fault = totals.statistics.fault
            if fault or not math.isfinite(total):
                chosen = {index: sequences[index] for index in members}
                raise loss_fault(
                    policy, self._config, batch, chosen, losses, total=total, fault=fault
                )
            self._check_bits(batch.step, totals.statistics)
            totals.num_micro_batches += len(share) * self._policy.ranks.dp_size
            self._update(rate, totals, gradients)
        return totals

    def _check_bits(self, step: int, found: StepStatistics) -> None:
        """Raises RunFailed if `agreement` is "bits" and log-probs of learner and engine differ."""
        # In later passes the ratios are those to the first.
        number = found.unequal_tokens
        if self._config.algorithm.agreement == "bits" and number:
            raise RunFailed(
                f"step {step + 1}: algorithm.agreement = 'bits', but {number} tokens that the same "
                "weights sampled have other log-probabilities in the learner than in the engine, "
                f"by up to {found.largest_gap:.1e}: their devices, versions of torch or of vLLM "
                "differ; the weights were not changed"
            )

    @property
    def _replays(self) -> bool:
        return self._config.algorithm.router_replay != "off"

    @property
    def _temperature(self) -> float:
        return self._config.sampling.temperature

    def _add_gradients(
        self, share: Sequence[MicroBatch], old: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[TokenLoss]:
        """Zeroes the gradients, runs forward and backward on `share`, and returns its losses.

        `share` has this rank's micro batches, and `old` the proximal policy's log-probabilities
        of each (empty before any update). Dropout is seeded by `seeds`: step, update, and
        `rank_of_inputs`.
        """
        ranks = self._policy.ranks

        def loss(
            place: int, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor
        ) -> TokenLoss:
            before = old[place] if old else None
            return policy_loss(
                logprobs,
                entropy,
                before,
                micro_batch,
                self._algorithms,
                self._reports,
                step=seeds[0],
                group=ranks.cp_group,
            )

        self._policy.zero_grad()
        with dropping(self._policy.chunks, self._config, seeds):
            return forward_backward(
                self._policy,
                share,
                loss,
                temperature=self._temperature,
                entropy_gradient=any(one.entropy_coefficient > 0 for one in self._algorithms),
            )

    def _update(
        self, rate: float, totals: _Totals, gradients: Callable[[], list[TokenLoss]]
    ) -> None:
        def again() -> None:
            totals.overflows += 1
            gradients()

        started = time.monotonic()
        totals.grad_norms.append(self._policy.optimizer_step(rate, again))
        totals.loss_scale = min(totals.loss_scale, self._policy.loss_scale)
        self.num_updates += 1
        self._policy.ranks.activity.note()
        totals.optimizer_s += time.monotonic() - started

    def _metrics(self, totals: _Totals, rate: float) -> dict[str, float]:
        found = totals.statistics.metrics() | {
            "grad_norm": sum(totals.grad_norms) / len(totals.grad_norms),
            "learning_rate": rate,
            "num_micro_batches": float(totals.num_micro_batches),
            "forward_backward_s": totals.forward_backward_s,
            "optimizer_s": totals.optimizer_s,
        }
        if self._policy.scaler is not None:
            found["gradient_overflows"] = float(totals.overflows)
            found["loss_scale"] = totals.loss_scale
        return found


# Shares of the way down after the share x of the decay's steps.
_FALLEN: dict[DecayKind, Callable[[float], float]] = {
    "none": lambda _: 0.0,
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
    "sqrt": math.sqrt,
}


class StageTimes:
    """Timers of this rank's training stages: seconds since the last `take`, and since the start."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        # Stages of the whole start, and when each of those under way began; both under the lock.
        self._totals = dict.fromkeys(ALWAYS, 0.0)
        self._begun: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage; on a GPU it waits for the GPU's work to end."""
        with self._lock:
            self._begun[stage] = started = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            passed = time.monotonic() - started
            self._seconds[stage] = self._seconds.get(stage, 0.0) + passed
            with self._lock:
                del self._begun[stage]
                self._totals[stage] = self._totals.get(stage, 0.0) + passed

    def totals(self) -> dict[str, float]:
        """Returns the seconds of each stage since the start, by its name; works on any thread.

        The current stage counts up to now.
        """
        with self._lock:
            now = time.monotonic()
            begun = {stage: now - started for stage, started in self._begun.items()}
            return {
                stage: self._totals.get(stage, 0.0) + begun.get(stage, 0.0)
                for stage in self._totals.keys() | begun.keys()
            }

    def take(self) -> dict[str, float]:
        """Returns the seconds of each stage under the name `STAGE_s`, and resets them to 0."""
        taken = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        return taken


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of `step`, which depends on the settings only, not on resumes.

    It is 0 in the first `critic.warmup_steps` steps, in which only the critic is trained. Then it
    rises linearly over `algorithm.warmup_steps`. It decays over the last `algorithm.decay_steps`
    steps, and would reach `decay_to` times the peak rate in the step after the last one.
    """
    algorithm = config.algorithm
    first = config.critic.warmup_steps if config.critic is not None else 0
    place, num_steps = step - first, config.run.steps - first
    if place < 0:
        return 0.0
    rise = min(1.0, (place + 1) / max(1, algorithm.warmup_steps))
    falling = algorithm.decay_steps or max(1, num_steps - algorithm.warmup_steps)
    x = min(1.0, max(0.0, (place - (num_steps - falling)) / falling))
    fallen = (1 - algorithm.decay_to) * _FALLEN[algorithm.decay](x)
    return algorithm.learning_rate * rise * (1 - fallen)
