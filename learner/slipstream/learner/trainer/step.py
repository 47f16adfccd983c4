"""One training step: a batch of whole groups turns policy version s into version s + 1.

Behind it stand what other parts of the trainer may do at a step, and the refusal of a batch that
cannot be trained.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from slipstream.core.environment_rules import objectives_of
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.settings.algorithm_section import DecayKind
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.algorithms.columns import UpdateMetrics, teacher_columns
from slipstream.learner.algorithms.functions import load_functions
from slipstream.learner.algorithms.losses import asks_for_batch, step_columns
from slipstream.learner.trainer.algorithms.loss import (
    ModelEstimates,
    Reports,
    TokenLoss,
    mean_advantages,
    policy_loss,
    training_sequences,
    weighted,
)
from slipstream.learner.trainer.algorithms.loss_inputs import (
    NO_NUMBERS,
    BatchNumbers,
    batch_numbers,
)
from slipstream.learner.trainer.algorithms.step_statistics import StepStatistics
from slipstream.learner.trainer.batches.batch import (
    MAX_TOLD,
    Batch,
    check_advantages,
    check_data,
    check_experts,
    check_pixels,
    check_staleness,
    untrainable,
)
from slipstream.learner.trainer.batches.training_sequence import MicroBatch, TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
from slipstream.learner.trainer.model.model import MemoryPart, ParallelModel
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.model.schedule import (
    Forward,
    early_norm,
    forward_backward,
    forward_logprobs,
    forward_policy,
    masked_outputs,
    planned_sequences,
    rank_micro_batches,
    update_weights,
)
from slipstream.learner.trainer.step_cost import StageTimes
from torch import Tensor

# Metrics that each adapter has too, where there are several.
BY_ADAPTER = ("loss", "entropy", "kl", "grad_norm", "trained_tokens")


class TrainingStep:
    """Trains a policy by batches, with `parts`; on CPU equal batches give bitwise equal weights."""

    def __init__(self, policy: Policy, config: Config, parts: Sequence[StepPart] = ()) -> None:
        self.policy = policy
        self._parts = parts
        self._config = config
        load_functions(config)
        has_reference = config.needs_reference
        objectives = [*objectives_of(config).values()]
        self._objectives = objectives
        self._columns = step_columns(*objectives, has_reference=has_reference)
        if has_reference and config.reference is not None:
            self._columns += teacher_columns(config.reference.teachers)
        self._asks_for_batch = asks_for_batch(*objectives, has_reference=has_reference)
        self.stages = StageTimes()
        # Number of weight updates of the newest `run`, and of its forward and backward passes over
        # a mini-batch: after an overflow in float16 a pass is made again.
        self.num_updates = self._num_passes = 0

    def run(self, batch: Batch) -> TrainedStep:
        """Trains the batch; collective, and every rank must pass the same batch.

        Raises StalenessError for a token that is too old. Raises UntrainableBatch, on all ranks,
        for images that cannot be read, for experts of another model, or for a loss or gradient that
        is not finite although the weights are. This happens before the faulty mini-batch changes a
        weight; `num_updates` says if an earlier mini-batch changed weights. Raises RunFailed if the
        weights are not finite.
        """
        started = time.monotonic()
        policy = self.policy
        adapters = self.policy.adapters
        self.num_updates = self._num_passes = 0
        for part in self._parts:
            part.begins()
        rate = learning_rate(self._config, batch.step)
        totals = _Totals(StepStatistics(self._config.algorithm.epochs, self._columns))
        metrics: dict[str, float] = {}
        try:
            check_batch(batch, policy, self._config)
            if self._config.critic and batch.step == self._config.critic.warmup_steps:
                # Adam's moments are of gradients from before the critic had learnt.
                with policy.memory.resident(MemoryPart.OPTIMIZER):
                    policy.forget_moments()
            for name, own_batch in batch.by_adapter(adapters.names):
                with adapters.active(name):
                    adapter_totals = self._train(own_batch, rate)
                totals.join(adapter_totals)
                if adapters.are_several:
                    adapter_metrics = self._metrics(adapter_totals, rate)
                    metrics |= {
                        f"adapter/{name}/{key}": adapter_metrics[key]
                        for key in BY_ADAPTER
                        if key in adapter_metrics
                    }
        except UntrainableBatch as fault:
            check_weights(policy, self._parts, fault)
            raise
        metrics |= {name: statistics.fmean(values) for name, values in totals.reports.items()}
        metrics |= totals.of_parts | self._metrics(totals, rate)
        for part in self._parts:
            metrics |= part.ends(policy, batch)
        return TrainedStep(metrics, time.monotonic() - started, totals.advantages)

    def share(self, batch: Batch) -> frozenset[int]:
        """Returns the sequences that this rank trains or its parts score; none of unfit data.

        `run` refuses such data on all ranks. Call it before `run`, which counts anew what sharing
        of prefixes saves.
        """
        policy = self.policy
        try:
            check_lengths(batch, policy)
        except UntrainableBatch:
            return frozenset()
        indices: dict[str, list[int]] = {}
        for index, owner in enumerate(batch.owners):
            indices.setdefault(batch.trajectories[owner].adapter, []).append(index)
        trained: set[int] = set()
        for name, own_batch in batch.by_adapter(policy.adapters.names):
            for members in self._mini_batches(own_batch):
                planned = planned_sequences(policy, own_batch, members)
                trained.update(indices[name][place] for place in planned)
            for part in self._parts:
                trained.update(indices[name][place] for place in part.scored_here(own_batch))
        return frozenset(trained)

    def _mini_batches(self, batch: Batch) -> list[list[int]]:
        return batch.mini_batches(
            self._config.algorithm.mini_batches, or_fewer=self.policy.adapters.are_several
        )

    def _train(self, batch: Batch, rate: float) -> _Totals:
        """Trains the active adapter, or all of the policy, and then models of other parts."""
        policy = self.policy
        config = self._config
        ranks = self.policy.ranks
        algorithm = config.algorithm
        temperature = config.sampling.temperature
        totals = _Totals(StepStatistics(algorithm.epochs, self._columns))
        mini_batches = self._mini_batches(batch)
        estimates_of_parts = [part.estimates(batch, self.stages) for part in self._parts]
        known = [estimates for estimates in estimates_of_parts if estimates is not None]
        estimates = ModelEstimates.joined(known) if known else None
        sequences = training_sequences(batch, config, estimates, totals.reports)
        check_advantages(batch, sequences)
        totals.advantages = mean_advantages(batch, sequences)
        sequences = weighted(sequences, batch, mini_batches, config)
        with policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.GRADIENTS):
            # This rank's micro batches of each mini-batch, and their proximal log-probabilities.
            packed = [rank_micro_batches(policy, sequences, members) for members in mini_batches]
            proximal: list[list[Tensor]] = [[] for _ in packed]
            if len(packed) * algorithm.epochs > 1:
                with self.stages.measure("forward"):
                    proximal = [
                        forward_logprobs(policy, micro_batches, temperature=temperature)
                        for micro_batches in packed
                    ]
            epoch = list(zip(mini_batches, packed, proximal, strict=True))
            for members, micro_batches, proximal_logprobs in epoch * algorithm.epochs:
                gradients = self._gradients_of(micro_batches, proximal_logprobs, batch.step)
                started = time.monotonic()
                losses = gradients()
                norm = early_norm(policy)
                total = totals.statistics.add(
                    [token_loss.statistics for token_loss in losses], ranks
                )
                totals.forward_backward_s += time.monotonic() - started
                fault = totals.statistics.fault
                if fault or not math.isfinite(total):
                    mini_batch = {index: sequences[index] for index in members}
                    raise loss_fault(
                        policy, config, batch, mini_batch, losses, total=total, fault=fault
                    )
                # In later passes the engine is compared with the policy before the first update.
                if algorithm.agreement == "bits":
                    check_bits(batch.step, totals.statistics.metrics())
                totals.num_micro_batches += len(micro_batches) * ranks.dp_size
                started = time.monotonic()
                totals.grad_norms.append(update_weights(policy, rate, gradients, norm=norm))
                totals.loss_scale = min(totals.loss_scale, policy.loss_scale)
                totals.optimizer_s += time.monotonic() - started
                self.num_updates += 1
                ranks.activity.note()
        for part in self._parts:
            passes = [*mini_batches] * algorithm.epochs
            totals.of_parts |= part.train(sequences, passes, self.stages)
        return totals

    def _gradients_of(
        self,
        micro_batches: Sequence[MicroBatch],
        proximal_logprobs: Sequence[Tensor],
        step: int,
    ) -> Callable[[], list[TokenLoss]]:
        """Returns a function that computes the gradients of `micro_batches`, and their losses.

        The micro batches are this rank's; `proximal_logprobs` has those of each micro batch by the
        policy before the step, and is empty before any update.
        """
        algorithm = self._config.algorithm
        policy = self.policy
        temperature = self._config.sampling.temperature
        numbers = NO_NUMBERS

        def mini_batch_numbers() -> BatchNumbers:
            outputs = forward_policy(policy, micro_batches, temperature=temperature)
            if not outputs:
                return NO_NUMBERS
            return batch_numbers(
                outputs,
                proximal_logprobs,
                micro_batches,
                self._objectives,
                step=step,
                cp_group=policy.ranks.cp_group,
                group=policy.ranks.token_group,
            )

        def loss(
            place: int, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor
        ) -> TokenLoss:
            return policy_loss(
                logprobs,
                entropy,
                proximal_logprobs[place] if proximal_logprobs else None,
                micro_batch,
                self._objectives,
                self._columns,
                step=step,
                group=policy.ranks.cp_group,
                numbers=numbers,
            )

        def gradients() -> list[TokenLoss]:
            nonlocal numbers
            self._num_passes += 1
            policy.zero_grad()
            numbers = mini_batch_numbers() if self._asks_for_batch else NO_NUMBERS
            return forward_backward(
                policy,
                micro_batches,
                loss,
                temperature=temperature,
                entropy_gradient=algorithm.entropy_coefficient > 0,
                observe=self._observe,
            )

        return gradients

    def _observe(self, micro_batch: MicroBatch, hidden: Tensor) -> None:
        for part in self._parts:
            part.observe(micro_batch, hidden)

    def _metrics(self, totals: _Totals, rate: float) -> dict[str, float]:
        updates = UpdateMetrics(
            grad_norm=sum(totals.grad_norms) / len(totals.grad_norms),
            learning_rate=rate,
            num_micro_batches=float(totals.num_micro_batches),
            forward_backward_s=totals.forward_backward_s,
            optimizer_s=totals.optimizer_s,
        )
        if self.policy.scaler is not None:
            updates["gradient_overflows"] = float(self._num_passes - self.num_updates)
            updates["loss_scale"] = totals.loss_scale
        return {**totals.statistics.metrics(), **cast(dict[str, float], updates)}


@dataclass(frozen=True)
class TrainedStep:
    """The result of a training step, the same on every rank except for the times."""

    metrics: dict[str, float]
    wall_s: float
    # The mean advantage of the trained tokens, by trajectory id.
    advantages: dict[str, float]


@dataclass
class _Totals:
    statistics: StepStatistics
    # Values that the algorithm's functions report of the episodes.
    reports: Reports = field(default_factory=dict)
    advantages: dict[str, float] = field(default_factory=dict)
    of_parts: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    # The smallest scale of the loss that was used.
    loss_scale: float = math.inf
    num_micro_batches: int = 0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0

    def join(self, further: _Totals) -> None:
        self.statistics.join(further.statistics)
        for name, values in further.reports.items():
            self.reports.setdefault(name, []).extend(values)
        self.advantages |= further.advantages
        self.of_parts |= further.of_parts
        self.grad_norms += further.grad_norms
        self.loss_scale = min(self.loss_scale, further.loss_scale)
        self.num_micro_batches += further.num_micro_batches
        self.forward_backward_s += further.forward_backward_s
        self.optimizer_s += further.optimizer_s


# Fraction of the decay that is done after a fraction x of its steps.
_FALLEN: dict[DecayKind, Callable[[float], float]] = {
    "none": lambda _: 0.0,
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
    "sqrt": math.sqrt,
}


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of `step`, which depends on the settings only, not on resumes.

    It is 0 in the first `critic.warmup_steps` steps, in which only the critic is trained. Then it
    rises linearly over `algorithm.warmup_steps`. With `algorithm.decay` it falls after them, and
    would be 0 in the step after the last one.
    """
    algorithm = config.algorithm
    first = config.critic.warmup_steps if config.critic is not None else 0
    place = step - first
    num_steps = config.run.steps - first
    if place < 0:
        return 0.0
    rise = min(1.0, (place + 1) / max(1, algorithm.warmup_steps))
    falling = max(1, num_steps - algorithm.warmup_steps)
    x = min(1.0, max(0.0, (place - (num_steps - falling)) / falling))
    return algorithm.learning_rate * rise * (1 - _FALLEN[algorithm.decay](x))


