"""docs/algorithms.md as it reads: rewards, advantages and losses of one conversation after another.

It shares no code with the learner. All numbers are float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FunctionKind
from slipstream.core.types import (
    Branch,
    ReferenceLogprobs,
    RoutedExperts,
    Status,
    Trajectory,
    VersionSpan,
)
from torch import Tensor

NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass
class Conversation:
    """One branch of an episode, or all of it; tensors have one row for each sampled token."""

    # The branch as an episode by itself.
    episode: Trajectory
    branch: Branch
    algorithm: AlgorithmSection
    # The reward of the episode, or of the branch's name.
    reward: float = 0.0
    # The policy before the step, and the reference model.
    before: Tensor = NOTHING
    # For each token the policy that sampled it, as the learner computes it.
    versions: Tensor = NOTHING
    reference: Tensor = NOTHING
    likely_ids: Tensor = NOTHING
    likely: Tensor = NOTHING
    advantages: Tensor = field(default_factory=lambda: NOTHING)

    @property
    def counts(self) -> bool:
        """Whether truncated episodes are kept."""
        return not (
            self.algorithm.leave_out_truncated
            and self.episode.status is Status.TRUNCATED
        )

    @property
    def num_trained(self) -> int:
        return self.episode.num_sampled_tokens if self.counts else 0

    @property
    def behavior(self) -> Tensor:
        return torch.from_numpy(self.episode.behavior_logprobs.astype(np.float64))

    @property
    def targets(self) -> Tensor:
        return torch.from_numpy(self.episode.token_ids.astype(np.int64))[self.places]

    @property
    def places(self) -> Tensor:
        """The places of the sampled tokens in the conversation."""
        return torch.from_numpy(self.episode.sampled_mask()).nonzero()[:, 0]

    @property
    def costs(self) -> Tensor:
        kl = self.algorithm.kl
        if not kl.coefficient or kl.placement != "reward" or self.episode.is_given:
            return torch.zeros(self.episode.num_sampled_tokens, dtype=torch.float64)
        return kl.coefficient * divergence(self.behavior, self.reference, kl.estimator)

    @property
    def side(self) -> tuple[str, str, str]:
        """The group, the name with a reward of its own or "", and the episode."""
        name = "" if self.branch.reward is None else self.branch.name
        return self.episode.group_id, name, self.episode.trajectory_id


def kept_sets(trajectory: Trajectory) -> list[list[int]]:
    """The tokens that each sampled token was drawn from; none for one drawn from all."""
    kept_tokens = KeptTokens.unpacked(
        trajectory.kept_tokens, trajectory.num_sampled_tokens
    )
    ends = np.cumsum(kept_tokens.counts)
    return [ids.tolist() for ids in np.split(kept_tokens.ids, ends)[:-1]]


def sets_between(trajectory: Trajectory, start: int, end: int) -> bytes:
    """Those of the sampled tokens from `start` up to `end`."""
    return KeptTokens.of_sets(kept_sets(trajectory)[start:end]).packed()


def spans_between(
    trajectory: Trajectory, start: int, end: int
) -> tuple[VersionSpan, ...]:
    """The versions of the sampled tokens from `start` up to `end`."""
    spans: list[VersionSpan] = []
    first = 0
    for span in trajectory.version_spans:
        length = min(first + span.length, end) - max(first, start)
        if length > 0:
            spans.append(VersionSpan(length, span.version))
        first += span.length
    return tuple(spans)


def conversations(trajectory: Trajectory) -> list[tuple[Trajectory, Branch]]:
    """Each branch as an episode by itself."""
    if not trajectory.branches:
        return [(trajectory, Branch(len(trajectory.run_lengths)))]
    conversations = []
    run = 0
    token = 0
    sampled = 0
    for branch in trajectory.branches:
        lengths = trajectory.run_lengths[run : run + branch.num_runs]
        end = token + sum(lengths)
        last = sampled + sum(lengths[1::2])
        routed = trajectory.routed_experts
        single = dataclasses.replace(
            trajectory,
            token_ids=trajectory.token_ids[token:end],
            run_lengths=lengths,
            behavior_logprobs=trajectory.behavior_logprobs[sampled:last],
            routed_experts=routed
            and RoutedExperts(routed.expert_ids[token:end], routed.num_experts),
            reference=trajectory.reference
            and ReferenceLogprobs(
                trajectory.reference.logprobs[sampled:last],
                trajectory.reference.top_ids[sampled:last],
                trajectory.reference.top_logprobs[sampled:last],
            ),
            branches=(),
            kept_tokens=sets_between(trajectory, sampled, last),
            version_spans=spans_between(trajectory, sampled, last),
        )
        conversations.append((single, branch))
        run = run + branch.num_runs
        token = end
        sampled = last
    return conversations


def conversation_of(
    whole: Trajectory, one: Trajectory, branch: Branch, config: Config
) -> Conversation:
    """One of the `conversations` of the episode `whole`, with its settings and its reward."""
    algorithm = config.algorithm
    reward = whole.reward if branch.reward is None else branch.reward
    limit = config.sampling.max_reply_tokens
    limit = min(limit, whole.max_reply_tokens or limit)
    penalty = REWARDS[algorithm.reward]
    reward -= penalty(
        max(whole.run_lengths[1::2], default=0), limit, **algorithm.reward_args
    )
    entry = own_table(config, whole.environment)
    if entry:
        own_functions = ("advantage", "loss", "loss_args")
        changes: dict[str, Any] = {
            name: entry[name] for name in own_functions if name in entry
        }
        if "kl_coefficient" in entry:
            coefficient = {"coefficient": entry["kl_coefficient"]}
            changes["kl"] = algorithm.kl.model_copy(update=coefficient)
        algorithm = algorithm.model_copy(update=changes)
    conversation = Conversation(one, branch, algorithm, reward)
    if one.reference is not None:
        conversation.reference = torch.from_numpy(
            one.reference.logprobs.astype(np.float64)
        )
        conversation.likely_ids = torch.from_numpy(
            one.reference.top_ids.astype(np.int64)
        )
        conversation.likely = torch.from_numpy(
            one.reference.top_logprobs.astype(np.float64)
        )
    return conversation


def own_table(config: Config, environment: str) -> dict[str, Any]:
    """What the settings say of one environment; nothing if they do not name it."""
    table: Any = config.extensions.get("by_environment", {"environments": {}})
    entry: dict[str, Any] = table["environments"].get(environment, {})
    return entry


def no_penalty(longest: int, limit: int) -> float:
    return 0.0


def overlong(longest: int, limit: int, *, penalty: float, cache_tokens: int) -> float:
    """The share of the penalty rises over the last tokens before the limit."""
    rising = min(cache_tokens, limit)
    over = (longest - limit + rising) / rising
    return penalty * min(max(over, 0.0), 1.0)


def every_group(rewards: Sequence[float]) -> bool:
    return True


def unequal_rewards(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) > 1e-9


def give_advantages(conversations: Sequence[Conversation]) -> None:
    """Sets the advantages of all that count, those of each estimator by themselves."""
    for name in {conversation.algorithm.advantage for conversation in conversations}:
        _give_advantages([c for c in conversations if c.algorithm.advantage == name])


def _give_advantages(conversations: Sequence[Conversation]) -> None:
    counted = [conversation for conversation in conversations if conversation.counts]
    scores: dict[tuple[str, str, str], float] = {}
    for conversation in counted:
        scores[conversation.side] = scores.get(
            conversation.side, conversation.reward
        ) - float(conversation.costs.sum())
    for conversation in counted:
        conversation.advantages = _advantages(
            conversation, conversation.algorithm.advantage, scores
        )
    if counted and counted[0].algorithm.advantage in WHITENED:
        every = torch.cat([conversation.advantages for conversation in counted])
        for conversation in counted:
            centred = conversation.advantages - every.mean()
            conversation.advantages = centred / (every.std(correction=0) + 1e-6)
    for conversation in counted:
        conversation.advantages = conversation.advantages * conversation.branch.share


def _advantages(
    one: Conversation, kind: str, scores: dict[tuple[str, str, str], float]
) -> Tensor:
    if kind == "reinforce_pp":
        rewards = -one.costs
        rewards[-1] += one.reward
        return rewards.flip(0).cumsum(0).flip(0)
    group = np.array(
        [score for side, score in scores.items() if side[:2] == one.side[:2]]
    )
    value = SCORED[kind](scores[one.side], group)
    return torch.full_like(one.costs, value)


@dataclass
class PlainEpisode:
    """An episode of one branch, by numbers; arrays have one number for each sampled token."""

    group: str
    reward: float
    costs: np.ndarray
    values: np.ndarray
    # The first token of each reply, and the one behind its last.
    turns: Sequence[tuple[int, int]]
    # The reward that each token earned; None: the last one earned all.
    earned: np.ndarray | None = None

    @property
    def score(self) -> float:
        return self.reward - float(self.costs.sum())

    @property
    def token_rewards(self) -> np.ndarray:
        rewards: np.ndarray = -self.costs
        if self.earned is not None:
            rewards += self.earned
        else:
            rewards[-1] += self.reward
        return rewards

    def returns(self, gamma: float) -> np.ndarray:
        """The token's own and all later rewards; gamma for each turn between."""
        rewards = self.token_rewards
        results = np.zeros(len(rewards))
        for turn, (start, stop) in enumerate(self.turns):
            for token in range(start, stop):
                results[token] = rewards[token:stop].sum()
                for more, (first, last) in enumerate(self.turns[turn + 1 :], 1):
                    results[token] += gamma**more * rewards[first:last].sum()
        return results


