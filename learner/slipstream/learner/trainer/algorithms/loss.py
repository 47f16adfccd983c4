"""Advantages and loss weights of a batch's sequences, and the loss of their packed micro batches.

The loss of a token has an objective, an importance weight, a divergence and an entropy. Statistics
are kept as sums, so that they can be added over tokens and ranks; metrics are computed from these
sums.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from slipstream.core.environment_rules import (
    PLAIN,
    environment_rules,
    kl_coefficient_of,
    objectives_of,
    sampling_temperatures,
)
from slipstream.core.models.vision import load_processor
from slipstream.core.settings.algorithm_section import (
    TOP_K_ESTIMATORS,
    AlgorithmSection,
)
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray, ReferenceLogprobs, Trajectory
from slipstream.learner.algorithms.columns import NUM_LAGS, OF_ALL_STEPS, Column, Reduce
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode, TokenAdvantages, Turn
from slipstream.learner.algorithms.functions import (
    Function,
    function_of,
    shaped_rewards,
    side_of,
    token_advantages,
)
from slipstream.learner.algorithms.inputs import (
    LossInputs,
    RecordedSums,
    TokenTerms,
    TokenWeights,
)
from slipstream.learner.algorithms.losses import (
    kl_estimate,
    token_terms,
    token_weights,
    top_k_divergence,
)
from slipstream.learner.trainer.algorithms.loss_inputs import (
    NO_NUMBERS,
    BatchNumbers,
    loss_inputs,
    tokens_of,
)
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import (
    MicroBatch,
    NumpyArray,
    TokenEstimates,
    TrainingSequence,
    token_lags,
)
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor

# The values that functions report of the episodes, by name.
Reports: TypeAlias = dict[str, list[float]]
# The values of the tokens in a mask: (column, values, mask).
Values = tuple[Column, Tensor, Tensor]


@dataclass(frozen=True)
class ModelEstimates:
    """Estimates of the reference model and the critic for one trajectory, [sampled tokens] each."""

    # At the sampling temperature.
    reference: ReferenceLogprobs | None = None
    # The critic's estimate before each token was sampled.
    values: LogprobArray | None = None
    # The learner's, with the weights that sampled the token; of no meaning where those are the
    # newest ones.
    versions: LogprobArray | None = None

    @classmethod
    def joined(cls, parts: Sequence[Sequence[ModelEstimates]]) -> list[ModelEstimates]:
        """Returns what the `parts` estimate of each trajectory; at most one of them has a field."""
        return [
            cls(
                **{
                    name: value
                    for estimates in estimates_of_parts
                    for name, value in vars(estimates).items()
                    if value is not None
                }
            )
            for estimates_of_parts in zip(*parts, strict=True)
        ]


def training_sequences(
    batch: Batch,
    config: Config,
    estimates: Sequence[ModelEstimates] | None = None,
    reports: Reports | None = None,
) -> list[TrainingSequence]:
    """Returns the sequences of the batch, in order; the same on every rank.

    `estimates` has one entry for each trajectory; None if the run has no reference model or critic.
    A trajectory that `leave_out_truncated` removes has no trained token and is in no statistic. The
    advantages of a branch are its side's advantages times the branch's share. `reports` collects
    the values that the functions report of each episode. Raises RunFailed for a faulty function,
    and UntrainableBatch for a faulty image.
    """
    trajectories = batch.trajectories
    estimates_by_index = (
        estimates if estimates is not None else [ModelEstimates()] * len(trajectories)
    )
    advantages = _advantages(batch, config, estimates_by_index, {} if reports is None else reports)
    rules = environment_rules(config)
    has_coefficients = config.algorithm.kl.placement == "loss" and any(
        rules_of_environment.kl_coefficient is not None for rules_of_environment in rules.values()
    )
    objectives = [*objectives_of(config)]
    estimated: list[TokenEstimates[NumpyArray]] = []
    for index, (trajectory, model_estimates) in enumerate(
        zip(trajectories, estimates_by_index, strict=True)
    ):
        zeros = np.zeros(trajectory.num_sampled_tokens)
        # The advantages of a trajectory that is left out are 0.
        worth = advantages.get(index, TokenAdvantages(zeros, zeros))
        shared = worth.advantages
        reference = model_estimates.reference
        if trajectory.branches:
            parts = trajectory.sequences
            shared = np.concatenate([p.branch.share * shared[p.sampled] for p in parts])
        fields: dict[str, NumpyArray | None] = {}
        if reference is not None:
            fields["reference_logprobs"] = reference.logprobs
            if reference.top_k:
                fields |= {"top_ids": reference.top_ids, "top_logprobs": reference.top_logprobs}
        if model_estimates.values is not None:
            fields |= {"values": model_estimates.values, "returns": worth.returns}
        if has_coefficients:
            coefficient = kl_coefficient_of(config, trajectory.environment, rules)
            fields["kl_coefficients"] = np.full(trajectory.num_sampled_tokens, coefficient)
        if len(objectives) > 1:
            name = trajectory.environment
            place = objectives.index(name) if name in objectives else 0
            fields["objectives"] = np.full(trajectory.num_sampled_tokens, place)
        if model_estimates.versions is not None:
            fields["version_logprobs"] = model_estimates.versions
        estimated.append(TokenEstimates(shared, **fields))
    has_images = any(trajectory.images for trajectory in trajectories)
    sequences = TrainingSequence.of_trajectories(
        trajectories,
        estimated,
        step=batch.step,
        temperatures=sampling_temperatures(config, [t.environment for t in trajectories]),
        processor=load_processor(config.model.path) if has_images else None,
        with_experts=config.algorithm.router_replay != "off",
    )
    for index, owner in enumerate(batch.owners):
        if owner not in advantages:
            mask = np.zeros_like(sequences[index].loss_mask)
            sequences[index] = dataclasses.replace(sequences[index], loss_mask=mask)
    return sequences


def mean_advantages(batch: Batch, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
    """Returns the mean advantage over the trained tokens of each trajectory that has any, by id."""
    trained: dict[str, list[FloatArray]] = {}
    for owner, sequence in zip(batch.owners, sequences, strict=True):
        name = batch.trajectories[owner].trajectory_id
        trained.setdefault(name, []).append(sequence.advantages[sequence.loss_mask])
    values = {name: np.concatenate(parts) for name, parts in trained.items()}
    return {
        name: float(advantages.mean()) for name, advantages in values.items() if advantages.size
    }


def _advantages(
    batch: Batch, config: Config, known: Sequence[ModelEstimates], reports: Reports
) -> dict[int, TokenAdvantages]:
    """Returns the advantages of each episode that is not left out, by its index in the batch."""
    rules = environment_rules(config)
    shaped = shaped_rewards(batch.trajectories, config)
    lengths = [trajectory.num_sampled_tokens for trajectory in batch.trajectories]
    every_lag = np.split(token_lags(batch.trajectories, batch.step), np.cumsum(lengths[:-1]))
    episodes: list[ScoredEpisode] = []
    # The trajectory of each of the `episodes`, and the places of its tokens among those sampled.
    owners: list[tuple[int, npt.NDArray[np.int64]]] = []
    for index, (trajectory, sides) in enumerate(zip(batch.trajectories, shaped, strict=True)):
        if not sides:
            continue
        by_side = {side.side: side.shaped_reward for side in sides}
        turns = _turns_of(trajectory)
        token_rewards = trajectory.token_rewards
        own_rewards = {side_of(branch): branch.reward for branch in trajectory.branches}
        costs = np.zeros(trajectory.num_sampled_tokens)
        kl = config.algorithm.kl
        coefficient = kl_coefficient_of(config, trajectory.environment, rules)
        if coefficient and kl.placement == "reward" and not trajectory.is_given:
            reference = known[index].reference
            assert reference is not None, "a cost of divergence needs a reference model"
            # The divergence is the behavior policy's, because that policy sampled the tokens.
            divergence = kl_estimate(
                torch.from_numpy(trajectory.behavior_logprobs.astype(np.float64)),
                torch.from_numpy(reference.logprobs.astype(np.float64)),
                kl.estimator,
            )
            costs = coefficient * divergence.numpy()
        lags = every_lag[index]
        values = known[index].values
        # A side is the branches of an episode that share a reward; estimators take them as one
        # episode, which is compared with the same side of its group's episodes. An episode has one
        # side, unless its agent gave a named branch a reward of its own.
        found_sides: dict[str, list[npt.NDArray[np.int64]]] = {}
        for part in trajectory.sequences:
            sampled_places = np.arange(part.sampled.start, part.sampled.stop)
            found_sides.setdefault(side_of(part.branch), []).append(sampled_places)
        for side, parts in found_sides.items():
            places = np.concatenate(parts)
            group_id = trajectory.group_id
            ends = itertools.pairwise([0, *itertools.accumulate(map(len, parts))])
            owners.append((index, places))
            earned = None if token_rewards is None else token_rewards[places].astype(np.float64)
            if earned is not None:
                own_reward = own_rewards.get(side)
                before = trajectory.reward if own_reward is None else own_reward
                # The change by the reward function is earned at the end.
                earned[-1:] += by_side[side] - before
            episodes.append(
                ScoredEpisode(
                    # A group's id has no space.
                    f"{group_id} {side}" if side else group_id,
                    by_side[side],
                    costs[places],
                    None if values is None else values[places].astype(np.float64),
                    tuple(itertools.starmap(slice, ends)),
                    trajectory.metrics,
                    lags[places],
                    earned,
                    tuple(turns[side]),
                )
            )
    environments = [batch.trajectories[index].environment for index, _ in owners]
    where = f"step {batch.step + 1}"
    estimated = _estimated(config, episodes, environments, where=where)
    reported = [side.reports for sides in shaped for side in sides]
    reported += [estimate.reports for estimate in estimated]
    for name, value in (item for side_reports in reported for item in side_reports.items()):
        reports.setdefault(name, []).append(float(value))
    # The sides of each episode are joined.
    advantages: dict[int, TokenAdvantages] = {}
    for (index, places), estimate in zip(owners, estimated, strict=True):
        zeros = np.zeros((2, batch.trajectories[index].num_sampled_tokens))
        joined = advantages.setdefault(index, TokenAdvantages(*zeros))
        joined.advantages[places] = estimate.advantages
        if joined.returns is not None and estimate.returns is not None:
            joined.returns[places] = estimate.returns
    return advantages


def _estimated(
    config: Config, episodes: Sequence[ScoredEpisode], environments: Sequence[str], *, where: str
) -> list[TokenAdvantages]:
    """Returns the advantages of each episode, in order; `environments` has that of each.

    An environment with an estimator of its own is a batch for itself, and all others are one.
    """
    rules = environment_rules(config)
    places_of: dict[str, list[int]] = {}
    for place, environment in enumerate(environments):
        is_apart = rules.get(environment, PLAIN).algorithm is not None
        places_of.setdefault(environment if is_apart else "", []).append(place)
    estimated: dict[int, TokenAdvantages] = {}
    for environment, places in places_of.items():
        algorithm = rules.get(environment, PLAIN).algorithm or config.algorithm
        members = [episodes[place] for place in places]
        advantages = token_advantages(algorithm, members, where=where)
        estimated |= zip(places, advantages, strict=True)
    return [estimated[place] for place in range(len(episodes))]


def _turns_of(trajectory: Trajectory) -> dict[str, list[Turn]]:
    """Returns the turns of each side that sampled tokens; spans count the tokens of the side."""
    turns: dict[str, list[Turn]] = {}
    for part in trajectory.sequences:
        turns_of_side = turns.setdefault(side_of(part.branch), [])
        begin = end = part.tokens.start
        for is_reply, length in zip(
            itertools.cycle((False, True)), trajectory.run_lengths[part.runs]
        ):
            start = end
            end = end + length
            if is_reply and length:
                first = turns_of_side[-1].span.stop if turns_of_side else 0
                read = trajectory.token_ids[begin:start]
                reply_tokens = trajectory.token_ids[start:end]
                turns_of_side.append(Turn(slice(first, first + length), read, reply_tokens))
                begin = end
    return turns


def policy_loss(
    policy_logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    micro_batch: MicroBatch,
    objectives: Sequence[AlgorithmSection],
    columns: Sequence[Column],
    *,
    step: int = 0,
    group: dist.ProcessGroup | None,
    numbers: BatchNumbers = NO_NUMBERS,
) -> TokenLoss:
    """Returns the sum over `loss_mask` of each token's loss times its `loss_weights`.

    The loss of a token is weight * (objective + kl.coefficient * divergence) - entropy_coefficient
    * entropy. The weight corrects for the policy that sampled the token and is 0 for masked tokens.
    The weight also applies to the divergence, because a divergence is a mean over tokens that the
    trained policy samples.

    `policy_logprobs` are the log-probabilities of `micro_batch.all_targets`. `old_logprobs` are the
    log-probabilities of the targets by the proximal policy (the policy before the first
    mini-batch), or None if no mini-batch has changed the policy yet. `entropy` carries a gradient
    if its coefficient is not 0. `objectives` begin with the run's algorithm; of those behind it,
    to which `micro_batch.objectives` sends tokens, only the loss counts. `columns` are those of the
    step, `numbers` those of the mini-batch.
    Collective over `group`, the context parallel ranks, unless it is None. Raises RunFailed for a
    faulty function.
    """
    top: Tensor | None = None
    if policy_logprobs.dim() > 1:
        policy_logprobs, top = policy_logprobs[:, 0], policy_logprobs[:, 1:]
    tokens = loss_inputs(
        policy_logprobs, entropy, old_logprobs, micro_batch, step=step, group=group
    )
    mask = tokens.mask
    is_given = tokens.is_given
    where = f"step {step + 1}"
    algorithm = objectives[0]
    weight = function_of(algorithm, "weight")
    known_tokens = dataclasses.replace(tokens, batch=RecordedSums(mask, numbers.of_weight))
    factors = token_weights(weight, known_tokens, where)
    calls: list[tuple[Function, TokenTerms | TokenWeights, Tensor]] = [
        (weight, factors, mask & ~is_given)
    ]
    losses = torch.zeros_like(factors.weights)
    for number, objective in enumerate(objectives):
        loss = function_of(objective, "loss")
        own_mask = tokens_of(number, mask, micro_batch.objectives)
        recorded = numbers.of_losses[number] if numbers.of_losses else ()
        known_tokens = dataclasses.replace(
            tokens, mask=own_mask, batch=RecordedSums(own_mask, recorded)
        )
        terms = token_terms(loss, known_tokens, where)
        calls.append((loss, terms, own_mask))
        losses = torch.where(own_mask, factors.weights * terms.losses, losses)
    values: list[Values] = []
    names = {column.name for column in columns}
    for function, reported, values_mask in calls:
        if unknown := reported.reports.keys() - names:
            what = f"it reports {min(unknown)}, but did not of three tokens"
            raise function.fault(what, where)
        values += [
            (Column.of_report(name), report, values_mask)
            for name, report in reported.reports.items()
        ]
        if function.is_own:
            fault = Column(str(function), Reduce.FAULTS)
            if isinstance(reported, TokenTerms):
                values.append((fault, ~reported.losses.isfinite(), values_mask))
            else:
                values.append((fault, ~reported.weights.isfinite(), mask))
    kl = algorithm.kl
    if kl.coefficient and kl.placement == "loss":
        if kl.estimator in TOP_K_ESTIMATORS:
            likely = micro_batch.top_logprobs
            assert top is not None, "the divergence needs the reference's most likely tokens"
            assert likely is not None
            divergence = top_k_divergence(top, likely, kl.estimator)
        else:
            reference = micro_batch.reference_logprobs
            assert reference is not None, "the divergence needs a reference's log-probabilities"
            divergence = kl_estimate(policy_logprobs, reference, kl.estimator)
        coefficients: float | Tensor = kl.coefficient
        if micro_batch.kl_coefficients is not None:
            coefficients = micro_batch.kl_coefficients
        losses = losses + coefficients * factors.weights * divergence
    if algorithm.entropy_coefficient:
        losses = losses - algorithm.entropy_coefficient * entropy
    losses = torch.where(mask, micro_batch.loss_weights * losses, 0.0)
    statistics = token_statistics(losses, factors.weights, tokens, values, columns)
    return TokenLoss(losses.sum(), mask.sum(), statistics, losses.detach())


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one micro batch, and its statistics."""

    # Sum over the trained tokens; the caller divides by the trained tokens of the mini-batch.
    loss: Tensor
    num_tokens: Tensor
    # The table of `token_statistics`; all sums are 0 if no token is trained.
    statistics: Tensor
    # The terms of the sum, detached [tokens].
    token_losses: Tensor


