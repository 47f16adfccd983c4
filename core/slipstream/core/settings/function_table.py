"""The built-in functions of an algorithm, a table for each kind, and their arguments.

The learner's package `algorithms` holds the functions, whose keywords are these arguments. Whatever
a rule asks of a function by its name is a field of its row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from slipstream.core.settings.section import Positive, Section

FunctionKind: TypeAlias = Literal["loss", "advantage", "weight", "reward", "filter"]
# Denominator of the ratio in a loss.
Anchor: TypeAlias = Literal["proximal", "behavior"]
Band = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]


class ClipArguments(Section):
    """The arguments of the losses `gspo` and `cispo`."""

    # The ratio is clipped to 1 - clip_low .. 1 + clip_high.
    clip_low: float = Field(0.2, gt=0, le=1)
    # See `clip_low`.
    clip_high: float = Field(0.2, gt=0)
    # Denominator of the ratio, the policy before the step or the behavior policy.
    ratio: Anchor = "proximal"


class PpoArguments(ClipArguments):
    """The arguments of the loss `ppo`."""

    # Bound of the loss of tokens with negative advantage, in advantages.
    dual_clip: float | None = Field(None, gt=1)


class SapoArguments(Section):
    """The arguments of the loss `sapo`."""

    # Temperature of the gate where the advantage is positive.
    tau_positive: float = Field(1.0, gt=0)
    # Temperature of the gate where it is not.
    tau_negative: float = Field(1.05, gt=0)
    # Denominator of the ratio, the policy before the step or the behavior policy.
    ratio: Anchor = "proximal"


class ReturnArguments(Section):
    """The arguments of the advantage `return_to_go`."""

    # Discount of each turn. 0 means the turn's own reward alone.
    gamma: float = Field(1.0, ge=0, le=1)
    # Divide by the deviation of the group's returns of that turn.
    normalize: bool = True


class GaeArguments(Section):
    """The arguments of the advantages `gae` and `turn_gae`, generalised advantage estimation."""

    # Discount of each step: a sampled token or, with `turn_gae`, a turn.
    gamma: float = Field(1.0, gt=0, le=1)
    # 0 means one-step differences of the values, 1 returns minus values.
    lam: float = Field(0.95, ge=0, le=1)
    # Scale a batch's advantages to mean 0 and deviation 1 over its tokens.
    normalize: bool = True


class WeightArguments(Section):
    """What the arguments of all weights have in common."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in type(self).model_fields:
            if not name.endswith("_band"):
                continue
            band: Band | None = getattr(self, name)
            if band is not None and not band[0] < band[1]:
                raise ValueError(f"{name} must be [low, high] with low < high, got {list(band)}")
        return self


class BandArguments(WeightArguments):
    """The arguments of the weight `none`, which is 0 for tokens outside a band and else 1."""

    # IcePop, by which tokens with a ratio outside the band leave the loss. By default all stay.
    token_band: Band | None = None
    # The same for sequences, by the geometric mean of their ratios.
    sequence_band: Band | None = None
    # Numerator of the ratios, the policy before the step or, for a loss without a ratio, the
    # present one.
    to: Literal["proximal", "present"] = "proximal"


# The arguments that mask by the ratio to the behavior policy.
BANDS = frozenset(name for name in BandArguments.model_fields if name.endswith("_band"))


class CapArguments(BandArguments):
    """The arguments of the weights `token` and `sequence`."""

    # Upper bound of the weight.
    cap: float = Field(2.0, gt=0)


class SplitArguments(WeightArguments):
    """The arguments of the weight `split`, which bounds the ratio of engine and lag apart."""

    # Upper bound of the factor of the engine: learner over engine, both at the version that sampled
    # the token.
    engine_cap: float = Field(2.0, gt=0)
    # Tokens with such a factor outside the band leave the loss. By default all stay.
    engine_token_band: Band | None = None
    # The same for sequences, by the geometric mean of their factors.
    engine_sequence_band: Band | None = None
    # Upper bound of the factor of the lag: the learner now over the learner at that version.
    staleness_cap: float = Field(2.0, gt=0)
    # The same for tokens with such a factor outside the band.
    staleness_token_band: Band | None = None
    # The same for sequences, by the geometric mean of their factors.
    staleness_sequence_band: Band | None = None
    # Numerator of the ratios, the policy before the step or, for a loss without a ratio, the
    # present one.
    to: Literal["proximal", "present"] = "proximal"

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        for factor in ("engine", "staleness"):
            band: Band | None = getattr(self, f"{factor}_token_band")
            cap: float = getattr(self, f"{factor}_cap")
            if band is not None and band[0] >= cap:
                raise ValueError(
                    f"{factor}_token_band begins at {band[0]:g}, above {factor}_cap {cap:g}"
                )
        return self