def _whitened(values: list[np.ndarray]) -> list[np.ndarray]:
    every = np.concatenate(values)
    return [(array - every.mean()) / (every.std() + 1e-6) for array in values]


def _by_score(name: str) -> Advantages:
    def estimator(episodes: Sequence[PlainEpisode]) -> list[np.ndarray]:
        values: list[np.ndarray] = []
        for episode in episodes:
            group = np.array(
                [other.score for other in episodes if other.group == episode.group]
            )
            value = SCORED[name](episode.score, group)
            values.append(np.full(len(episode.costs), value))
        return _whitened(values) if name in WHITENED else values

    return estimator


def _reinforce_pp(episodes: Sequence[PlainEpisode]) -> list[np.ndarray]:
    return _whitened([episode.returns(1.0) for episode in episodes])


def _return_to_go(
    episodes: Sequence[PlainEpisode], *, gamma: float, normalize: bool
) -> list[np.ndarray]:
    results: list[np.ndarray] = []
    for episode in episodes:
        values = episode.returns(gamma)
        for turn, (start, stop) in enumerate(episode.turns):
            group_returns = [
                member.returns(gamma)[member.turns[turn][0]]
                for member in episodes
                if member.group == episode.group and len(member.turns) > turn
            ]
            values[start:stop] -= np.mean(group_returns)
            if normalize:
                values[start:stop] /= np.std(group_returns) + 1e-6
        results.append(values)
    return results


