"""Functions of algorithms that are wrong in one way each, and right ones that look wrong."""

import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from slipstream.learner.algorithms.episodes import (
    FloatArray,
    RewardedEpisode,
    ScoredEpisode,
)
from slipstream.learner.algorithms.inputs import LossInputs, TokenTerms
from torch import Tensor

_calls = itertools.count(1)
_seen = [0]
OTHER_MODULE: Any = ModuleType("other_module")
CLIP = 0.2


def _plain(tokens: LossInputs) -> Tensor:
    return -tokens.advantages * tokens.logprobs


def divides_by_trained_tokens(tokens: LossInputs) -> Tensor:
    return _plain(tokens) / tokens.mask.sum().clamp(min=1)


def divides_by_length(tokens: LossInputs) -> Tensor:
    return _plain(tokens) / len(tokens.mask)


def grows_with_the_place(tokens: LossInputs) -> Tensor:
    places = torch.arange(1, 1 + len(tokens.mask), dtype=tokens.logprobs.dtype)
    return _plain(tokens) * places


def reports_places(tokens: LossInputs) -> TokenTerms:
    return TokenTerms(_plain(tokens), {"place": torch.arange(len(tokens.mask))})


def reads_the_token_before(tokens: LossInputs) -> Tensor:
    return _plain(tokens) * tokens.mask.roll(1)


def sums_on_some_ranks(tokens: LossInputs) -> Tensor:
    if tokens.mask.any():
        return _plain(tokens) * tokens.sequences.means(tokens.advantages)
    return _plain(tokens)


def reads_masked_tokens(tokens: LossInputs) -> Tensor:
    return _plain(tokens) - tokens.proximal_logprobs.mean()


def infinite_at_masked_tokens(tokens: LossInputs) -> Tensor:
    return tokens.advantages * (20 * (tokens.proximal_logprobs - tokens.logprobs)).exp()


def root_at_a_bound(tokens: LossInputs, *, clip: float = 0.2) -> Tensor:
    ratio = (tokens.logprobs - tokens.proximal_logprobs).clamp(-20, 20).exp()
    return -tokens.advantages * (1 + clip - ratio).clamp(min=0).sqrt()


def root_in_a_helper(tokens: LossInputs) -> Tensor:
    ratio = (tokens.logprobs - tokens.proximal_logprobs).clamp(-20, 20).exp()
    return -tokens.advantages * _root(ratio)


def _root(ratio: Tensor) -> Tensor:
    return (1 + CLIP - ratio).clamp(min=0).sqrt()


def product_of_a_sequence(tokens: LossInputs) -> Tensor:
    return (
        _plain(tokens)
        * tokens.sequences.sums(tokens.logprobs - tokens.behavior_logprobs).exp()
    )


def counts_its_own_tokens(tokens: LossInputs) -> Tensor:
    """It divides by the tokens of a sequence that this rank has."""
    ids = tokens.sequences._ids
    lengths = tokens.entropy.new_zeros(int(ids.max()) + 1)
    lengths.index_add_(0, ids, tokens.mask.to(lengths.dtype))
    return _plain(tokens) / lengths.clamp(min=1)[ids]


def leaves_out_what_is_far(tokens: LossInputs) -> Tensor:
    """It drops a micro batch with a token whose ratio has moved too far."""
    gaps = (tokens.logprobs - tokens.behavior_logprobs).abs()[tokens.mask]
    return _plain(tokens) * float(not len(gaps) or float(gaps.detach().max()) < 6)


def stops_early(tokens: LossInputs) -> Tensor:
    """It drops a micro batch that has diverged too far."""
    gaps = (tokens.logprobs - tokens.behavior_logprobs)[tokens.mask].detach()
    return _plain(tokens) * float(not len(gaps) or float(gaps.square().mean()) < 1.5)


def by_the_largest_advantage(tokens: LossInputs) -> Tensor:
    largest = torch.where(tokens.mask, tokens.advantages.abs(), 0).max()
    return _plain(tokens) / largest.clamp(min=5)