class StepStatistics:
    """Sums over a step's mini-batches and ranks, equal on all: `add` each, then `metrics`."""

    def __init__(self, epochs: int = 1, columns: Sequence[Column] = ()) -> None:
        """Takes the passes over the batch and all columns of the step, the same on all ranks."""
        self._epochs = epochs
        self._columns = [*OF_ALL_STEPS, *columns]
        self._table = _new_table(self._columns)

    def add(self, found: Sequence[Tensor], ranks: Ranks) -> float:
        """Adds this rank's part of a mini-batch; returns its loss over all ranks. Collective."""
        own_table = _new_table(self._columns)
        if ranks.counts:
            # All are copied at once, because each copy waits for the device.
            for table in torch.stack(list(found)).cpu():
                _add(own_table, table)
        ranks.sum(own_table[:2])
        ranks.max(own_table[2])
        _add(self._table, own_table)
        # The first column is the loss.
        return float(own_table[0, 0])

    @property
    def fault(self) -> str:
        """The first fault of a function, such as a value that is not finite, or "" if none."""
        columns = zip(self._columns, *self._table.tolist(), strict=True)
        for column, total, _, largest in [*columns][len(OF_ALL_STEPS) :]:
            if column.reduce is Reduce.FAULTS and total:
                return f"{column.name} gave {total:.0f} tokens a value that is not finite"
            if not (math.isfinite(total) and largest < math.inf):
                return f"the report {column.name} is not finite"
        return ""

    def join(self, others: StepStatistics) -> None:
        """Adds the sums of other mini-batches of the same step."""
        _add(self._table, others._table)

    def metrics(self) -> dict[str, float]:
        """Returns means over the tokens and passes of the step, by the names in docs/metrics.md."""
        metrics: dict[str, float] = {}
        for column, total, number, largest in zip(
            self._columns, *self._table.tolist(), strict=True
        ):
            match column.reduce:
                case Reduce.LARGEST if largest > -math.inf:
                    metrics[column.name] = largest
                case Reduce.NUMBER:
                    metrics[column.name] = total / self._epochs
                case Reduce.MEAN:
                    metrics[column.name] = total / max(1.0, number)
                case Reduce.KNOWN_MEAN if number:
                    metrics[column.name] = total / number
        if squared := metrics.get("effective_sample_size"):
            metrics["effective_sample_size"] = metrics["importance_weight_mean"] ** 2 / squared
        return metrics