class OverlongArguments(Section):
    """The arguments of the reward `overlong`."""

    # Subtracted from the reward of an episode whose longest reply has `max_reply_tokens`.
    penalty: float = Field(1.0, gt=0)
    # Last tokens over which the penalty rises linearly.
    cache_tokens: Positive


class NoArguments(Section):
    """The empty table of arguments for a function that takes no arguments."""


@dataclass(frozen=True)
class BuiltIn:
    """A row of a table: what is known of a built-in function without calling it."""

    arguments: type[Section] = NoArguments
    # "module:function" of a function that an extension adds. One of ours has its name in the module
    # of its kind.
    place: str = field(default="", kw_only=True)

    # Whether a weight reads log-probabilities by the learner at the versions that sampled tokens.
    reads_versions: bool = field(default=False, kw_only=True)

    @property
    def has_ratio(self) -> bool:
        """Whether a loss has a ratio of two policies."""
        return "ratio" in self.arguments.model_fields


@dataclass(frozen=True)
class Estimator(BuiltIn):
    """A row of an advantage."""

    # Whether a score is compared with the others of its group, which needs two of them. Equal
    # rewards of a group then give advantages of 0, unless the batch is compared, too.
    compares_group: bool = False
    # Whether advantages are compared with those of the batch.
    compares_batch: bool = False
    # Whether all turns of an episode learn from the sum of their rewards.
    sums_turns: bool = True
    # Whether the values of a critic are of use: `needed` ones must be there.
    critic: Literal["unused", "optional", "needed"] = "unused"

    @property
    def compares_only_groups(self) -> bool:
        """Whether groups of equal rewards have no advantages."""
        return self.compares_group and not self.compares_batch


LOSSES: Mapping[str, BuiltIn] = {
    "ppo": BuiltIn(PpoArguments),
    "gspo": BuiltIn(ClipArguments),
    "cispo": BuiltIn(ClipArguments),
    "sapo": BuiltIn(SapoArguments),
    "reinforce": BuiltIn(),
}
ADVANTAGES: Mapping[str, Estimator] = {
    "grpo": Estimator(compares_group=True),
    "dr_grpo": Estimator(compares_group=True),
    "rloo": Estimator(compares_group=True),
    "reinforce_pp": Estimator(
        compares_batch=True,
        sums_turns=False,
    ),
    "reinforce_pp_baseline": Estimator(
        compares_group=True,
        compares_batch=True,
    ),
    "return_to_go": Estimator(
        ReturnArguments,
        compares_group=True,
        sums_turns=False,
    ),
    "gae": Estimator(
        GaeArguments,
        compares_batch=True,
        sums_turns=False,
        critic="needed",
    ),
    "turn_gae": Estimator(
        GaeArguments,
        compares_batch=True,
        sums_turns=False,
        critic="optional",
    ),
    "score": Estimator(),
    "none": Estimator(sums_turns=False),
}
WEIGHTS: Mapping[str, BuiltIn] = {
    "none": BuiltIn(BandArguments),
    "token": BuiltIn(CapArguments),
    "sequence": BuiltIn(CapArguments),
    "split": BuiltIn(SplitArguments, reads_versions=True),
}
REWARDS: Mapping[str, BuiltIn] = {
    "none": BuiltIn(),
    "overlong": BuiltIn(OverlongArguments),
}
FILTERS: Mapping[str, BuiltIn] = {
    "none": BuiltIn(),
    "unequal_rewards": BuiltIn(),
}
FUNCTIONS: Mapping[FunctionKind, Mapping[str, BuiltIn]] = {
    "loss": LOSSES,
    "advantage": ADVANTAGES,
    "weight": WEIGHTS,
    "reward": REWARDS,
    "filter": FILTERS,
}
KINDS = tuple(FUNCTIONS)
# The kinds whose functions get tokens, with the log-probabilities of the policy that sampled them.
FUNCTIONS_OF_TOKENS: tuple[FunctionKind, ...] = ("loss", "weight")