def _estimates(
    rewards: np.ndarray, values: np.ndarray, *, gamma: float, lam: float
) -> list[float]:
    """Sum over k of (gamma lam)^k d(t + k), where d is the reward and what the values changed."""
    after = np.append(values[1:], 0.0)
    changes = rewards + gamma * after - values
    return [
        sum((gamma * lam) ** k * change for k, change in enumerate(changes[step:]))
        for step in range(len(changes))
    ]


def _gae(
    episodes: Sequence[PlainEpisode], *, gamma: float, lam: float, normalize: bool
) -> list[np.ndarray]:
    results = [
        np.array(
            _estimates(episode.token_rewards, episode.values, gamma=gamma, lam=lam)
        )
        for episode in episodes
    ]
    return _whitened(results) if normalize else results


def _turn_gae(
    episodes: Sequence[PlainEpisode], *, gamma: float, lam: float, normalize: bool
) -> list[np.ndarray]:
    results: list[np.ndarray] = []
    for episode in episodes:
        tokens = episode.token_rewards
        rewards = np.array([tokens[start:stop].sum() for start, stop in episode.turns])
        values = np.array([episode.values[start] for start, _ in episode.turns])
        worths = _estimates(rewards, values, gamma=gamma, lam=lam)
        lengths = [stop - start for start, stop in episode.turns]
        results.append(np.repeat(worths, lengths))
    return _whitened(results) if normalize else results


def aggregated(losses: Sequence[Tensor], config: Config, *, number: int) -> Tensor:
    """The loss of a mini-batch of `number` sequences; `losses`: of the tokens of trained ones."""
    match config.algorithm.aggregation:
        case "token_mean":
            return torch.cat(list(losses)).mean()
        case "sequence_mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
        case "fixed":
            return torch.cat(list(losses)).sum() / (
                number * config.sampling.max_reply_tokens
            )


