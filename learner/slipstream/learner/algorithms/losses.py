"""Losses and importance weights of single tokens, before aggregation, and how they are called.

The built-in ones are pure functions. `token_terms` and `token_weights` call them and a user's own.

**Losses.** The ratio is the token's probability by the trained policy divided by its probability by
the anchor. The argument `ratio` chooses the anchor: "proximal" is the policy before the step,
"behavior" the policy that sampled the token. A is the advantage.

**Weights** are factors and masks without a gradient. Here the ratio is a token's probability by the
proximal policy divided by its probability by the behavior policy. The loss's ratio then corrects
from the proximal to the trained policy: decoupled PPO (arXiv:2110.00641), as in AReaL
(arXiv:2505.24298). A loss without a ratio needs `to="present"`, which puts the trained policy in
place of the proximal policy. All three functions can mask tokens:
- `token_band` masks a token whose ratio is outside the band: IcePop (arXiv:2510.18855);
- `sequence_band` masks a sequence whose ratios have a geometric mean outside the band.

Log ratios, and their sums over sequences, are clamped to -20 .. 20 before exp.
"""

from dataclasses import replace
from typing import Literal, TypeVar

import torch
from slipstream.core.settings.algorithm_section import AlgorithmSection, KlEstimator
from slipstream.core.settings.function_table import Anchor, Band
from slipstream.learner.algorithms.columns import Column, Reduce
from slipstream.learner.algorithms.functions import Function, function_of
from slipstream.learner.algorithms.inputs import (
    BatchSums,
    LossInputs,
    SequenceSums,
    TokenTerms,
    TokenWeights,
)
from torch import Tensor

Result = TypeVar("Result", TokenTerms, TokenWeights)
MAX_LOG_RATIO = 20.0
# Lower bound of the probability of all other tokens: float32 cannot resolve much smaller ones.
MIN_REST = 1e-6


def safe_ratio(log_ratio: Tensor) -> Tensor:
    """Returns exp(`log_ratio`); clamps `log_ratio` to -20 .. 20 so that products stay finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator
) -> Tensor:
    """Estimates KL(policy || reference) at each token that the policy sampled, [tokens].

    With r = log reference - log policy, limited to -20 .. 20:
    - k1 = -r is unbiased, but the mean of its gradient is 0 for every policy. So it suits a cost in
     the reward, but is useless in the loss.
    - k2 = r^2 / 2 is slightly biased, but the mean of its gradient is the gradient of
     KL(policy || reference), which is correct for the loss.
    - k3 = exp(r) - 1 - r is unbiased, never negative and has a small variance. The mean of its
     gradient is the gradient of KL(reference || policy), which agrees near the reference. GRPO
     (arXiv:2402.03300) uses k3.
    Raises ValueError for a top-k estimator. Source: J. Schulman, "Approximating KL divergence"
    (2020); for the gradients "Rethinking KL regularization in RLHF" (arXiv:2510.01555).
    """
    log_ratio = (reference_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            # exp(r) - 1 would round the small difference away for a small r.
            return log_ratio.expm1() - log_ratio
        case "forward_top_k" | "reverse_top_k":
            raise ValueError(f"{estimator} is no estimate at a sampled token")


def top_k_divergence(
    policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator
) -> Tensor:
    """Returns the divergence at each position over the reference's most likely tokens, [tokens].

    Both arguments are [tokens, top k]: log-probabilities of the same tokens in the whole
    vocabulary. All other tokens count as one token, whose probability is at least `MIN_REST`. So
    the value is at most the divergence over the vocabulary, and 0 where the policy and the
    reference agree. With p the policy and q the reference:
    - forward_top_k = KL(q || p), the sum of q * (log q - log p);
    - reverse_top_k = KL(p || q), the sum of p * (log p - log q).
    Log ratios are clamped to -20 .. 20.
    """
    policy = _with_rest(policy_logprobs)
    reference = _with_rest(reference_logprobs)
    log_ratio = (reference - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "forward_top_k":
        return (reference.exp() * log_ratio).sum(-1)
    assert estimator == "reverse_top_k", estimator
    return -(policy.exp() * log_ratio).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Appends the log-probability of all other tokens together, as one more column."""
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat([logprobs, rest.log()], dim=-1)


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


Target = Literal["proximal", "present"]


