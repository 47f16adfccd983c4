"""The functions of an algorithm by their names, and the arguments of the built-in ones.

A name with a colon is `module:function`, a function of the user's own. The learner's package
`algorithms` holds the built-in functions, whose keywords are these arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, JsonValue, ValidationError, model_validator
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
    def _ordered(self) -> BandArguments:
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


def check_name(kind: FunctionKind, name: str) -> str:
    """Returns `name`. Raises ValueError unless it is built in or has the form `module:function`."""
    if name not in FUNCTIONS[kind] and REFERENCE_FORM.fullmatch(name) is None:
        raise ValueError(
            f"input should be {', '.join(FUNCTIONS[kind])} or module:function, got {name!r}"
        )
    return name


# Names of functions; their checks hold for the tables of environments, too.
Advantage = Annotated[str, AfterValidator(partial(check_name, "advantage"))]
Loss = Annotated[str, AfterValidator(partial(check_name, "loss"))]
Weight = Annotated[str, AfterValidator(partial(check_name, "weight"))]
Reward = Annotated[str, AfterValidator(partial(check_name, "reward"))]
Filter = Annotated[str, AfterValidator(partial(check_name, "filter"))]


def checked_arguments(kind: FunctionKind, name: str, given: Arguments) -> Arguments:
    """Returns a built-in function's arguments, with defaults filled in and None values removed.

    The arguments of a user's own function are returned as given: they are checked when the function
    is loaded. Raises ValueError, with one line, for invalid arguments.
    """
    if is_own(name):
        return given
    found = validated(FUNCTIONS[kind][name], given, what=f"{kind} {name}")
    return found.model_dump(mode="json", exclude_none=True)


def validated(model: type[BaseModel], given: Mapping[str, object], *, what: str) -> BaseModel:
    """Returns `given`, the arguments of the function `what`, as a `model`.

    Raises ValueError with one line if an argument is invalid.
    """
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