class StepPart:
    """A part of the trainer.

    All methods but `around`, `scored_here`, `holds`, `observe` and `close` are collective.
    """

    def models(self) -> Mapping[str, ParallelModel]:
        """Returns the models that this part has besides the policy, by name."""
        return {}

    def stored_models(self) -> Sequence[StoredModel]:
        """Returns those of its models that checkpoints must store."""
        return ()

    def around(self, step: int) -> AbstractContextManager[None]:
        """Returns a context for all that the trainer does for step `step`, counted from 1."""
        return nullcontext()

    def begins(self) -> None:
        """Handles the beginning of the training of a batch."""

    def estimates(self, batch: Batch, stages: StageTimes) -> list[ModelEstimates] | None:
        """Returns estimates for each trajectory, the same on every rank; None if it has none."""
        return None

    def scored_here(self, batch: Batch) -> Collection[int]:
        """Returns the sequences whose recorded experts `estimates` needs on this rank."""
        return ()

    def holds(self, version: PolicyVersion) -> None:
        """Handles that the policy, and what was loaded with it, is of this version."""

    def observe(self, micro_batch: MicroBatch, hidden: Tensor) -> None:
        """Sees the policy's last hidden states [tokens, hidden size] in a training pass."""

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        stages: StageTimes,
    ) -> dict[str, float]:
        """Trains its models after the policy; returns metrics. `mini_batches` has indices."""
        return {}

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        """Handles the new weights of the policy after `batch`; returns metrics of the step."""
        return {}

    def close(self) -> None:
        """Handles the end of the run."""