def _new_table(columns: Sequence[Column], device: torch.device | None = None) -> Tensor:
    table = torch.zeros(3, len(columns), dtype=torch.float64, device=device)
    table[2] = -math.inf
    return table


def _add(table: Tensor, other: Tensor) -> None:
    table[:2] += other[:2]
    torch.maximum(table[2], other[2], out=table[2])


@torch.no_grad()
def token_statistics(
    losses: Tensor,
    weights: Tensor,
    tokens: LossInputs,
    reports: Sequence[Values],
    columns: Sequence[Column],
) -> Tensor:
    """Returns a table of a micro batch, of tokens' losses, weights and `reports`, for a step.

    It is float64 [3, columns of all steps and `columns`]: sum, number of tokens and largest value.
    """
    mask = tokens.mask
    behavior = tokens.behavior_logprobs
    policy = tokens.logprobs
    is_sampled = mask & ~tokens.is_given
    is_newest = is_sampled & (tokens.lags == 0)
    reference = policy if tokens.reference_logprobs is None else tokens.reference_logprobs
    gaps = (tokens.proximal_logprobs - behavior).abs()
    lags = tokens.lags.clamp(max=NUM_LAGS - 1)
    values_of = {
        "loss": (losses, mask),
        "entropy": (tokens.entropy, mask),
        "kl_reference": (kl_estimate(policy, reference, "k3"), mask),
        "trained_tokens": (mask, mask),
        "importance_weight_mean": (weights, is_sampled),
        "effective_sample_size": (weights.double().square(), is_sampled),
        # KL(behavior || policy): the behavior policy sampled the tokens.
        "kl": (kl_estimate(behavior, policy, "k3"), is_sampled),
        "logprob_gap_mean": (gaps, is_newest),
        "logprob_gap_max": (gaps, is_newest),
        "logprob_gap_tokens": (is_newest, is_newest),
        "logprob_unequal_tokens": (tokens.proximal_logprobs != behavior, is_newest),
    }
    for lag in range(1, NUM_LAGS):
        values_of[f"logprob_gap_lag_{lag}"] = gaps, is_sampled & (lags == lag)
    # A single kernel for all columns: the host starts every kernel, for each micro batch.
    values_and_masks = [values_of[column.name] for column in OF_ALL_STEPS]
    values = torch.stack([column_values.double() for column_values, _ in values_and_masks])
    masks = torch.stack([column_mask for _, column_mask in values_and_masks])
    table = _new_table([*OF_ALL_STEPS, *columns], mask.device)
    of_all_steps = table[:, : len(values_and_masks)]
    of_reports = table[:, len(values_and_masks) :]
    of_all_steps[0] = torch.where(masks, values, 0.0).sum(1)
    of_all_steps[1] = masks.sum(1)
    of_all_steps[2] = torch.where(masks, values, -math.inf).amax(1)
    for column, report, report_mask in reports:
        total, number, largest = of_reports[:, columns.index(column)]
        if column.reduce is Reduce.LARGEST:
            torch.maximum(largest, torch.where(report_mask, report, -math.inf).max(), out=largest)
        else:
            total += torch.where(report_mask, report, 0).sum(dtype=torch.float64)
            number += report_mask.sum()
    return table