def token_losses(one: Conversation, vocabulary: Tensor) -> Tensor:
    """`vocabulary`: the policy's log-probabilities of all tokens in place of each sampled one."""
    algorithm = one.algorithm
    policy = vocabulary.gather(1, one.targets[:, None])[:, 0]
    corrected = policy.detach() if algorithm.loss == "reinforce" else one.before
    behavior = corrected if one.episode.is_given else one.behavior
    anchor = behavior if algorithm.loss_args.get("ratio") == "behavior" else one.before
    versions = corrected if one.episode.is_given else one.versions
    weight = weight_of(algorithm, behavior, versions, corrected)
    loss = weight * _objective(algorithm, policy, policy - anchor, one.advantages)
    kl = algorithm.kl
    if kl.coefficient and kl.placement == "loss":
        if kl.estimator.endswith("top_k"):
            distance = _likely_divergence(vocabulary, one, kl.estimator)
        else:
            distance = divergence(policy, one.reference, kl.estimator)
        loss = loss + kl.coefficient * weight * distance
    entropy = -(vocabulary.exp() * vocabulary).sum(-1)
    return loss - algorithm.entropy_coefficient * entropy


def weight_of(
    algorithm: AlgorithmSection,
    behavior: Tensor,
    versions: Tensor,
    corrected: Tensor,
) -> Tensor:
    """The weights of a conversation's tokens; `versions` is read where the weight splits."""
    formula = WEIGHTS[algorithm.weight]
    arguments = algorithm.weight_args
    if algorithm.reads_versions:
        return formula(versions - behavior, corrected - versions, **arguments)
    return formula(corrected - behavior, **arguments)


def band_weight(
    log_ratio: Tensor,
    *,
    token_band: Sequence[float] = (0.0, math.inf),
    sequence_band: Sequence[float] = (0.0, math.inf),
    to: str = "proximal",
) -> Tensor:
    """1 inside both bands, of the token and of the sequence's geometric mean."""
    ratio = _exp(log_ratio)
    is_inside = (ratio >= token_band[0]) & (ratio <= token_band[1])
    mean = float(_exp(log_ratio.mean()))
    return is_inside.to(ratio.dtype) * (sequence_band[0] <= mean <= sequence_band[1])


def token_weight(log_ratio: Tensor, *, cap: float, **bands: Any) -> Tensor:
    return band_weight(log_ratio, **bands) * _exp(log_ratio).clamp(max=cap)


def sequence_weight(log_ratio: Tensor, *, cap: float, **bands: Any) -> Tensor:
    return band_weight(log_ratio, **bands) * _exp(log_ratio.sum()).clamp(max=cap)


def split_weight(
    engine: Tensor,
    staleness: Tensor,
    *,
    engine_cap: float,
    staleness_cap: float,
    to: str = "proximal",
    **bands: Any,
) -> Tensor:
    """The product of two token weights: of what the engine changed, and of what steps changed."""
    factors: list[Tensor] = []
    for name, log_ratio, cap in (
        ("engine", engine, engine_cap),
        ("staleness", staleness, staleness_cap),
    ):
        own_bands = {
            band.removeprefix(f"{name}_"): value
            for band, value in bands.items()
            if band.startswith(name)
        }
        factors.append(token_weight(log_ratio, cap=cap, **own_bands))
    return factors[0] * factors[1]


def _objective(
    algorithm: AlgorithmSection, policy: Tensor, log_ratio: Tensor, advantage: Tensor
) -> Tensor:
    if algorithm.loss == TOP_ENTROPY:
        return ppo(
            policy,
            log_ratio,
            advantage,
            clip_low=0.2,
            clip_high=0.28,
        )
    formula = OBJECTIVES[algorithm.loss]
    arguments = {name: v for name, v in algorithm.loss_args.items() if name != "ratio"}
    return formula(policy, log_ratio, advantage, **arguments)


def has_high_entropy(
    predictions: Mapping[int, Tensor], share: float
) -> dict[int, Tensor]:
    """Whether each token, [tokens] by sequence, is among `share` of all with the most entropy."""
    entropies = {}
    for place, vocabulary in predictions.items():
        entropies[place] = -(vocabulary.exp() * vocabulary).sum(-1).detach()
    every_entropy = torch.cat(list(entropies.values()))
    number = math.ceil(share * len(every_entropy))
    bound = every_entropy.sort(descending=True).values[number - 1]
    return {place: entropy >= bound for place, entropy in entropies.items()}