def none(
    tokens: LossInputs,
    *,
    token_band: Band | None = None,
    sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns 1 for each token inside the bands, else 0."""
    log_ratios = _log_ratios(tokens, to)
    return _masked(tokens, log_ratios, torch.ones_like(log_ratios), {}, token_band, sequence_band)


def token(
    tokens: LossInputs,
    *,
    cap: float = 2.0,
    token_band: Band | None = None,
    sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns min(ratio, cap) for each token inside the bands, else 0.

    This is truncated importance sampling (IMPALA, arXiv:1802.01561).
    """
    log_ratios = _log_ratios(tokens, to)
    capped = _capped(safe_ratio(log_ratios), cap)
    return _masked(tokens, log_ratios, *capped, token_band, sequence_band)


def sequence(
    tokens: LossInputs,
    *,
    cap: float = 2.0,
    token_band: Band | None = None,
    sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns min(product of the sequence's ratios, cap) for each token inside the bands, else 0.

    Without bands only the cap adds bias.
    """
    log_ratios = _log_ratios(tokens, to)
    capped = _capped(safe_ratio(tokens.sequences.sums(log_ratios)), cap)
    return _masked(tokens, log_ratios, *capped, token_band, sequence_band)


def split(
    tokens: LossInputs,
    *,
    engine_cap: float = 2.0,
    engine_token_band: Band | None = None,
    engine_sequence_band: Band | None = None,
    staleness_cap: float = 2.0,
    staleness_token_band: Band | None = None,
    staleness_sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns min(engine, cap) * min(staleness, cap) for each token inside the bands, else 0.

    The two factors of a token's ratio meet at the learner with the weights that sampled the token:
    engine = learner / sampling policy, at that version, and staleness = learner now / learner at
    that version. Their product is the ratio of the weight `token`. Source: arXiv:2605.12070.
    """
    versions = tokens.version_logprobs
    if versions is None:
        raise ValueError("there are no log-probabilities by the versions that sampled the tokens")
    engine = _factor(
        tokens,
        versions - tokens.behavior_logprobs,
        "engine",
        cap=engine_cap,
        token_band=engine_token_band,
        sequence_band=engine_sequence_band,
    )
    staleness = _factor(
        tokens,
        _log_ratios(replace(tokens, behavior_logprobs=versions), to),
        "staleness",
        cap=staleness_cap,
        token_band=staleness_token_band,
        sequence_band=staleness_sequence_band,
    )
    weights = engine.weights * staleness.weights
    reports = {**engine.reports, **staleness.reports}
    reports["importance_capped_fraction"] = (
        reports["engine_capped_fraction"] | reports["staleness_capped_fraction"]
    )
    return TokenWeights(weights, reports)


def _factor(
    tokens: LossInputs,
    log_ratios: Tensor,
    name: str,
    *,
    cap: float,
    token_band: Band | None,
    sequence_band: Band | None,
) -> TokenWeights:
    """Returns min(ratio, cap) for each token inside the bands, else 0, with reports of `name`."""
    ratios, reports = _capped(safe_ratio(log_ratios), cap)
    factor = _masked(tokens, log_ratios, ratios, reports, token_band, sequence_band)
    gaps = log_ratios.abs()
    reports_of_factor = {f"{name}_gap_mean": gaps, f"{name}_gap_max": gaps}
    for report, values in factor.reports.items():
        reports_of_factor[f"{name}_{report.removeprefix('importance_')}"] = values
    return TokenWeights(factor.weights, reports_of_factor)


def _log_ratios(tokens: LossInputs, to: Target) -> Tensor:
    if to == "proximal":
        return tokens.proximal_logprobs - tokens.behavior_logprobs
    # Given tokens have the ratio 1: no policy sampled them, so there is nothing to correct.
    log_ratios = tokens.logprobs.detach() - tokens.behavior_logprobs
    return torch.where(tokens.is_given, 0.0, log_ratios)


def _capped(ratios: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    is_capped = ratios > cap
    reports = {"importance_ratio_max": ratios, "importance_capped_fraction": is_capped}
    return torch.where(is_capped, cap, ratios), reports


def _masked(
    tokens: LossInputs,
    log_ratios: Tensor,
    weights: Tensor,
    reports: dict[str, Tensor],
    token_band: Band | None,
    sequence_band: Band | None,
) -> TokenWeights:
    if token_band is not None:
        is_outside = _is_outside(safe_ratio(log_ratios), token_band)
        reports["masked_token_fraction"] = is_outside
        weights = torch.where(is_outside, 0.0, weights)
    if sequence_band is not None:
        means = safe_ratio(tokens.sequences.means(log_ratios))
        is_outside = _is_outside(means, sequence_band)
        reports["masked_sequence_fraction"] = is_outside
        weights = torch.where(is_outside, 0.0, weights)
    return TokenWeights(weights, reports)


def _is_outside(ratios: Tensor, band: Band) -> Tensor:
    return (ratios < band[0]) | (ratios > band[1])


def token_terms(function: Function, tokens: LossInputs, where: str) -> TokenTerms:
    """Returns the losses of a micro batch; raises RunFailed for a faulty function."""
    terms = _called(function, tokens, where, TokenTerms)
    if tokens.logprobs.requires_grad and not terms.losses.requires_grad:
        raise function.fault("the losses have no gradient", where)
    return terms


@torch.no_grad()
def token_weights(function: Function, tokens: LossInputs, where: str) -> TokenWeights:
    """Returns the weights of a micro batch; raises RunFailed for a faulty function."""
    attached = _called(function, tokens, where, TokenWeights)
    return replace(attached, weights=attached.weights.detach())


def step_columns(
    algorithm: AlgorithmSection,
    *others: AlgorithmSection,
    has_reference: bool,
) -> list[Column]:
    """Returns the columns of all reports and of the faults of users' own functions, sorted.

    `others` are algorithms whose losses some environments have in place of the run's. Each function
    is called with three tokens to learn its reports. Raises RunFailed if a function is faulty.
    """
    has_versions = algorithm.reads_versions
    tokens = _three_tokens(has_reference=has_reference, has_versions=has_versions)
    where = "three tokens"
    weight = function_of(algorithm, "weight")
    functions = [weight]
    names = {*token_weights(weight, tokens, where).reports}
    for objective in (algorithm, *others):
        loss = function_of(objective, "loss")
        functions.append(loss)
        names.update(token_terms(loss, tokens, where).reports)
    columns = {Column.of_report(name) for name in names}
    for function in functions:
        if function.is_own:
            columns.add(Column(str(function), Reduce.FAULTS))
    return sorted(columns, key=lambda column: column.name)


def asks_for_batch(
    algorithm: AlgorithmSection,
    *others: AlgorithmSection,
    has_reference: bool,
) -> bool:
    """Whether a loss or the weight asks for numbers of the whole mini-batch.

    `others` are as in `step_columns`. Each function is called with three tokens. Raises RunFailed
    if a function is faulty.
    """
    has_versions = algorithm.reads_versions
    weight_tokens = _three_tokens(has_reference=has_reference, has_versions=has_versions)
    token_weights(function_of(algorithm, "weight"), weight_tokens, "three tokens")
    num_asked = len(weight_tokens.batch.asked)
    for objective in (algorithm, *others):
        loss_tokens = _three_tokens(has_reference=has_reference, has_versions=has_versions)
        token_terms(function_of(objective, "loss"), loss_tokens, "three tokens")
        num_asked += len(loss_tokens.batch.asked)
    return num_asked > 0


def reads_behavior(function: Function, *, has_reference: bool, has_versions: bool = False) -> bool:
    """Whether a loss or weight gives other values if the sampling policy is another one.

    The function is called with three tokens, whose behavior log-probabilities are shifted a little
    and by much: one that ignores them there is taken to ignore them.
    """
    tokens = _three_tokens(has_reference=has_reference, has_versions=has_versions)
    call = token_weights if function.kind == "weight" else token_terms
    values: list[Tensor] = []
    for shift in (0.0, -0.05, -2.0, 2.0):
        logprobs = tokens.behavior_logprobs + shift
        shifted = replace(tokens, behavior_logprobs=logprobs)
        result = call(function, shifted, "three tokens")
        numbers = result.losses if isinstance(result, TokenTerms) else result.weights
        values.append(numbers.detach())
    return any(not torch.equal(values[0], shifted_values) for shifted_values in values[1:])


def _three_tokens(*, has_reference: bool, has_versions: bool = False) -> LossInputs:
    nothing = torch.zeros(3, dtype=torch.int32)
    logprobs = torch.full((3,), -1.0)
    mask = torch.ones(3, dtype=torch.bool)
    places = torch.tensor([0, 0, 1])
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        proximal_logprobs=logprobs,
        behavior_logprobs=logprobs - 0.1,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        mask=mask,
        is_given=~mask,
        lags=nothing,
        versions=nothing,
        reference_logprobs=logprobs - 0.2 if has_reference else None,
        entropy=torch.ones(3),
        sequences=SequenceSums(places, mask, 2),
        batch=BatchSums(mask),
        version_logprobs=logprobs - 0.05 if has_versions else None,
    )


def _called(function: Function, tokens: LossInputs, where: str, kind: type[Result]) -> Result:
    """Calls a function and returns its result as a `kind`; a tensor alone has no reports."""
    inputs = {name: value for name, value in vars(tokens).items() if isinstance(value, Tensor)}
    versions = [value._version for value in inputs.values()]
    with function.named(where):
        result = function.call(tokens)
    for (name, value), version in zip(inputs.items(), versions, strict=True):
        if value._version != version:
            raise function.fault(f"it changed its input {name} in place", where)
    if isinstance(result, Tensor):
        result = kind(result)
    if not isinstance(result, kind):
        raise function.fault(
            f"the result is neither a tensor nor {kind.__name__}: {result!r}", where
        )
    function.check_reports(result.reports, where)
    values = result.losses if isinstance(result, TokenTerms) else result.weights
    shape = list(tokens.logprobs.shape)
    dtype = tokens.logprobs.dtype
    tensors = {"result": values}
    for name, report in result.reports.items():
        tensors[f"report {name}"] = report
    for name, tensor in tensors.items():
        is_tensor = isinstance(tensor, Tensor)
        own_shape = list(tensor.shape) if is_tensor else type(tensor).__name__
        if own_shape != shape:
            raise function.fault(f"the {name} is {own_shape}, not {shape}", where)
    # Proofs compute in float64; a function that returns float32 there does so in a run too.
    if values.dtype not in (dtype, torch.float32):
        raise function.fault(f"the result is {values.dtype}, not {dtype}", where)
    return result