def check_batch(batch: Batch, model: ParallelModel, config: Config) -> None:
    """Raises the error of the first check of the data that fails, on every rank; collective."""
    check_staleness(batch, config.algorithm.max_staleness)
    check_lengths(batch, model)
    check_pixels(batch.trajectories, model.ranks)
    if config.algorithm.router_replay != "off":
        check_experts(batch.trajectories, model.chunks[0].config)


def check_lengths(batch: Batch, model: ParallelModel) -> None:
    """Raises UntrainableBatch for a sequence that the model cannot train; not collective."""
    check_data(
        batch,
        max_tokens=model.max_tokens * model.ranks.cp_size,
        multiple=model.sequence_multiple,
        vocab_size=model.vocab_size,
    )


def loss_fault(
    policy: Policy,
    config: Config,
    batch: Batch,
    chosen: Mapping[int, TrainingSequence],
    losses: Sequence[TokenLoss],
    *,
    total: float,
    fault: str,
) -> RunFailed:
    """Returns the error that names the cause of a mini-batch loss that is not finite; collective.

    `chosen` has the sequences of the mini-batch by their index in the batch, `losses` the losses of
    this rank's micro batches, and `total` the loss over all ranks. `fault` describes an error of
    the user's own function, or is "". The result is UntrainableBatch if the batch is at fault, and
    another RunFailed if the weights or the user's function are.
    """
    cause = f"the loss is {total}; the weights were not changed"
    sequences = list(chosen.values())

    def are_finite(forward: Forward) -> list[bool]:
        outputs = masked_outputs(policy, sequences, forward)
        return [bool(np.isfinite(values).all()) for values in outputs]

    trained = [bool(sequence.loss_mask.any()) for sequence in sequences]
    # The log-probabilities depend only on the tokens and the weights.
    temperature = config.sampling.temperature
    scored = are_finite(functools.partial(forward_logprobs, policy, temperature=temperature))
    if not any(itertools.compress(scored, trained)):
        hint = ""
        if policy.dtype == torch.float16:
            hint = '; float16 ends at 65504, and model.dtype = "bfloat16" may hold this model'
        return RunFailed(
            f"{cause}; the policy finds no finite log-probability in any sequence: its weights "
            f"are at fault, not the batch{hint}"
        )
    are_known = are_finite(lambda _: [token_loss.token_losses for token_loss in losses])
    faulty = [index for index, is_known in zip(chosen, are_known, strict=True) if not is_known]
    if fault and all(scored):
        groups_at_fault = dict.fromkeys(batch.group_ids[batch.owners[index]] for index in faulty)
        groups = f", group {', '.join([*groups_at_fault][:MAX_TOLD])}" if groups_at_fault else ""
        return RunFailed(f"step {batch.step + 1}{groups}: {fault}; the weights were not changed")
    return untrainable(batch, faulty, cause)


