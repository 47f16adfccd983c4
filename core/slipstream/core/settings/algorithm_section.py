"""The settings of the algorithm, its functions with their arguments, and the rules between them.

A function's name with a colon is `module:function`, a function of the user's own. The learner's
package `algorithms` holds the built-in functions, whose keywords are these arguments.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self, TypeAlias, cast

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from slipstream.core.settings.section import REFERENCE_FORM, Positive, Section

FunctionKind: TypeAlias = Literal["loss", "advantage", "weight", "reward", "filter"]
Arguments: TypeAlias = dict[str, JsonValue]
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


class BandArguments(Section):
    """The arguments of the weight `none`, which is 0 for tokens outside a band and else 1."""

    # IcePop, by which tokens with a ratio outside the band leave the loss. By default all stay.
    token_band: Band | None = None
    # The same for sequences, by the geometric mean of their ratios.
    sequence_band: Band | None = None
    # Numerator of the ratios, the policy before the step or, for a loss without a ratio, the
    # present one.
    to: Literal["proximal", "present"] = "proximal"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("token_band", "sequence_band"):
            band: Band | None = getattr(self, name)
            if band is not None and not band[0] < band[1]:
                raise ValueError(f"{name} must be [low, high] with low < high, got {list(band)}")
        return self


class CapArguments(BandArguments):
    """The arguments of the weights `token` and `sequence`."""

    # Upper bound of the weight.
    cap: float = Field(2.0, gt=0)


class OverlongArguments(Section):
    """The arguments of the reward `overlong`."""

    # Subtracted from the reward of an episode whose longest reply has `max_reply_tokens`.
    penalty: float = Field(1.0, gt=0)
    # Last tokens over which the penalty rises linearly.
    cache_tokens: Positive


class NoArguments(Section):
    """The empty table of arguments for a function that takes no arguments."""


# The built-in functions of each kind.
FUNCTIONS: dict[FunctionKind, dict[str, type[Section]]] = {
    "loss": {
        "ppo": PpoArguments,
        "gspo": ClipArguments,
        "cispo": ClipArguments,
        "sapo": SapoArguments,
        "reinforce": NoArguments,
    },
    "advantage": {
        **dict.fromkeys(("grpo", "dr_grpo", "rloo", "reinforce_pp"), NoArguments),
        "reinforce_pp_baseline": NoArguments,
        "return_to_go": ReturnArguments,
        **dict.fromkeys(("gae", "turn_gae"), GaeArguments),
        **dict.fromkeys(("score", "none"), NoArguments),
    },
    "weight": {"none": BandArguments, "token": CapArguments, "sequence": CapArguments},
    "reward": {"none": NoArguments, "overlong": OverlongArguments},
    "filter": {"none": NoArguments, "unequal_rewards": NoArguments},
}


def is_own(name: str) -> bool:
    """Whether a function's name is `module:function`."""
    return ":" in name


