"""Training sequences of a batch: rewards, advantages, and episodes left out of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slipstream.core.models.vision.pixels import ImageProcessor
from slipstream.core.models.vision.processors import load_processor
from slipstream.core.reference_logprobs import ReferenceLogprobs
from slipstream.core.rewards import is_counted, shaped_rewards
from slipstream.core.settings.algorithm_section import AdvantageKind, AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray, Trajectory
from slipstream.learner.trainer.algorithms.advantages import (
    Episode,
    FloatArray,
    TokenAdvantages,
    shuffled,
    token_advantages,
)
from slipstream.learner.trainer.algorithms.aggregation import loss_weights
from slipstream.learner.trainer.algorithms.kl import kl_estimate
from slipstream.learner.trainer.algorithms.sides import Side, joined, sides_of
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.token_fields import NumpyArray, TokenEstimates
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence


@dataclass(frozen=True)
class ModelEstimates:
    """Estimates of the reference model and the critic for one trajectory, [sampled tokens] each."""

    # At the sampling temperature.
    reference: ReferenceLogprobs | None = None
    # The critic's estimate before each token was sampled.
    values: LogprobArray | None = None


NO_ESTIMATES = ModelEstimates()


def training_sequences(
    batch: Batch, config: Config, estimates: Sequence[ModelEstimates] | None = None
) -> list[TrainingSequence]:
    """Returns the sequences of the batch, in order; the same on every rank.

    `estimates` has one entry for each trajectory; None without other models. A trajectory that
    overlong filtering removes has no trained token and is in no statistic of the advantages. The
    advantages of a branch are those of its side of the episode times its share.
    """
    known = estimates if estimates is not None else [NO_ESTIMATES] * len(batch.trajectories)
    places = [config.algorithms.place(t.environment) for t in batch.trajectories]
    own = [config.algorithms.distinct[place] for place in places]
    found = _advantages(batch, config, known, own)
    token_estimates = _token_estimates(batch.trajectories, found, known)
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories, token_estimates, step=batch.step, processor=_processor(batch, config)
    )
    if config.algorithm.router_replay != "off":
        sequences = _with_experts(sequences, batch.trajectories)
    return [
        _marked(sequence, places[owner]) if owner in found else _without_loss(sequence)
        for owner, sequence in zip(batch.owners, sequences, strict=True)
    ]


def _processor(batch: Batch, config: Config) -> ImageProcessor | None:
    has_images = any(trajectory.images for trajectory in batch.trajectories)
    return load_processor(config.model.path) if has_images else None


def weighted(
    sequences: Sequence[TrainingSequence],
    mini_batches: Sequence[Sequence[int]],
    config: Config,
    environments: Sequence[str] | None = None,
) -> list[TrainingSequence]:
    """Returns the sequences with the loss weights of their mini-batches and environments.

    `environments` names that of each sequence; None: no environment has a weight of its own.
    """
    algorithm, algorithms = config.algorithm, config.algorithms
    changed = list(sequences)
    for members in mini_batches:
        weights = loss_weights(
            [int(np.count_nonzero(sequences[index].loss_mask)) for index in members],
            algorithm.aggregation,
            fixed_tokens=algorithm.fixed_tokens or config.sampling.max_reply_tokens,
        )
        for index, weight in zip(members, weights, strict=True):
            if environments is not None:
                weight *= algorithms.loss_weight(environments[index])
            if weight != changed[index].loss_weight:
                changed[index] = dataclasses.replace(changed[index], loss_weight=weight)
    return changed


def _advantages(
    batch: Batch,
    config: Config,
    known: Sequence[ModelEstimates],
    own: Sequence[AlgorithmSection],
) -> dict[int, TokenAdvantages]:
    """Returns the advantages of each episode that counts, by its place in the batch.

    `own` has the algorithm of each.
    """
    limit = config.sampling.max_reply_tokens
    shaped = [
        shaped_rewards(t, a, limit=limit) for t, a in zip(batch.trajectories, own, strict=True)
    ]
    rewards = np.array([one for sides in shaped for one in sides.values()], dtype=np.float64)
    if config.debug.shuffle_rewards:
        rewards = shuffled(rewards, seed=config.run.seed, step=batch.step)
    left = iter(rewards.tolist())
    episodes: list[Episode] = []
    owners: list[tuple[int, Side]] = []
    for index, (trajectory, sides) in enumerate(zip(batch.trajectories, shaped, strict=True)):
        by_side = {side: next(left) for side in sides}
        if not is_counted(trajectory, own[index]):
            continue
        costs = _token_costs(trajectory, known[index], own[index])
        values = _float64(known[index].values)
        for side in sides_of(trajectory):
            owners.append((index, side))
            episodes.append(side.episode(trajectory.group_id, by_side[side.name], costs, values))
    found: dict[int, list[tuple[Side, TokenAdvantages]]] = {}
    estimated = _by_kind(episodes, [own[index] for index, _ in owners])
    for (index, side), one in zip(owners, estimated, strict=True):
        found.setdefault(index, []).append((side, one))
    return {
        index: joined(sides, batch.trajectories[index].num_sampled_tokens)
        for index, sides in found.items()
    }


def _by_kind(
    episodes: Sequence[Episode], algorithms: Sequence[AlgorithmSection]
) -> list[TokenAdvantages]:
    """Returns the advantages of each; those of one kind share the statistics of a batch."""
    by_kind: dict[AdvantageKind, list[int]] = {}
    for place, algorithm in enumerate(algorithms):
        by_kind.setdefault(algorithm.advantage, []).append(place)
    found: dict[int, TokenAdvantages] = {}
    for members in by_kind.values():
        chosen = [episodes[place] for place in members]
        found |= zip(members, token_advantages(chosen, algorithms[members[0]]), strict=True)
    return [found[place] for place in range(len(episodes))]


def _token_costs(
    trajectory: Trajectory, estimates: ModelEstimates, algorithm: AlgorithmSection
) -> FloatArray:
    kl = algorithm.kl
    if not kl.coefficient or kl.placement != "reward" or trajectory.is_given:
        return np.zeros(trajectory.num_sampled_tokens)
    assert estimates.reference is not None, "a cost of divergence needs a reference model"
    # The cost is the behavior policy's divergence, because that policy sampled the tokens.
    divergence = kl_estimate(
        torch.from_numpy(trajectory.behavior_logprobs.astype(np.float64)),
        torch.from_numpy(estimates.reference.logprobs.astype(np.float64)),
        kl.estimator,
    )
    return kl.coefficient * divergence.numpy()


def _token_estimates(
    trajectories: Sequence[Trajectory],
    found: Mapping[int, TokenAdvantages],
    known: Sequence[ModelEstimates],
) -> list[TokenEstimates[NumpyArray]]:
    """Returns estimates for each trajectory; episodes not in `found` do not count and get 0."""
    worths = [
        found[index] if index in found else _worthless(trajectory)
        for index, trajectory in enumerate(trajectories)
    ]
    estimates: list[TokenEstimates[NumpyArray]] = []
    for trajectory, worth, one in zip(trajectories, worths, known, strict=True):
        reference = one.reference
        top = reference if reference is not None and reference.top_k else None
        estimates.append(
            TokenEstimates(
                _shared(trajectory, worth.advantages),
                reference_logprobs=None if reference is None else reference.logprobs,
                values=one.values,
                # Only a critic needs returns.
                returns=None if one.values is None else worth.returns,
                top_ids=None if top is None else top.top_ids,
                top_logprobs=None if top is None else top.top_logprobs,
            )
        )
    return estimates


def _shared(trajectory: Trajectory, advantages: FloatArray) -> FloatArray:
    """Returns the advantages of an episode's tokens times the share of their branch."""
    if not trajectory.branches:
        return advantages
    parts = trajectory.sequences()
    return np.concatenate([part.branch.share * advantages[part.sampled] for part in parts])


def _worthless(trajectory: Trajectory) -> TokenAdvantages:
    zeros = np.zeros(trajectory.num_sampled_tokens)
    return TokenAdvantages(zeros, zeros)


def _with_experts(
    sequences: Sequence[TrainingSequence], trajectories: Sequence[Trajectory]
) -> list[TrainingSequence]:
    experts = [
        None if (routed := trajectory.routed_experts) is None else routed.expert_ids[part.tokens]
        for trajectory in trajectories
        for part in trajectory.sequences()
    ]
    return [
        sequence if known is None else dataclasses.replace(sequence, expert_ids=known)
        for sequence, known in zip(sequences, experts, strict=True)
    ]


def _marked(sequence: TrainingSequence, algorithm: int) -> TrainingSequence:
    return dataclasses.replace(sequence, algorithm=algorithm) if algorithm else sequence


def _without_loss(sequence: TrainingSequence) -> TrainingSequence:
    return dataclasses.replace(sequence, loss_mask=np.zeros_like(sequence.loss_mask))


def _float64(values: LogprobArray | None) -> FloatArray | None:
    return None if values is None else values.astype(np.float64)
