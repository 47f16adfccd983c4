"""Training sequences of a batch: their rewards and advantages, and which episodes are left out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core.models.vision import load_processor
from slipstream.core.settings.algorithm_section import AggregationKind
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray, ReferenceLogprobs, Trajectory
from slipstream.learner.algorithms.episodes import (
    FloatArray,
    ScoredEpisode,
    TokenAdvantages,
    Turn,
)
from slipstream.learner.algorithms.functions import shaped_rewards, side_of, token_advantages
from slipstream.learner.algorithms.losses import kl_estimate
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import (
    NumpyArray,
    TokenEstimates,
    TrainingSequence,
    token_lags,
)

# The values that functions report of the episodes, by name.
Reports: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True)
class ModelEstimates:
    """Estimates of the reference model and the critic for one trajectory, [sampled tokens] each."""

    # At the sampling temperature.
    reference: ReferenceLogprobs | None = None
    # The critic's estimate before each token was sampled.
    values: LogprobArray | None = None


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
    known = estimates if estimates is not None else [ModelEstimates()] * len(trajectories)
    found = _advantages(batch, config, known, {} if reports is None else reports)
    has_images = any(trajectory.images for trajectory in trajectories)
    sequences = TrainingSequence.of_trajectories(
        trajectories,
        [_estimates(t, found.get(i), known[i]) for i, t in enumerate(trajectories)],
        step=batch.step,
        processor=load_processor(config.model.path) if has_images else None,
        with_experts=config.algorithm.router_replay != "off",
    )
    for index, owner in enumerate(batch.owners):
        if owner not in found:
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
    return {name: float(found.mean()) for name, found in values.items() if found.size}


def weighted(
    sequences: Sequence[TrainingSequence],
    mini_batches: Sequence[Sequence[int]],
    config: Config,
) -> list[TrainingSequence]:
    """Returns the sequences with the loss weights that follow from their mini-batches."""
    changed = list(sequences)
    for members in mini_batches:
        weights = loss_weights(
            [int(np.count_nonzero(sequences[index].loss_mask)) for index in members],
            config.algorithm.aggregation,
            fixed_tokens=config.sampling.max_reply_tokens,
        )
        for index, weight in zip(members, weights, strict=True):
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


def _advantages(
    batch: Batch, config: Config, known: Sequence[ModelEstimates], reports: Reports
) -> dict[int, TokenAdvantages]:
    """Returns the advantages of each episode that is not left out, by its index in the batch."""
    shaped = shaped_rewards(batch.trajectories, config)
    episodes: list[ScoredEpisode] = []
    # The trajectory of each of the `episodes`, and the places of its tokens among those sampled.
    owners: list[tuple[int, npt.NDArray[np.int64]]] = []
    for index, (trajectory, sides) in enumerate(zip(batch.trajectories, shaped, strict=True)):
        if not sides:
            continue
        by_side = {side.side: float(side.reward) for side in sides}
        turns, told = _turns_of(trajectory), trajectory.token_rewards
        own_rewards = {side_of(branch): branch.reward for branch in trajectory.branches}
        costs, kl = np.zeros(trajectory.num_sampled_tokens), config.algorithm.kl
        if kl.coefficient and kl.placement == "reward" and not trajectory.is_given:
            reference = known[index].reference
            assert reference is not None, "a cost of divergence needs a reference model"
            # The divergence is the behavior policy's, because that policy sampled the tokens.
            divergence = kl_estimate(
                torch.from_numpy(trajectory.behavior_logprobs.astype(np.float64)),
                torch.from_numpy(reference.logprobs.astype(np.float64)),
                kl.estimator,
            )
            costs = kl.coefficient * divergence.numpy()
        lags = token_lags([trajectory], batch.step)
        said = known[index].values
        values = None if said is None else said.astype(np.float64)
        # A side is the branches of an episode that share a reward; estimators take them as one
        # episode, which is compared with the same side of its group's episodes. An episode has one
        # side, unless its agent gave a named branch a reward of its own.
        found_sides: dict[str, list[npt.NDArray[np.int64]]] = {}
        for part in trajectory.sequences():
            own = np.arange(part.sampled.start, part.sampled.stop)
            found_sides.setdefault(side_of(part.branch), []).append(own)
        for side, parts in found_sides.items():
            places, group_id = np.concatenate(parts), trajectory.group_id
            ends = itertools.pairwise([0, *itertools.accumulate(map(len, parts))])
            owners.append((index, places))
            earned = None if told is None else told[places].astype(np.float64)
            if earned is not None:
                own_reward = own_rewards.get(side)
                before = trajectory.reward if own_reward is None else own_reward
                # What the reward function changed is earned at the end.
                earned[-1:] += by_side[side] - before
            episodes.append(
                ScoredEpisode(
                    # A group's id has no space.
                    f"{group_id} {side}" if side else group_id,
                    by_side[side],
                    costs[places],
                    None if values is None else values[places],
                    tuple(itertools.starmap(slice, ends)),
                    trajectory.metrics,
                    lags[places],
                    earned,
                    tuple(turns[side]),
                )
            )
    estimated: list[TokenAdvantages] = []
    if episodes:
        where = f"step {batch.step + 1}"
        estimated = token_advantages(config.algorithm, episodes, where=where)
    reported = [side.reports for sides in shaped for side in sides]
    reported += [one.reports for one in estimated]
    for name, value in (item for each in reported for item in each.items()):
        reports.setdefault(name, []).append(float(value))
    # The sides of each episode are joined.
    found: dict[int, TokenAdvantages] = {}
    for (index, places), one in zip(owners, estimated, strict=True):
        if index not in found:
            zeros = np.zeros(batch.trajectories[index].num_sampled_tokens)
            found[index] = TokenAdvantages(zeros, None if one.returns is None else zeros.copy())
        whole = found[index]
        whole.advantages[places] = one.advantages
        if whole.returns is not None and one.returns is not None:
            whole.returns[places] = one.returns
    return found


def _estimates(
    trajectory: Trajectory, found: TokenAdvantages | None, known: ModelEstimates
) -> TokenEstimates[NumpyArray]:
    """Returns one trajectory's estimates; advantages are 0 if it is left out (`found` is None)."""
    zeros = np.zeros(trajectory.num_sampled_tokens)
    worth = found if found is not None else TokenAdvantages(zeros, zeros)
    advantages, reference = worth.advantages, known.reference
    if trajectory.branches:
        parts = trajectory.sequences()
        advantages = np.concatenate([p.branch.share * advantages[p.sampled] for p in parts])
    top = reference if reference is not None and reference.top_k else None
    return TokenEstimates(
        advantages,
        reference_logprobs=None if reference is None else reference.logprobs,
        values=known.values,
        # Only a critic needs returns.
        returns=None if known.values is None else worth.returns,
        top_ids=None if top is None else top.top_ids,
        top_logprobs=None if top is None else top.top_logprobs,
    )


def _turns_of(trajectory: Trajectory) -> dict[str, list[Turn]]:
    """Returns the turns of each side that sampled tokens; spans count the tokens of the side."""
    turns: dict[str, list[Turn]] = {}
    for part in trajectory.sequences():
        own = turns.setdefault(side_of(part.branch), [])
        begin = end = part.tokens.start
        for is_reply, length in zip(
            itertools.cycle((False, True)), trajectory.run_lengths[part.runs]
        ):
            start, end = end, end + length
            if is_reply and length:
                first = own[-1].span.stop if own else 0
                read, said = trajectory.token_ids[begin:start], trajectory.token_ids[start:end]
                own.append(Turn(slice(first, first + length), read, said))
                begin = end
    return turns