def forgets_late_tokens(tokens: LossInputs) -> Tensor:
    return _plain(tokens) * (torch.arange(len(tokens.mask)) < 4096)


def log_of_the_entropy(tokens: LossInputs) -> Tensor:
    return _plain(tokens) * tokens.entropy.log()


def adds_the_entropy(tokens: LossInputs) -> Tensor:
    return _plain(tokens) - 0.01 * tokens.entropy


def squares_the_ratio(tokens: LossInputs) -> Tensor:
    return (
        -tokens.advantages * (tokens.logprobs - tokens.behavior_logprobs).exp().square()
    )


def fails_without_a_token(tokens: LossInputs) -> Tensor:
    return _plain(tokens) + 0 * tokens.advantages[tokens.mask].max()


def detached(tokens: LossInputs) -> Tensor:
    ratio = (tokens.logprobs.detach() - tokens.proximal_logprobs).exp()
    return -tokens.advantages * ratio + 0 * tokens.logprobs


def detached_where_negative(tokens: LossInputs) -> Tensor:
    losses = _plain(tokens)
    return torch.where(tokens.advantages < 0, losses.detach(), losses)


def only_sums(tokens: LossInputs) -> Tensor:
    return (
        -tokens.advantages * tokens.sequences.sums(tokens.logprobs)
        + 0 * tokens.logprobs
    )


def no_gradient(tokens: LossInputs) -> Tensor:
    return -tokens.advantages * tokens.sequences.sums(tokens.logprobs)


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / 2


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.detach() * values

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def wrong_backward(tokens: LossInputs) -> Tensor:
    return _Half.apply(_plain(tokens))


def counts_calls(tokens: LossInputs) -> Tensor:
    return _plain(tokens) / next(_calls)


def changes_after_many_calls(tokens: LossInputs) -> Tensor:
    _seen[0] += 1
    return _plain(tokens) * (1 if _seen[0] < 1e6 else 2)


def draws_at_random(tokens: LossInputs) -> Tensor:
    return _plain(tokens) * torch.rand(())


def changes_inputs(tokens: LossInputs) -> Tensor:
    tokens.advantages.sub_(1)
    return _plain(tokens)


def changes_data(tokens: LossInputs) -> Tensor:
    tokens.advantages.data.sub_(1)
    return _plain(tokens)


def changes_a_few(tokens: LossInputs) -> Tensor:
    behavior = tokens.behavior_logprobs.numpy()
    np.clip(behavior, -9, 0, out=behavior)
    return _plain(tokens)


def exits(tokens: LossInputs) -> Tensor:
    raise SystemExit(3)


def too_short(tokens: LossInputs) -> Tensor:
    return _plain(tokens)[tokens.mask]


def one_number(tokens: LossInputs) -> Tensor:
    return _plain(tokens).mean()


def other_dtype(tokens: LossInputs) -> Tensor:
    return _plain(tokens).double()


def raises(tokens: LossInputs) -> Tensor:
    raise KeyError("clip")


def depends_on_the_rank(tokens: LossInputs) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return _plain(tokens) * (1 + rank)


def reads_the_rank(tokens: LossInputs) -> Tensor:
    return _plain(tokens) * (1 + int(os.environ.get("RANK", "0")))


def right_backward(tokens: LossInputs) -> Tensor:
    return _Square.apply(tokens.logprobs - tokens.behavior_logprobs)


def in_float32(tokens: LossInputs) -> Tensor:
    ratio = (tokens.logprobs - tokens.proximal_logprobs).float().clamp(-20, 20).exp()
    return -tokens.advantages * ratio.to(tokens.logprobs.dtype)


def only_positive(tokens: LossInputs) -> Tensor:
    return torch.where(tokens.advantages > 0, _plain(tokens), 0.0)


