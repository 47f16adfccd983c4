"""Advantages and loss weights of a batch's sequences, and the loss of their packed micro batches.

The loss of a token has an objective, an importance weight, a divergence and an entropy. Statistics
are kept as sums, so that they can be added over tokens and ranks; metrics are computed from these
sums.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from slipstream.core.environment_rules import (
    PLAIN,
    EnvironmentRules,
    environment_rules,
    kl_coefficient_of,
    objectives_of,
    sampling_temperatures,
)
from slipstream.core.models.images import load_processor
from slipstream.core.settings.algorithm_section import (
    TOP_K_ESTIMATORS,
    AggregationKind,
    AlgorithmSection,
    KlSection,
)
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ReferenceSection
from slipstream.core.types import LogprobArray, ReferenceLogprobs, Trajectory
from slipstream.learner.algorithms.advantages import token_advantages
from slipstream.learner.algorithms.columns import Column, Reduce, is_of_teacher
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode, TokenAdvantages, Turn
from slipstream.learner.algorithms.functions import Function, function_of, shaped_rewards, side_of
from slipstream.learner.algorithms.inputs import (
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
from slipstream.learner.trainer.algorithms.step_statistics import TokenValues, token_statistics
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import (
    MicroBatch,
    NumpyArray,
    TokenEstimates,
    TrainingSequence,
    token_lags,
)
from torch import Tensor

# The values that functions report of the episodes, by name.
Reports: TypeAlias = dict[str, list[float]]


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
    reference_section = config.reference or ReferenceSection()
    teachers = [*reference_section.teachers]
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
        if teachers:
            teacher = reference_section.teacher_of(trajectory.environment)
            place = teachers.index(teacher) if teacher else -1
            fields["teachers"] = np.full(trajectory.num_sampled_tokens, place)
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
    lags_of = np.split(token_lags(batch.trajectories, batch.step), np.cumsum(lengths[:-1]))
    sides: list[_ScoredSide] = []
    for index, shaped_sides in enumerate(shaped):
        if shaped_sides:
            sides += _scored_sides(
                batch.trajectories[index],
                index=index,
                rewards={side.side: side.shaped_reward for side in shaped_sides},
                estimates=known[index],
                costs=_divergence_costs(batch.trajectories[index], known[index], config, rules),
                lags=lags_of[index],
            )
    estimated = _estimated(
        config,
        [side.episode for side in sides],
        [batch.trajectories[side.index].environment for side in sides],
        where=f"step {batch.step + 1}",
    )
    reported = [side.reports for shaped_sides in shaped for side in shaped_sides]
    reported += [estimate.reports for estimate in estimated]
    for name, value in itertools.chain.from_iterable(values.items() for values in reported):
        reports.setdefault(name, []).append(float(value))
    # The sides of each episode are joined.
    advantages: dict[int, TokenAdvantages] = {}
    for side, estimate in zip(sides, estimated, strict=True):
        zeros = np.zeros((2, lengths[side.index]))
        joined = advantages.setdefault(side.index, TokenAdvantages(*zeros))
        joined.advantages[side.places] = estimate.advantages
        if joined.returns is not None and estimate.returns is not None:
            joined.returns[side.places] = estimate.returns
    return advantages


@dataclass(frozen=True)
class _ScoredSide:
    """The branches of an episode that share a reward, as the episode that estimators take.

    It is compared with the same side of its group's episodes. An episode has one side, unless its
    agent gave a named branch a reward of its own.
    """

    # The episode's place in the batch.
    index: int
    # Where the side's tokens are among the episode's sampled tokens.
    places: npt.NDArray[np.int64]
    episode: ScoredEpisode


def _scored_sides(
    trajectory: Trajectory,
    *,
    index: int,
    rewards: Mapping[str, float],
    estimates: ModelEstimates,
    costs: npt.NDArray[np.float64],
    lags: npt.NDArray[np.int32],
) -> Iterator[_ScoredSide]:
    """Yields the sides of the episode at `index` of a batch; shaped `rewards` are by side.

    `costs` and `lags` are [sampled tokens].
    """
    turns = _turns_of(trajectory)
    own_rewards = {side_of(branch): branch.reward for branch in trajectory.branches}
    places_of: dict[str, list[npt.NDArray[np.int64]]] = {}
    for part in trajectory.sequences:
        places = np.arange(part.sampled.start, part.sampled.stop)
        places_of.setdefault(side_of(part.branch), []).append(places)
    for side, branches in places_of.items():
        places = np.concatenate(branches)
        ends = itertools.pairwise([0, *itertools.accumulate(map(len, branches))])
        token_rewards = None
        if trajectory.token_rewards is not None:
            token_rewards = trajectory.token_rewards[places].astype(np.float64)
            own_reward = own_rewards.get(side)
            unshaped_reward = trajectory.reward if own_reward is None else own_reward
            # The change by the reward function is earned at the end.
            token_rewards[-1:] += rewards[side] - unshaped_reward
        values = None if estimates.values is None else estimates.values[places].astype(np.float64)
        episode = ScoredEpisode(
            # A group's id has no space.
            f"{trajectory.group_id} {side}" if side else trajectory.group_id,
            rewards[side],
            costs[places],
            values,
            tuple(itertools.starmap(slice, ends)),
            trajectory.metrics,
            lags[places],
            token_rewards,
            tuple(turns[side]),
        )
        yield _ScoredSide(index, places, episode)


def _divergence_costs(
    trajectory: Trajectory,
    estimates: ModelEstimates,
    config: Config,
    rules: Mapping[str, EnvironmentRules],
) -> npt.NDArray[np.float64]:
    """Returns what divergence from the reference costs each sampled token; 0 unless rewards pay."""
    kl = config.algorithm.kl
    coefficient = kl_coefficient_of(config, trajectory.environment, rules)
    if not coefficient or kl.placement != "reward" or trajectory.is_given:
        return np.zeros(trajectory.num_sampled_tokens)
    reference = estimates.reference
    assert reference is not None, "a cost of divergence needs a reference model"
    # The divergence is the behavior policy's, because that policy sampled the tokens.
    divergence = kl_estimate(
        torch.from_numpy(trajectory.behavior_logprobs.astype(np.float64)),
        torch.from_numpy(reference.logprobs.astype(np.float64)),
        kl.estimator,
    )
    costs: npt.NDArray[np.float64] = coefficient * divergence.numpy()
    return costs


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


def weighted(
    sequences: Sequence[TrainingSequence],
    batch: Batch,
    mini_batches: Sequence[Sequence[int]],
    config: Config,
) -> list[TrainingSequence]:
    """Returns the sequences with the loss weights of their mini-batches and environments.

    The weight of an environment is a factor of its tokens' losses alone: the numbers by which
    `loss_weights` divides count all tokens and sequences alike.
    """
    changed = list(sequences)
    rules = environment_rules(config)
    owners = batch.owners
    for members in mini_batches:
        weights = loss_weights(
            [int(np.count_nonzero(sequences[index].loss_mask)) for index in members],
            config.algorithm.aggregation,
            fixed_tokens=config.sampling.max_reply_tokens,
        )
        for index, weight in zip(members, weights, strict=True):
            environment = batch.trajectories[owners[index]].environment
            weight *= rules.get(environment, PLAIN).loss_weight
            if weight != changed[index].loss_weight:
                changed[index] = dataclasses.replace(changed[index], loss_weight=weight)
    return changed


def loss_weights(
    num_trained: Sequence[int], kind: AggregationKind, *, fixed_tokens: int
) -> list[float]:
    """Returns, for each sequence of one mini-batch, the weight of each of its tokens.

    `num_trained` has the number of trained tokens of every sequence of the mini-batch, over all
    ranks. The sum of weight * loss over all tokens, divided by all trained tokens N, is
    - for `token_mean` the mean over tokens, as in DAPO (arXiv:2503.14476). The weight is 1.
    - for `sequence_mean` the mean of the means of the S sequences with a trained token, as in GRPO
     (arXiv:2402.03300). The weight is N / (S * n) for a sequence with n trained tokens.
    - for `fixed` the sum over tokens / (number of sequences * `fixed_tokens`), as in Dr. GRPO
     (arXiv:2503.20783). The weight is N / (number of sequences * `fixed_tokens`), so the length of
     one reply does not affect the weight of another.
    Every rank knows the whole mini-batch, so the weights are the same in every layout, and the
    schedule divides by N in every case.
    """
    total = sum(num_trained)
    match kind:
        case "token_mean":
            return [1.0] * len(num_trained)
        case "sequence_mean":
            counted = sum(number > 0 for number in num_trained)
            return [total / (counted * number) if number else 0.0 for number in num_trained]
        case "fixed":
            return [total / (len(num_trained) * fixed_tokens)] * len(num_trained)


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
    values = list(_reported(weight, factors, mask & ~is_given, columns, where=where))
    if weight.is_own:
        faults = Column(str(weight), Reduce.FAULTS)
        values.append(TokenValues(faults, ~factors.weights.isfinite(), mask))
    losses = torch.zeros_like(factors.weights)
    for number, objective in enumerate(objectives):
        loss = function_of(objective, "loss")
        own_mask = tokens_of(number, mask, micro_batch.objectives)
        recorded = numbers.of_losses[number] if numbers.of_losses else ()
        known_tokens = dataclasses.replace(
            tokens, mask=own_mask, batch=RecordedSums(own_mask, recorded)
        )
        terms = token_terms(loss, known_tokens, where)
        losses = torch.where(own_mask, factors.weights * terms.losses, losses)
        values += _reported(loss, terms, own_mask, columns, where=where)
        if loss.is_own:
            faults = Column(str(loss), Reduce.FAULTS)
            values.append(TokenValues(faults, ~terms.losses.isfinite(), own_mask))
    kl = algorithm.kl
    if kl.coefficient and kl.placement == "loss":
        coefficients: float | Tensor = kl.coefficient
        if micro_batch.kl_coefficients is not None:
            coefficients = micro_batch.kl_coefficients
        divergence = _reference_divergence(policy_logprobs, top, micro_batch, kl)
        losses = losses + coefficients * factors.weights * divergence
    values += _by_teacher(policy_logprobs, micro_batch, columns, mask)
    if algorithm.entropy_coefficient:
        losses = losses - algorithm.entropy_coefficient * entropy
    losses = torch.where(mask, micro_batch.loss_weights * losses, 0.0)
    statistics = token_statistics(losses, factors.weights, tokens, values, columns)
    return TokenLoss(losses.sum(), mask.sum(), statistics, losses.detach())


def _reported(
    function: Function,
    results: TokenTerms | TokenWeights,
    mask: Tensor,
    columns: Sequence[Column],
    *,
    where: str,
) -> Iterator[TokenValues]:
    """Yields what a function reports of the tokens in `mask`; raises RunFailed for a new name."""
    if unknown := results.reports.keys() - {column.name for column in columns}:
        raise function.fault(f"it reports {min(unknown)}, but did not of three tokens", where)
    for name, report in results.reports.items():
        yield TokenValues(Column.of_report(name), report, mask)


def _by_teacher(
    policy_logprobs: Tensor, micro_batch: MicroBatch, columns: Sequence[Column], mask: Tensor
) -> Iterator[TokenValues]:
    """Yields the divergence from each teacher with a name, over its environments' tokens."""
    places = micro_batch.teachers
    reference = micro_batch.reference_logprobs
    if places is None or reference is None:
        return
    divergence = kl_estimate(policy_logprobs.detach(), reference, "k3")
    for place, column in enumerate(c for c in columns if is_of_teacher(c)):
        yield TokenValues(column, divergence, mask & (places == place))


def _reference_divergence(
    policy_logprobs: Tensor, top: Tensor | None, micro_batch: MicroBatch, kl: KlSection
) -> Tensor:
    """Returns the estimated divergence from the reference at each token, [tokens]."""
    if kl.estimator in TOP_K_ESTIMATORS:
        assert top is not None, "the divergence needs the reference's most likely tokens"
        assert micro_batch.top_logprobs is not None
        return top_k_divergence(top, micro_batch.top_logprobs, kl.estimator)
    reference = micro_batch.reference_logprobs
    assert reference is not None, "the divergence needs a reference's log-probabilities"
    return kl_estimate(policy_logprobs, reference, kl.estimator)


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