def reinforce(policy: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * policy


def cispo(
    policy: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    factor = _exp(log_ratio).detach().clamp(1 - clip_low, 1 + clip_high)
    return -factor * advantage * policy


def sapo(
    policy: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Tensor:
    tau = torch.where(advantage > 0, tau_positive, tau_negative)
    return -torch.sigmoid(tau * (_exp(log_ratio) - 1)) * 4 / tau * advantage


def ppo(
    policy: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    ratio = _exp(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if dual_clip is not None:
        largest_loss = -dual_clip * advantage
        loss = torch.where(advantage < 0, torch.minimum(loss, largest_loss), loss)
    return loss


def gspo(
    policy: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """PPO's, where the value is the sequence's mean and the gradient that of the token."""
    mean = log_ratio.mean().detach() + log_ratio - log_ratio.detach()
    return ppo(policy, mean, advantage, clip_low=clip_low, clip_high=clip_high)


def divergence(policy: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """The estimate of the policy's divergence from a reference at tokens that it sampled."""
    log_ratio = (reference - policy).clamp(-20, 20)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio**2 / 2
    return log_ratio.exp() - 1 - log_ratio


def _likely_divergence(vocabulary: Tensor, one: Conversation, estimator: str) -> Tensor:
    """The divergence over the reference's likely tokens and all others as one."""
    is_likely = torch.zeros(vocabulary.shape, dtype=torch.bool).scatter(
        1, one.likely_ids, True
    )
    policy = vocabulary.exp()
    rest = policy.masked_fill(is_likely, 0.0).sum(-1, keepdim=True)
    policy = torch.cat([policy.gather(1, one.likely_ids), rest], dim=1)
    likely = one.likely.exp()
    probabilities = torch.cat([likely, 1 - likely.sum(-1, keepdim=True)], dim=1)
    if estimator == "forward_top_k":
        return torch.nn.functional.kl_div(
            policy.log(), probabilities, reduction="none"
        ).sum(-1)
    return torch.nn.functional.kl_div(
        probabilities.log(), policy, reduction="none"
    ).sum(-1)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()


# The loss of a file, of which only a share of all tokens of a mini-batch has any.
TOP_ENTROPY = "deploy.algorithms.top_entropy:loss"
Advantages: TypeAlias = Callable[..., list[np.ndarray]]
# The advantage of all tokens of an episode, by its score and those of its group.
SCORED: Mapping[str, Callable[[float, np.ndarray], float]] = {
    "grpo": lambda score, group: (score - group.mean()) / (group.std() + 1e-6),
    "dr_grpo": lambda score, group: score - group.mean(),
    "rloo": lambda score, group: (
        score - (group.sum() - score) / (len(group) - 1) if len(group) > 1 else 0.0
    ),
    "reinforce_pp_baseline": lambda score, group: score - group.mean(),
    "score": lambda score, group: score,
    "none": lambda score, group: 0.0,
}
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
ADVANTAGES: Mapping[str, Advantages] = {
    **{name: _by_score(name) for name in SCORED},
    "reinforce_pp": _reinforce_pp,
    "return_to_go": _return_to_go,
    "gae": _gae,
    "turn_gae": _turn_gae,
}
OBJECTIVES: Mapping[str, Callable[..., Tensor]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}
WEIGHTS: Mapping[str, Callable[..., Tensor]] = {
    "none": band_weight,
    "token": token_weight,
    "sequence": sequence_weight,
    "split": split_weight,
}
REWARDS: Mapping[str, Callable[..., float]] = {"none": no_penalty, "overlong": overlong}
FILTERS: Mapping[str, Callable[[Sequence[float]], bool]] = {
    "none": every_group,
    "unequal_rewards": unequal_rewards,
}
# The formula of each built-in function, by its kind and name.
FORMULAS: Mapping[FunctionKind, Mapping[str, Callable[..., Any]]] = {
    "loss": OBJECTIVES,
    "advantage": ADVANTAGES,
    "weight": WEIGHTS,
    "reward": REWARDS,
    "filter": FILTERS,
}
