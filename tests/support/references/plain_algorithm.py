"""docs/algorithms.md as it reads: rewards, advantages and losses of one conversation after another.

It shares no code with the learner. All numbers are float64.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.types import Branch, ReferenceLogprobs, RoutedExperts, Status, Trajectory
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
    reference: Tensor = NOTHING
    likely_ids: Tensor = NOTHING
    likely: Tensor = NOTHING
    advantages: Tensor = field(default_factory=lambda: NOTHING)

    @property
    def counts(self) -> bool:
        """Whether truncated episodes are kept."""
        return not (self.algorithm.leave_out_truncated and self.episode.status is Status.TRUNCATED)

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


def conversations(trajectory: Trajectory) -> list[tuple[Trajectory, Branch]]:
    """Each branch as an episode by itself."""
    if not trajectory.branches:
        return [(trajectory, Branch(len(trajectory.run_lengths)))]
    found, run, token, sampled = [], 0, 0, 0
    for branch in trajectory.branches:
        lengths = trajectory.run_lengths[run : run + branch.num_runs]
        end, last = token + sum(lengths), sampled + sum(lengths[1::2])
        routed = trajectory.routed_experts
        one = dataclasses.replace(
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
        )
        found.append((one, branch))
        run, token, sampled = run + branch.num_runs, end, last
    return found


def conversation_of(
    whole: Trajectory, one: Trajectory, branch: Branch, config: Config
) -> Conversation:
    """One of the `conversations` of the episode `whole`, with its settings and its reward."""
    algorithm = config.algorithm
    reward = whole.reward if branch.reward is None else branch.reward
    arguments, limit = algorithm.reward_args, config.sampling.max_reply_tokens
    if algorithm.reward == "overlong":
        limit = min(limit, whole.max_reply_tokens or limit)
        rising = min(arguments["cache_tokens"], limit)
        over = (max(whole.run_lengths[1::2]) - limit + rising) / rising
        reward -= arguments["penalty"] * min(max(over, 0.0), 1.0)
    found = Conversation(one, branch, algorithm, reward)
    if one.reference is not None:
        found.reference = torch.from_numpy(one.reference.logprobs.astype(np.float64))
        found.likely_ids = torch.from_numpy(one.reference.top_ids.astype(np.int64))
        found.likely = torch.from_numpy(one.reference.top_logprobs.astype(np.float64))
    return found


def give_advantages(conversations: Sequence[Conversation]) -> None:
    """Sets the advantages of all that count."""
    counted = [one for one in conversations if one.counts]
    scores: dict[tuple[str, str, str], float] = {}
    for one in counted:
        scores[one.side] = scores.get(one.side, one.reward) - float(one.costs.sum())
    for one in counted:
        one.advantages = _advantages(one, one.algorithm.advantage, scores)
    if counted and counted[0].algorithm.advantage.startswith("reinforce_pp"):
        every = torch.cat([one.advantages for one in counted])
        for one in counted:
            one.advantages = (one.advantages - every.mean()) / (every.std(correction=0) + 1e-6)
    for one in counted:
        one.advantages = one.advantages * one.branch.share


def _advantages(one: Conversation, kind: str, scores: dict[tuple[str, str, str], float]) -> Tensor:
    if kind == "reinforce_pp":
        rewards = -one.costs
        rewards[-1] += one.reward
        return rewards.flip(0).cumsum(0).flip(0)
    group = np.array([score for side, score in scores.items() if side[:2] == one.side[:2]])
    score = scores[one.side]
    others = (group.sum() - score) / max(1, len(group) - 1)
    value = {
        "grpo": (score - group.mean()) / (group.std() + 1e-6),
        "dr_grpo": score - group.mean(),
        "reinforce_pp_baseline": score - group.mean(),
        "rloo": score - others if len(group) > 1 else 0.0,
        "score": score,
        "none": 0.0,
    }[kind]
    return torch.full_like(one.costs, value)


def aggregated(losses: Sequence[Tensor], config: Config, *, number: int) -> Tensor:
    """The loss of a mini-batch of `number` sequences; `losses`: of the tokens of trained ones."""
    match config.algorithm.aggregation:
        case "token_mean":
            return torch.cat(list(losses)).mean()
        case "sequence_mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
        case "fixed":
            return torch.cat(list(losses)).sum() / (number * config.sampling.max_reply_tokens)


def token_losses(one: Conversation, vocabulary: Tensor) -> Tensor:
    """`vocabulary`: the policy's log-probabilities of all tokens in place of each sampled one."""
    algorithm = one.algorithm
    policy = vocabulary.gather(1, one.targets[:, None])[:, 0]
    corrected = policy.detach() if algorithm.loss == "reinforce" else one.before
    behavior = corrected if one.episode.is_given else one.behavior
    anchor = behavior if algorithm.loss_args.get("ratio") == "behavior" else one.before
    weight = _weight(algorithm, corrected - behavior)
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


def _weight(algorithm: AlgorithmSection, log_ratio: Tensor) -> Tensor:
    arguments, ratio = algorithm.weight_args, _exp(log_ratio)
    weight = torch.ones_like(ratio)
    if algorithm.weight == "token":
        weight = ratio.clamp(max=arguments["cap"])
    elif algorithm.weight == "sequence":
        weight = weight * _exp(log_ratio.sum()).clamp(max=arguments["cap"])
    if "token_band" in arguments:
        low, high = arguments["token_band"]
        weight = weight * ((ratio >= low) & (ratio <= high))
    if "sequence_band" in arguments:
        low, high = arguments["sequence_band"]
        weight = weight * (low <= float(_exp(log_ratio.mean())) <= high)
    return weight


def _objective(
    algorithm: AlgorithmSection, policy: Tensor, log_ratio: Tensor, advantage: Tensor
) -> Tensor:
    arguments = algorithm.loss_args
    low, high = 1 - arguments.get("clip_low", 0.0), 1 + arguments.get("clip_high", 0.0)
    match algorithm.loss:
        case "reinforce":
            return -advantage * policy
        case "cispo":
            return -_exp(log_ratio).detach().clamp(low, high) * advantage * policy
        case "sapo":
            positive, negative = arguments["tau_positive"], arguments["tau_negative"]
            tau = torch.where(advantage > 0, positive, negative)
            return -torch.sigmoid(tau * (_exp(log_ratio) - 1)) * 4 / tau * advantage
        case "gspo":
            # The value is the sequence's mean, the gradient that of the token.
            log_ratio = log_ratio.mean().detach() + log_ratio - log_ratio.detach()
    ratio = _exp(log_ratio)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if "dual_clip" in arguments:
        most = -arguments["dual_clip"] * advantage
        loss = torch.where(advantage < 0, torch.minimum(loss, most), loss)
    return loss


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
    is_likely = torch.zeros(vocabulary.shape, dtype=torch.bool).scatter(1, one.likely_ids, True)
    policy = vocabulary.exp()
    rest = policy.masked_fill(is_likely, 0.0).sum(-1, keepdim=True)
    policy = torch.cat([policy.gather(1, one.likely_ids), rest], dim=1)
    likely = one.likely.exp()
    known = torch.cat([likely, 1 - likely.sum(-1, keepdim=True)], dim=1)
    if estimator == "forward_top_k":
        return torch.nn.functional.kl_div(policy.log(), known, reduction="none").sum(-1)
    return torch.nn.functional.kl_div(known.log(), policy, reduction="none").sum(-1)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()