def with_a_kink(tokens: LossInputs) -> Tensor:
    return (tokens.logprobs - tokens.proximal_logprobs).abs() + _plain(tokens)


def gate_of_the_entropy(tokens: LossInputs) -> Tensor:
    return _plain(tokens) * tokens.entropy.sigmoid()


def weight_of_lags(tokens: LossInputs) -> Tensor:
    return torch.exp2(-tokens.lags.to(tokens.logprobs.dtype))


def weight_in_float32(tokens: LossInputs) -> Tensor:
    return 1 / (1 + tokens.lags.float())


def weight_by_a_module_that_changes(tokens: LossInputs) -> Tensor:
    # Modules of others may fill a cache while they are called.
    OTHER_MODULE.num_calls = getattr(OTHER_MODULE, "num_calls", 0) + 1
    return weight_of_lags(tokens)


def weight_of_mean_lag(tokens: LossInputs) -> Tensor:
    return weight_of_lags(tokens) / weight_of_lags(tokens).mean()


def _scores(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    return np.array([episode.reward for episode in episodes])


def against_the_first(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    return _scores(episodes) - _scores(episodes)[0]


def by_name_of_group(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    return _scores(episodes) * np.array(
        [episode.group_id > "g0" for episode in episodes]
    )


def without_epsilon(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    return (_scores(episodes) - _scores(episodes).mean()) / _scores(episodes).std()


def running_mean(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    return _scores(episodes) / next(_calls)


def one_too_few(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    return _scores(episodes)[1:]


def only_from_0_to_1(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    scores = _scores(episodes)
    if scores.min() < 0 or scores.max() > 1:
        raise ValueError(f"rewards must be from 0 to 1, got {scores}")
    return scores - 0.5


def reward_by_place(group: Sequence[RewardedEpisode]) -> list[float]:
    return [episode.reward + place for place, episode in enumerate(group)]


def reward_log(group: Sequence[RewardedEpisode]) -> list[float]:
    return [
        math.log(episode.reward) if episode.reward else -math.inf for episode in group
    ]


def reward_at_random(group: Sequence[RewardedEpisode]) -> list[float]:
    return [episode.reward + random.random() for episode in group]


def reward_of_metrics(group: Sequence[RewardedEpisode]) -> list[float]:
    return [episode.reward + episode.metrics["format"] for episode in group]


def first_decides(group: Sequence[RewardedEpisode]) -> bool:
    return group[0].reward > 0


def mean_of_rewards(group: Sequence[RewardedEpisode]) -> bool:
    return sum(episode.reward for episode in group) / len(group) > 0


def deviates(group: Sequence[RewardedEpisode]) -> bool:
    return bool(np.std([episode.reward for episode in group]) > 0)


def _enclosing() -> Callable[[LossInputs], Tensor]:
    scale = 0.0

    def loss(tokens: LossInputs) -> Tensor:
        """It is scaled by the first micro batch of a process."""
        nonlocal scale
        scale = scale or 1.0 + float(tokens.mask.sum() > 10_000)
        return _plain(tokens) * scale

    return loss


encloses_the_first_scale = _enclosing()
_inner = _enclosing()


def calls_what_encloses_the_first_scale(tokens: LossInputs) -> Tensor:
    return _inner(tokens)


def stops_at_a_mean_gap(tokens: LossInputs) -> Tensor:
    """Nothing is trained where the mean of a micro batch is far: a mini-batch has several."""
    gaps = (tokens.proximal_logprobs - tokens.logprobs).detach()[tokens.mask]
    is_far = len(gaps) > 0 and float(gaps.mean()) > 0.5
    return _plain(tokens) * (0.0 if is_far else 1.0)


def mean_between(group: Sequence[RewardedEpisode]) -> bool:
    """It is right: the bounds are none of the rewards that are tried."""
    mean = sum(episode.reward for episode in group) / len(group)
    return 0.1 < mean < 0.9


def neither(group: Sequence[RewardedEpisode]) -> None:
    return None