def check_bits(step: int, metrics: Mapping[str, float]) -> None:
    """Raises RunFailed if log-probabilities differ between learner and engine in any bit."""
    if unequal := round(metrics["logprob_unequal_tokens"]):
        raise RunFailed(
            f"step {step + 1}: algorithm.agreement = 'bits', but {unequal} tokens that the same "
            "weights sampled have other log-probabilities in the learner than in the engine, by up "
            f"to {metrics['logprob_gap_max']:.1e}: their devices, versions of torch or of vLLM "
            "differ; the weights were not changed"
        )


def check_weights(policy: Policy, parts: Sequence[StepPart], fault: UntrainableBatch) -> None:
    """Raises RunFailed from `fault` if the weights of a model are not finite; collective."""
    models = [("policy", policy), *(pair for part in parts for pair in part.models().items())]
    num_not_finite = {name: float(model.count_not_finite()) for name, model in models}
    for name in policy.adapters.names[1:]:
        with policy.adapters.active(name):
            num_not_finite[f"policy's adapter {name}"] = float(policy.count_not_finite())
    counts = torch.tensor([*num_not_finite.values()])
    for name, count in zip(num_not_finite, policy.ranks.sum(counts).tolist(), strict=True):
        if count:
            raise RunFailed(
                f"weights of the {name} are not finite, and no batch can be trained: {fault}"
            ) from fault