def validated(model: type[BaseModel], given: Mapping[str, object], *, what: str) -> BaseModel:
    """Returns the arguments of the function `what` as a `model`; raises ValueError of one line."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        # An unknown name may be a misspelt required name, so it is reported first.
        worst = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        name = ".".join(map(str, worst["loc"]))
        known = ", ".join(model.model_fields) or "none"
        match worst["type"]:
            case "extra_forbidden":
                raise ValueError(f"{what} has no argument {name!r}; known: {known}") from None
            case "missing":
                raise ValueError(f"{what} needs the argument {name!r}") from None
            case "value_error":
                rule, where = worst["msg"].removeprefix("Value error, "), f"{name} of {what}: "
                raise ValueError(where * bool(name) + rule) from None
        rule = worst["msg"][0].lower() + worst["msg"][1:]
        raise ValueError(f"{name} of {what}: {rule}, got {worst['input']!r}") from None


AggregationKind: TypeAlias = Literal["token_mean", "sequence_mean", "fixed"]
DecayKind: TypeAlias = Literal["none", "linear", "cosine", "sqrt"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "forward_top_k", "reverse_top_k"]

TOP_K_ESTIMATORS: tuple[KlEstimator, ...] = ("forward_top_k", "reverse_top_k")

# Advantages that only compare the episodes of a group: equal rewards make them all 0.
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
KINDS = tuple(FUNCTIONS)


def _function(kind: FunctionKind, default: str) -> str:
    names: list[JsonValue] = [*FUNCTIONS[kind], "module:function"]
    found: str = Field(default, json_schema_extra={"enum": names})
    return found


class KlSection(Section):
    """A penalty on the divergence from the reference model."""

    # Factor of the penalty. 0 means none.
    coefficient: float = Field(0.0, ge=0)
    # `loss` adds a term to the policy's loss, `reward` subtracts from the reward of each token.
    placement: Literal["loss", "reward"] = "loss"
    # Estimator at a sampled token, where `k1` needs `reward`. The top-k ones compare the
    # reference's most likely tokens and need `loss` and `reference.top_k`.
    estimator: KlEstimator = "k3"

    @property
    def uses_top_k(self) -> bool:
        return self.coefficient > 0 and self.estimator in TOP_K_ESTIMATORS


class AlgorithmSection(Section):
    """The algorithm of a step, by default GRPO with truncated importance sampling.

    [Algorithms](algorithms.md) has the formulas and the published methods.
    """

    # Episodes of one task.
    group_size: Positive = 8
    # Groups in one training step.
    groups_per_step: Positive = 16
    # Largest lag of a trained token, in versions. 0 is synchronous training.
    max_staleness: int = Field(2, ge=0)
    # Learning rate of the policy between warmup and decay.
    learning_rate: float = Field(1e-5, gt=0)
    # Steps over which the learning rate rises linearly, from 1 / `warmup_steps` of it.
    warmup_steps: int = Field(0, ge=0)
    # Shape in which the learning rate falls to 0 from the warmup to the end. With x from 0 to 1 it
    # falls by x (linear), (1 - cos(pi x)) / 2 (cosine) or the root of x (sqrt).
    decay: DecayKind = "none"
    # Optimizer steps of a pass over a batch, each with an equal share of its groups.
    mini_batches: Positive = 1
    # Passes over a batch. Ratios refer to the policy before the first.
    epochs: Positive = 1
    # Estimator of a token's advantage from the rewards. This and the next four functions may be
    # [your own](guides/own-algorithms.md).
    advantage: str = _function("advantage", "grpo")
    # Arguments of the function, below for built-in ones.
    advantage_args: Arguments = Field({}, validate_default=True)
    # Objective of a token, from the ratio of the policies and the advantage.
    loss: str = _function("loss", "ppo")
    # Arguments of the function.
    loss_args: Arguments = Field({}, validate_default=True)
    # Factor of a token in the loss, which corrects for sampling by another policy: its importance
    # ratio (`token`) or the product of its sequence's.
    weight: str = _function("weight", "token")
    # Arguments of the function.
    weight_args: Arguments = Field({}, validate_default=True)
    # Change of a group's rewards. With `overlong` long replies pay a penalty.
    reward: str = _function("reward", "none")
    # Arguments of the function.
    reward_args: Arguments = Field({}, validate_default=True)
    # Groups that are trained, while others are leased for the rest. `unequal_rewards` takes those
    # with two different rewards.
    filter: str = _function("filter", "none")
    # Arguments of the function.
    filter_args: Arguments = Field({}, validate_default=True)
    # Leave truncated episodes out of the loss and of their group's statistics.
    leave_out_truncated: bool = False
    # Each token (`token_mean`) or each sequence (`sequence_mean`) counts alike in the loss, or each
    # sequence's sum is divided by `sampling.max_reply_tokens` (`fixed`).
    aggregation: AggregationKind = "token_mean"
    # Factor of the entropy in the objective.
    entropy_coefficient: float = Field(0.0, ge=0)
    # A table of its own, below.
    kl: KlSection = KlSection()
    # Whether a mixture of experts sends tokens to the experts that servers recorded, or lets the
    # policy's routers choose.
    router_replay: Literal["off", "rollout"] = "off"
    # Agreement of learner and engine on a token's probability, up to rounding (`close`) or [in
    # every bit](guides/agreement.md) (`bits`), where a token that differs ends the run.
    agreement: Literal["close", "bits"] = "close"

    @field_validator(*KINDS)
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        known = FUNCTIONS[cast(FunctionKind, info.field_name)]
        if name not in known and REFERENCE_FORM.fullmatch(name) is None:
            raise ValueError(f"input should be {', '.join(known)} or module:function, got {name!r}")
        return name

    @field_validator(*(f"{kind}_args" for kind in KINDS))
    @classmethod
    def _check_arguments(cls, given: Arguments, info: ValidationInfo) -> Arguments:
        kind = cast(FunctionKind, str(info.field_name).removesuffix("_args"))
        name = info.data.get(kind)
        # If the name is wrong, only that error is reported. Arguments of a user's own function are
        # checked when it is loaded.
        if name is None or is_own(name):
            return given
        found = validated(FUNCTIONS[kind][name], given, what=f"{kind} {name}")
        return found.model_dump(mode="json", exclude_none=True)

    @model_validator(mode="after")
    def _has_meaning(self) -> Self:
        for refusal in self.refusals():
            raise ValueError(refusal)
        return self

    def refusals(self) -> Iterator[str]:
        """Yields one line for each rule that these settings break."""
        if self.group_size == 1 and self.advantage in (*GROUP_ADVANTAGES, "return_to_go"):
            yield f"advantage = {self.advantage!r} compares a group: group_size must be >= 2, got 1"
        if (told := self.kl.model_fields_set) and "coefficient" not in told:
            named = f"kl.{min(told)}"
            yield f"kl.coefficient must be given with {named}: without it nothing is added (0)"
        divergence_trains = self.kl.coefficient > 0 and self.kl.placement == "loss"
        if self.advantage == "none" and not divergence_trains:
            yield (
                "advantage = 'none' trains no reward: it needs kl.coefficient > 0 and "
                f"kl.placement = 'loss', got {self.kl.coefficient} and {self.kl.placement!r}"
            )
        if self.filter == "unequal_rewards":
            if self.advantage in ("score", "none"):
                yield (
                    "filter = 'unequal_rewards' leaves out groups of equal rewards, but advantage "
                    f"= {self.advantage!r} compares none: filter must be 'none'"
                )
            if self.group_size == 1:
                yield "filter = 'unequal_rewards' would leave out every group of group_size = 1"
        weights = self.weight in ("token", "sequence")
        if self._has_behavior_ratio and weights:
            yield (
                "ratio = 'behavior' of the loss corrects already: weight must be 'none', "
                f"got {self.weight!r}"
            )
        cap, band = self.weight_args.get("cap"), self.weight_args.get("token_band")
        if self.weight == "token" and isinstance(band, list) and band[0] >= cap:  # type: ignore[operator]
            yield f"token_band of the weight begins at {band[0]}, above its cap {cap}"
        several, to = self.mini_batches * self.epochs > 1, self.weight_args.get("to")
        if self.loss == "reinforce" and several and weights and to == "proximal":
            yield (
                "loss = 'reinforce' has no ratio that leads on from the policy before the step: "
                "with several mini_batches or epochs weight_args.to must be 'present'"
            )
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
    def _has_behavior_ratio(self) -> bool:
        return not is_own(self.loss) and self.loss_args.get("ratio") == "behavior"

    @property
    def own_functions(self) -> dict[FunctionKind, str]:
        names = {kind: str(getattr(self, kind)) for kind in KINDS}
        return {kind: name for kind, name in names.items() if is_own(name)}

    @property
    def acts(self) -> bool:
        """Whether the importance weight `weight` can change a loss or mask a token."""
        has_bands = self.weight_args.keys() & {"token_band", "sequence_band"}
        return self.weight != "none" or bool(has_bands)

    @property
    def corrects(self) -> bool:
        """Whether the algorithm can correct for engine probabilities that deviate even at lag 0."""
        return self._has_behavior_ratio or self.acts or is_own(self.loss)

    @property
    def staleness_warning(self) -> str | None:
        """The warning about training on stale tokens without a correction, or None."""
        if self.max_staleness == 0 or self.acts or is_own(self.loss):
            return None
        start = f"algorithm.max_staleness is {self.max_staleness} without a correction: "
        if not self._has_behavior_ratio:
            return start + (
                "tokens of older versions are trained as if the newest had sampled them, which "
                "biases the gradient; set algorithm.weight"
            )
        if self.loss == "cispo":
            # CISPO's clipped ratio to the behavior policy is a truncated importance weight.
            return None
        return start + (
            "the ratio is taken to the behavior policy, so tokens whose probability has left the "
            "clip range since they were sampled have no gradient"
        )
