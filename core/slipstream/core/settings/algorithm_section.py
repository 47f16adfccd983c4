"""The settings of the algorithm, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic_core import PydanticUndefined
from slipstream.core.settings.section import Positive, Section

AdvantageKind: TypeAlias = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "score", "none"
]
LossKind: TypeAlias = Literal["ppo", "gspo", "cispo", "sapo", "reinforce"]
AggregationKind: TypeAlias = Literal["token_mean", "sequence_mean", "fixed"]
DecayKind: TypeAlias = Literal["none", "linear", "cosine", "sqrt"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "forward_top_k", "reverse_top_k"]
WeightKind: TypeAlias = Literal["none", "token", "sequence"]

TOP_K_ESTIMATORS: tuple[KlEstimator, ...] = ("forward_top_k", "reverse_top_k")

Temperature = Annotated[float, Field(gt=0)]
Band = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]

# Settings that only these losses read; with other losses they must keep their defaults.
READ_BY: dict[str, tuple[LossKind, ...]] = {
    "clip_low": ("ppo", "gspo", "cispo"),
    "clip_high": ("ppo", "gspo", "cispo"),
    "dual_clip": ("ppo",),
    "sapo_tau": ("sapo",),
    "ratio": ("ppo", "gspo", "cispo", "sapo"),
}

# Advantages that only compare the episodes of a group: equal rewards make them all 0.
GROUP_ADVANTAGES: tuple[AdvantageKind, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


class GaeSection(Section):
    """Generalised advantage estimation; read with `advantage = "gae"`."""

    # Discount of each sampled token.
    gamma: float = Field(1.0, gt=0, le=1)
    # 0: one-step differences of the values; 1: returns minus values.
    lam: float = Field(0.95, ge=0, le=1)
    # Scale the advantages of a batch to mean 0 and deviation 1 over its tokens.
    normalize: bool = True


class CorrectionSection(Section):
    """The correction for tokens that another policy sampled: older weights, other kernels.

    The importance ratio is that of the learner's policy to the behavior policy. Weights and masks
    carry no gradient and may be combined.
    """

    # Truncated importance sampling. token: the weight of a token is its own ratio; sequence: the
    # product of the ratios of its sequence; none: 1.
    weight: WeightKind = "token"
    # Upper bound of the weight; larger weights are cut to it.
    cap: float = Field(2.0, gt=0)
    # IcePop: tokens with a ratio outside the band leave the loss. None: all stay.
    token_band: Band | None = None
    # Sequences whose geometric mean of the ratios is outside the band leave the loss. None: all
    # stay.
    sequence_band: Band | None = None

    @property
    def acts(self) -> bool:
        """Whether it changes a weight or masks a token."""
        has_bands = self.token_band is not None or self.sequence_band is not None
        return self.weight != "none" or has_bands

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionSection:
        for name in ("token_band", "sequence_band"):
            band: Band | None = getattr(self, name)
            if band is not None and not band[0] < band[1]:
                raise ValueError(f"{name} must be [low, high] with low < high, got {list(band)}")
        return self


class KlSection(Section):
    """A penalty on the divergence from the reference model."""

    # Factor of the penalty; 0: no penalty.
    coefficient: float = Field(0.0, ge=0)
    # loss: a term beside the policy's loss; reward: subtracted from the reward of each token.
    placement: Literal["loss", "reward"] = "loss"
    # Estimator of the divergence at a sampled token. In the loss k1 does not move the policy.
    # forward_top_k, reverse_top_k: the divergence over the reference's most likely tokens, the rest
    # as one; they need the loss and reference.top_k.
    estimator: KlEstimator = "k3"

    @property
    def uses_top_k(self) -> bool:
        """Whether the penalty reads the reference's most likely tokens."""
        return self.coefficient > 0 and self.estimator in TOP_K_ESTIMATORS


