"""The settings of the algorithm, its functions with their arguments, and the rules between them.

A function's name with a colon is `module:function`, a function of the user's own.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self, TypeAlias, cast, get_args

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from slipstream.core.extension import algorithm_functions
from slipstream.core.settings.function_table import (
    BANDS,
    FUNCTIONS,
    KINDS,
    BuiltIn,
    Estimator,
    FunctionKind,
)
from slipstream.core.settings.section import REFERENCE_FORM, Fixed, Growing, Positive, Section

Arguments: TypeAlias = dict[str, JsonValue]


def row_of(kind: FunctionKind, name: str) -> BuiltIn | None:
    """Returns what is known of a function of ours or of an extension; None for a user's own."""
    if is_own(name):
        return None
    row: BuiltIn | None = FUNCTIONS[kind].get(name) or algorithm_functions(kind).get(name)
    return row


# Marks the settings of the algorithm by which engines are made, too: servers must share them.
OF_ENGINES = "of engines"


def is_own(name: str) -> bool:
    """Whether a function's name is `module:function`."""
    return ":" in name


def validated(model: type[BaseModel], given: Mapping[str, object], *, what: str) -> BaseModel:
    """Returns the arguments of the function `what` as a `model`; raises ValueError of one line."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        # An unknown name may be a misspelt required name, so it is reported first.
        worst = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        name = ".".join(map(str, worst["loc"]))
        arguments = ", ".join(model.model_fields) or "none"
        match worst["type"]:
            case "extra_forbidden":
                raise ValueError(f"{what} has no argument {name!r}; known: {arguments}") from None
            case "missing":
                raise ValueError(f"{what} needs the argument {name!r}") from None
            case "value_error":
                rule = worst["msg"].removeprefix("Value error, ")
                where = f"{name} of {what}: "
                raise ValueError(where * bool(name) + rule) from None
        rule = worst["msg"][0].lower() + worst["msg"][1:]
        raise ValueError(f"{name} of {what}: {rule}, got {worst['input']!r}") from None


AggregationKind: TypeAlias = Literal["token_mean", "sequence_mean", "fixed"]
DecayKind: TypeAlias = Literal["none", "linear", "cosine", "sqrt"]
TopKEstimator: TypeAlias = Literal["forward_top_k", "reverse_top_k"]
KlEstimator: TypeAlias = Literal[Literal["k1", "k2", "k3"], TopKEstimator]
TOP_K_ESTIMATORS: tuple[TopKEstimator, ...] = get_args(TopKEstimator)


def _function(kind: FunctionKind, default: str) -> str:
    names: list[JsonValue] = [*FUNCTIONS[kind], "module:function"]
    field: str = Field(default, json_schema_extra={"enum": names})
    return field


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
    group_size: Annotated[Positive, Fixed("groups of this size are leased")] = 8
    # Groups in one training step.
    groups_per_step: Annotated[Positive, Fixed("the deadlines of leased groups count on it")] = 16
    # Largest lag of a trained token, in versions. 0 is synchronous training.
    max_staleness: Annotated[
        int,
        Growing("recorded batches may have lags up to the old bound"),
    ] = Field(2, ge=0)
    # Learning rate of the policy between warmup and decay.
    learning_rate: float = Field(1e-5, gt=0)
    # Steps over which the learning rate rises linearly, from 1 / `warmup_steps` of it.
    warmup_steps: int = Field(0, ge=0)
    # Shape in which the learning rate falls to 0 from the warmup to the end. With x from 0 to 1 it
    # falls by x (linear), (1 - cos(pi x)) / 2 (cosine) or the root of x (sqrt).
    decay: DecayKind = "none"
    # Optimizer steps of a pass over a batch, each with an equal share of its groups.
    mini_batches: Annotated[Positive, Fixed("recorded steps have this number")] = 1
    # Passes over a batch. Ratios refer to the policy before the first.
    epochs: Annotated[Positive, Fixed("recorded steps have this number")] = 1
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
    # ratio (`token`) or the product of its sequence's. `split` bounds what the engine and what the
    # lag do to the ratio [apart](algorithms.md#engine-and-lag-apart).
    weight: str = _function("weight", "token")
    # Arguments of the function.
    weight_args: Arguments = Field({}, validate_default=True)
    # Change of a group's rewards. With `overlong` long replies pay a penalty.
    reward: str = _function("reward", "none")
    # Arguments of the function.
    reward_args: Arguments = Field({}, validate_default=True)
    # Groups that are trained, while others are leased for the rest. `unequal_rewards` takes those
    # with two different rewards by the environment, before `reward` changes them.
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
    router_replay: Annotated[Literal["off", "rollout"], OF_ENGINES] = "off"
    # Agreement of learner and engine on a token's probability, up to rounding (`close`) or [in
    # every bit](guides/agreement.md) (`bits`), where a token that differs ends the run.
    agreement: Annotated[Literal["close", "bits"], OF_ENGINES] = "close"

    @field_validator(*KINDS)
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        kind = cast(FunctionKind, info.field_name)
        if REFERENCE_FORM.fullmatch(name) is None and row_of(kind, name) is None:
            names = ", ".join((*FUNCTIONS[kind], *algorithm_functions(kind)))
            raise ValueError(f"input should be {names} or module:function, got {name!r}")
        return name

    @field_validator(*(f"{kind}_args" for kind in KINDS))
    @classmethod
    def _check_arguments(cls, arguments: Arguments, info: ValidationInfo) -> Arguments:
        kind = cast(FunctionKind, str(info.field_name).removesuffix("_args"))
        name = info.data.get(kind)
        # If the name is wrong, only that error is reported. Arguments of a user's own function are
        # checked when it is loaded.
        if name is None or is_own(name):
            return arguments
        row = row_of(kind, name)
        assert row is not None
        checked = validated(row.arguments, arguments, what=f"{kind} {name}")
        return checked.model_dump(mode="json", exclude_none=True)

    @model_validator(mode="after")
    def _has_meaning(self) -> Self:
        for refusal in self.refusals():
            raise ValueError(refusal)
        return self

    def refusals(self) -> Iterator[str]:
        """Yields one line for each rule that these settings break."""
        estimator = self.estimator
        if self.group_size == 1 and estimator is not None and estimator.compares_group:
            yield f"advantage = {self.advantage!r} compares a group: group_size must be >= 2, got 1"
        if (stated := self.kl.model_fields_set) and "coefficient" not in stated:
            setting = f"kl.{min(stated)}"
            yield f"kl.coefficient must be given with {setting}: without it nothing is added (0)"
        divergence_trains = self.kl.coefficient > 0 and self.kl.placement == "loss"
        if self.advantage == "none" and not divergence_trains:
            yield (
                "advantage = 'none' trains no reward: it needs kl.coefficient > 0 and "
                f"kl.placement = 'loss', got {self.kl.coefficient} and {self.kl.placement!r}"
            )
        yield from self._filter_refusals()
        yield from self._weight_refusals()
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

    def _filter_refusals(self) -> Iterator[str]:
        estimator = self.estimator
        if self.filter == "unequal_rewards":
            compares = estimator is None or estimator.compares_group or estimator.compares_batch
            if not compares:
                yield (
                    "filter = 'unequal_rewards' leaves out groups of equal rewards, but advantage "
                    f"= {self.advantage!r} compares none: filter must be 'none'"
                )
            if self.group_size == 1:
                yield "filter = 'unequal_rewards' would leave out every group of group_size = 1"

    def _weight_refusals(self) -> Iterator[str]:
        has_weight = self.weight != "none" and not is_own(self.weight)
        if self._has_behavior_ratio and has_weight:
            yield (
                "ratio = 'behavior' of the loss corrects already: weight must be 'none', "
                f"got {self.weight!r}"
            )
        cap = self.weight_args.get("cap")
        band = self.weight_args.get("token_band")
        if self.weight == "token" and isinstance(band, list) and band[0] >= cap:  # type: ignore[operator]
            yield f"token_band of the weight begins at {band[0]}, above its cap {cap}"
        num_updates = self.mini_batches * self.epochs
        loss = row_of("loss", self.loss)
        has_no_ratio = loss is not None and not loss.has_ratio
        to_proximal = self.weight_args.get("to") == "proximal"
        if has_no_ratio and has_weight and num_updates > 1 and to_proximal:
            yield (
                f"loss = {self.loss!r} has no ratio that leads on from the policy before the step: "
                "with several mini_batches or epochs weight_args.to must be 'present'"
            )

    @property
    def estimator(self) -> Estimator | None:
        """What is known of `advantage`, or None for a user's own function."""
        row = row_of("advantage", self.advantage)
        assert row is None or isinstance(row, Estimator)
        return row

    @property
    def reads_versions(self) -> bool:
        """Whether a step needs log-probabilities by the versions that sampled its tokens."""
        row = row_of("weight", self.weight)
        return row is not None and row.reads_versions

    @property
    def _has_behavior_ratio(self) -> bool:
        return not is_own(self.loss) and self.loss_args.get("ratio") == "behavior"

    @property
    def behavior_ratios(self) -> dict[str, str]:
        """The settings by which the engine's probabilities enter a step, each with its remedy.

        They are right only if engine and learner sample from the same tokens. What a user's own
        functions read is not known here (`losses.reads_behavior` finds out).
        """
        settings: dict[str, str] = {}
        if not is_own(self.weight):
            if self.weight != "none":
                settings[f"algorithm.weight = {self.weight!r}"] = "algorithm.weight = 'none'"
            for band in sorted(BANDS & self.weight_args.keys()):
                settings[f"algorithm.weight_args.{band}"] = f"leave {band} out"
        if self._has_behavior_ratio:
            setting = "algorithm.loss_args.ratio"
            settings[f"{setting} = 'behavior'"] = f"{setting} = 'proximal'"
        if self.kl.coefficient > 0 and self.kl.placement == "reward":
            setting = "algorithm.kl.placement"
            settings[f"{setting} = 'reward'"] = f"{setting} = 'loss'"
        return settings

    @property
    def of_engines(self) -> dict[str, JsonValue]:
        """The settings by which engines are made, too, with their values."""
        fields = type(self).model_fields.items()
        names = [name for name, field in fields if OF_ENGINES in field.metadata]
        return {name: getattr(self, name) for name in names}

    @property
    def own_functions(self) -> dict[FunctionKind, str]:
        names = {kind: str(getattr(self, kind)) for kind in KINDS}
        return {kind: name for kind, name in names.items() if is_own(name)}

    @property
    def acts(self) -> bool:
        """Whether the importance weight `weight` can change a loss or mask a token."""
        return self.weight != "none" or bool(self.weight_args.keys() & BANDS)

    @property
    def corrects(self) -> bool:
        """Whether the algorithm can correct for engine probabilities that deviate even at lag 0."""
        return self._has_behavior_ratio or self.acts or is_own(self.loss)

    def staleness_warning(self, *, is_cut: bool) -> str | None:
        """Returns the warning about training on stale tokens without a correction, or None.

        `is_cut` says whether engines sample from a part of the vocabulary, which no correction
        allows for.
        """
        if self.max_staleness == 0 or self.acts or is_own(self.loss):
            return None
        start = f"algorithm.max_staleness is {self.max_staleness} without a correction: "
        if not self._has_behavior_ratio:
            remedy = "set algorithm.weight"
            if is_cut:
                remedy = "set it to 0, or sample from the whole vocabulary and set algorithm.weight"
            return start + (
                "tokens of older versions are trained as if the newest had sampled them, which "
                f"biases the gradient; {remedy}"
            )
        if self.loss == "cispo":
            # CISPO's clipped ratio to the behavior policy is a truncated importance weight.
            return None
        return start + (
            "the ratio is taken to the behavior policy, so tokens whose probability has left the "
            "clip range since they were sampled have no gradient"
        )
