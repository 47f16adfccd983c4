"""The built-in losses of single tokens, before aggregation: pure functions.

The ratio is the token's probability by the trained policy divided by its probability by the anchor.
The argument `ratio` chooses the anchor: "proximal" is the policy before the step, "behavior" the
policy that sampled the token. Log ratios are clamped to -20 .. 20 before exp. A is the advantage.
"""

import torch
from slipstream.core.settings.algorithm_functions import Anchor
from slipstream.learner.algorithms.inputs import LossInputs, TokenTerms
from slipstream.learner.algorithms.kl import safe_ratio
from torch import Tensor


def ppo(
    tokens: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: Anchor = "proximal",
    dual_clip: float | None = None,
) -> TokenTerms:
    """Returns -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    With `dual_clip` the loss for A < 0 is at most -dual_clip * A. A clipped token has no gradient.
    Source: PPO eq. 7 (arXiv:1707.06347); a wider upper range is DAPO's clip-higher
    (arXiv:2503.14476); the bound for A < 0 is dual-clip PPO's (arXiv:1912.09729).
    """
    ratios = safe_ratio(tokens.logprobs - _anchor(tokens, ratio))
    return _clipped(ratios, tokens.advantages, clip_low, clip_high, dual_clip)


def gspo(
    tokens: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Anchor = "proximal"
) -> TokenTerms:
    """Returns PPO's loss with the geometric mean of the sequence's ratios as each token's ratio.

    This ratio has the value of the sequence, but the gradient of the token: GSPO-token
    (arXiv:2507.18071, eq. 13). If all tokens of a sequence have the same advantage, the mean over
    its tokens has the value and gradient of GSPO's sequence loss (eq. 5), and ranks that share the
    sequence need not exchange gradients.
    """
    policy = tokens.logprobs
    log_ratio = tokens.sequences.means(policy - _anchor(tokens, ratio))
    ratios = safe_ratio(log_ratio + policy - policy.detach())
    return _clipped(ratios, tokens.advantages, clip_low, clip_high, None)


def cispo(
    tokens: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Anchor = "proximal"
) -> TokenTerms:
    """Returns -clip(ratio, 1 - clip_low, 1 + clip_high) * A * log policy.

    The clipped ratio is a weight without a gradient, so every token keeps its gradient. A
    `clip_low` of 1 sets no lower bound, as in the paper. Source: CISPO, MiniMax-M1
    (arXiv:2506.13585, eq. 4 and 5).
    """
    ratios = safe_ratio(tokens.logprobs - _anchor(tokens, ratio)).detach()
    weights = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -weights * tokens.advantages * tokens.logprobs
    return TokenTerms(losses, _clip_marks(ratios < 1 - clip_low, ratios > 1 + clip_high))


def sapo(
    tokens: LossInputs,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    ratio: Anchor = "proximal",
) -> Tensor:
    """Returns -gate(ratio) * A with gate(x) = sigmoid(tau * (x - 1)) * 4 / tau.

    The slope of the gate is 1 at ratio 1 and decreases smoothly on both sides. tau is
    `tau_positive` for A > 0, else `tau_negative`. Source: SAPO (arXiv:2511.20347).
    """
    ratios = safe_ratio(tokens.logprobs - _anchor(tokens, ratio))
    taus = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    return -torch.sigmoid(taus * (ratios - 1)) * (4 / taus) * tokens.advantages


def reinforce(tokens: LossInputs) -> Tensor:
    """Returns -A * log policy.

    Source: R. J. Williams, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning" (1992); for language models arXiv:2402.14740.
    """
    return -tokens.advantages * tokens.logprobs


def _anchor(tokens: LossInputs, ratio: Anchor) -> Tensor:
    return tokens.behavior_logprobs if ratio == "behavior" else tokens.proximal_logprobs


def _clipped(
    ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenTerms:
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratios * advantages, clipped * advantages)
    is_clipped = clipped * advantages < ratios * advantages
    marks = _clip_marks(is_clipped & (ratios < 1), is_clipped & (ratios > 1))
    if dual_clip is not None:
        bound = dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(is_dual_clipped, bound, surrogate)
        marks["dual_clip_fraction"] = is_dual_clipped
    return TokenTerms(-surrogate, marks)


def _clip_marks(is_low: Tensor, is_high: Tensor) -> dict[str, Tensor]:
    return {
        "clip_fraction": is_low | is_high,
        "clip_fraction_low": is_low,
        "clip_fraction_high": is_high,
    }