class OverlongSection(Section):
    """The treatment of replies that reached a limit of their length."""

    # Truncated episodes leave the loss and the statistics of their group.
    filter: bool = False
    # Subtracted from the reward of an episode whose longest reply has `max_reply_tokens`; 0: no
    # penalty.
    penalty: float = Field(0.0, ge=0)
    # Number of last tokens over which the penalty rises linearly. Required with a penalty.
    cache_tokens: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _has_cache(self) -> OverlongSection:
        if self.penalty > 0 and self.cache_tokens == 0:
            raise ValueError(f"penalty needs cache_tokens >= 1, got penalty {self.penalty} and 0")
        return self


class DynamicSamplingSection(Section):
    """Groups whose rewards, penalties included, are all equal are replaced by others."""

    # Leave groups of equal rewards out and lease other groups in their place.
    enabled: bool = False
    # The run ends when the groups of this many steps were left out while one batch was formed: as
    # finished if all these groups are solved, else as failed.
    max_filtered_batches: Positive = 20
    # Full reward of an episode from the environment: a group is solved when all episodes reach it.
    # A curriculum reads it too.
    solved_reward: float = 1.0


class AlgorithmSection(Section):
    """The algorithm of a step; by default GRPO with truncated importance sampling.

    [Algorithms](algorithms.md) has the formulas and the published methods.
    """

    # Episodes of one task.
    group_size: Positive = 8
    # Groups in one training step.
    groups_per_step: Positive = 16
    # Bound of the lag of every trained token, in versions; 0: synchronous.
    max_staleness: int = Field(2, ge=0)
    # Learning rate of the policy after the warmup and before the decay.
    learning_rate: float = Field(1e-5, gt=0)
    # Steps over which the learning rate rises linearly, beginning with 1 / warmup_steps of it.
    warmup_steps: int = Field(0, ge=0)
    # Shape in which the learning rate falls until the end of the run. With x from 0 to 1 it falls
    # by x (linear), by (1 - cos(pi x)) / 2 (cosine) or by the root of x (sqrt).
    decay: DecayKind = "none"
    # Last steps of the run, in which the learning rate falls; before them it is constant. None: all
    # steps after the warmup.
    decay_steps: Positive | None = None
    # Share of the learning rate at which the decay ends, just after the last step.
    decay_to: float = Field(0.0, ge=0, lt=1)
    # Optimizer steps of one pass over a batch; each takes an equal share of its groups.
    mini_batches: Positive = 1
    # Passes over a batch. Ratios and corrections are those to the policy before the first pass.
    epochs: Positive = 1
    # Estimator of the advantage of a sampled token, from the rewards.
    advantage: AdvantageKind = "grpo"
    # Objective of a token, from the ratio of the policies and the advantage.
    loss: LossKind = "ppo"
    # Weights of tokens in the loss. token_mean: each token counts alike; sequence_mean: each
    # sequence counts alike; fixed: the sum of each sequence is divided by `fixed_tokens`.
    aggregation: AggregationKind = "token_mean"
    # Constant length of a sequence with `fixed`; None: sampling.max_reply_tokens.
    fixed_tokens: Positive | None = None
    # Denominator of the ratio in the loss: the policy before the step, or the behavior policy.
    ratio: Literal["proximal", "behavior"] = "proximal"
    # Clip range of the ratio: 1 - clip_low .. 1 + clip_high.
    clip_low: float = Field(0.2, gt=0, le=1)
    # See `clip_low`.
    clip_high: float = Field(0.2, gt=0)
    # Bound of the loss of tokens with negative advantage, in advantages. None: no bound.
    dual_clip: float | None = Field(None, gt=1)
    # Temperatures of SAPO's gate where the advantage is positive, and where it is not.
    sapo_tau: tuple[Temperature, Temperature] = (1.0, 1.05)
    # Factor of the entropy in the objective; 0: no entropy term.
    entropy_coefficient: float = Field(0.0, ge=0)
    # A table of its own, below.
    gae: GaeSection = GaeSection()
    # A table of its own, below.
    correction: CorrectionSection = CorrectionSection()
    # A table of its own, below.
    kl: KlSection = KlSection()
    # A table of its own, below.
    overlong: OverlongSection = OverlongSection()
    # A table of its own, below.
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    # Routing of a mixture of experts in training. rollout: servers record the experts of each
    # token,
    # and the policy sends the token to the same experts; off: the policy's routers choose.
    router_replay: Literal["off", "rollout"] = "off"

    @model_validator(mode="after")
    def _has_meaning(self) -> AlgorithmSection:
        for refusal in self.refusals():
            raise ValueError(refusal)
        return self

    def refusals(self) -> Iterator[str]:
        """Yields one line for each rule between these settings that they break."""
        for name, losses in READ_BY.items():
            value, default = getattr(self, name), _default(AlgorithmSection, name)
            if self.loss not in losses and value != default:
                yield f"{name} has no effect with loss = {self.loss!r}, got {value!r}"
        if self.decay == "none" and (self.decay_steps is not None or self.decay_to):
            yield (
                "decay_steps and decay_to have no effect with decay = 'none', "
                f"got {self.decay_steps} and {self.decay_to}"
            )
        if self.group_size == 1 and self.advantage in GROUP_ADVANTAGES:
            yield f"advantage = {self.advantage!r} compares a group: group_size must be >= 2, got 1"
        divergence_trains = self.kl.coefficient > 0 and self.kl.placement == "loss"
        if self.advantage == "none" and not divergence_trains:
            yield (
                "advantage = 'none' trains no reward: it needs kl.coefficient > 0 and "
                f"kl.placement = 'loss', got {self.kl.coefficient} and {self.kl.placement!r}"
            )
        if self.advantage in ("score", "none") and self.dynamic_sampling.enabled:
            yield (
                "dynamic_sampling leaves out groups of equal rewards, but advantage = "
                f"{self.advantage!r} compares none: dynamic_sampling.enabled must be false"
            )
        if self.group_size == 1 and self.dynamic_sampling.enabled:
            yield "dynamic_sampling would filter every group of group_size = 1"
        if self.gae != GaeSection() and self.advantage != "gae":
            yield f"the table gae has no effect with advantage = {self.advantage!r}"
        if self.fixed_tokens is not None and self.aggregation != "fixed":
            yield f"fixed_tokens has no effect with aggregation = {self.aggregation!r}"
        if self.ratio == "behavior" and self.correction.weight != "none":
            yield (
                "ratio = 'behavior' corrects already: correction.weight must be 'none', "
                f"got {self.correction.weight!r}"
            )
        cap, band = self.correction.cap, self.correction.token_band
        if self.correction.weight == "none" and cap != _default(CorrectionSection, "cap"):
            yield f"correction.cap has no effect with correction.weight = 'none', got {cap}"
        if self.correction.weight == "token" and band is not None and band[0] >= cap:
            yield f"correction.token_band begins at {band[0]}, above correction.cap {cap}"
        if self.kl.coefficient > 0 and (self.kl.placement, self.kl.estimator) == ("loss", "k1"):
            yield (
                "kl.estimator = 'k1' in the loss has a gradient of mean 0: take k2 or k3, or "
                "kl.placement = 'reward'"
            )
        if self.kl.uses_top_k and self.kl.placement == "reward":
            yield (
                f"kl.estimator = {self.kl.estimator!r} is no cost of a sampled token: "
                "kl.placement must be 'loss', got 'reward'"
            )

    @property
    def corrects(self) -> bool:
        """Whether the loss knows that another policy sampled a token of lag 0."""
        return self.ratio == "behavior" or self.correction.acts

    @property
    def staleness_warning(self) -> str | None:
        """Warning about tokens of older versions without a correction, or None if there is none."""
        if self.max_staleness == 0 or self.correction.acts:
            return None
        start = f"algorithm.max_staleness is {self.max_staleness} without a correction: "
        if self.ratio == "proximal":
            return start + (
                "tokens of older versions are trained as if the newest had sampled them, which "
                "biases the gradient; set algorithm.correction.weight"
            )
        if self.loss == "cispo":
            # CISPO's clipped ratio to the behavior policy is a truncated importance weight.
            return None
        return start + (
            "the ratio is taken to the behavior policy, so tokens whose probability has left the "
            "clip range since they were sampled have no gradient"
        )


def _default(section: type[Section], name: str) -> object:
    default = section.model_fields[name].default
    assert default is not PydanticUndefined
    return default
