"""A wrong function is refused with its property, and no right one is."""

from collections.abc import Iterator

import pytest
import torch
from pydantic import JsonValue
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.function_table import FUNCTIONS, FunctionKind
from slipstream.extensions.proofs.proof import EpisodeProof
from slipstream.extensions.proofs.token_proof import TokenProof
from slipstream.learner.algorithms.functions import function_of
from support.fakes import wrong_algorithms
from support.fakes.packed import algorithm

MODULE = wrong_algorithms.__name__
WRONG_LOSSES = {
    "divides_by_trained_tokens": (
        "layout",
        "a micro batch for each sequence: loss of token 0",
    ),
    "divides_by_length": ("layout", "padding: loss of token 0 is"),
    "grows_with_the_place": ("layout", "order of episodes: loss of token 0 is"),
    "reports_places": ("layout", "order of episodes: report place of token 0 is"),
    "reads_the_token_before": ("layout", "padding: loss of token 0 is 0, not"),
    "leaves_out_what_is_far": (
        "layout",
        "x.xxxx.xx .xxxx (x is a trained token), log ratios of deviation 3",
    ),
    "stops_early": (
        "layout",
        ".xxxx (x is a trained token), log ratios of deviation 3",
    ),
    "by_the_largest_advantage": ("layout", "log ratios of deviation 1"),
    "counts_its_own_tokens": ("layout", "a sequence on two ranks: loss of token "),
    "forgets_late_tokens": (
        "layout",
        "sequences ...........(5000) .xxx (x is a trained token)",
    ),
    "sums_on_some_ranks": (
        "layout",
        "one rank asks for sums over sequences, another does not",
    ),
    "reads_masked_tokens": ("masked tokens", "with other values at masked tokens"),
    "infinite_at_masked_tokens": ("masked tokens", "has the gradient nan: sequences"),
    "root_at_a_bound": ("finite", "gradient is inf at log ratio 0.1823"),
    "root_in_a_helper": ("finite", "gradient is inf at log ratio 0.1823"),
    "depends_on_the_rank": ("state", "on the second of two ranks: sequences x "),
    "reads_the_rank": ("state", "on the second of two ranks: sequences x "),
    "product_of_a_sequence": ("finite", ", in a sequence of 9"),
    "log_of_the_entropy": ("finite", "entropy 0"),
    "adds_the_entropy": ("entropy", "have none, set algorithm.entropy_coefficient"),
    "squares_the_ratio": ("finite", "to the proximal and 46.05 to the behavior policy"),
    "fails_without_a_token": (
        "empty mask",
        "sequences . (x is a trained token): RuntimeError",
    ),
    "detached": ("gradient", "no token with a positive advantage has one"),
    "detached_where_negative": (
        "gradient",
        "no token with a negative advantage has one",
    ),
    "only_sums": ("gradient", "no token with a positive advantage has one"),
    "no_gradient": ("result", "the losses have no gradient"),
    "wrong_backward": ("gradient", "by finite differences: sequences x (x"),
    "counts_calls": ("state", "in a later call with the same inputs"),
    "changes_after_many_calls": ("state", "calls change _seen of its module"),
    "draws_at_random": ("state", "in a later call with the same inputs"),
    "changes_inputs": ("result", "it changed its input advantages in place"),
    "changes_data": ("result", "it changed its input advantages in place"),
    "changes_a_few": ("result", "it changed its input behavior_logprobs in place"),
    "exits": ("result", "SystemExit: 3 (wrong_algorithms.py:"),
    "too_short": ("result", "the result is [2], not [3]"),
    "one_number": ("result", "the result is [], not [1]"),
    "other_dtype": ("result", "the result is torch.float64, not torch.float32"),
    "raises": ("result", "KeyError: 'clip' (wrong_algorithms.py:"),
}
RIGHT_LOSSES = (
    "right_backward",
    "in_float32",
    "only_positive",
    "with_a_kink",
    "gate_of_the_entropy",
)
ARGUMENTS: dict[str, list[dict[str, JsonValue]]] = {
    "ppo": [{}, {"dual_clip": 1.5}, {"ratio": "behavior"}],
    "cispo": [{}, {"clip_low": 1.0, "ratio": "behavior"}],
    "return_to_go": [{}, {"gamma": 0.0, "normalize": False}],
    "turn_gae": [{}, {"gamma": 0.9, "normalize": False}],
    "overlong": [{"cache_tokens": 4}],
    "token": [
        {},
        {"token_band": [0.5, 1.6], "sequence_band": [0.7, 1.3]},
        {"to": "present"},
    ],
    "sequence": [{}, {"token_band": [0.5, 1.6], "to": "present"}],
    "split": [
        {},
        {"engine_token_band": [0.5, 1.6], "staleness_sequence_band": [0.7, 1.3]},
        {"to": "present", "staleness_token_band": [0.5, 1.6]},
    ],
}
BUILT_IN = [
    (kind, name, arguments)
    for kind, names in FUNCTIONS.items()
    for name in names
    for arguments in ARGUMENTS.get(name, [{}])
]


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    """The program that proves does so too, since tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chosen(kind: FunctionKind, name: str, **arguments: JsonValue) -> AlgorithmSection:
    other_settings: dict[str, JsonValue] = {}
    if (kind, name) == ("advantage", "none"):
        other_settings = {"kl": {"coefficient": 0.1}}
    if arguments.get("ratio") == "behavior":
        other_settings = {"weight": "none"}
    return algorithm(**{kind: name, f"{kind}_args": arguments}, **other_settings)


def faults(
    settings: AlgorithmSection, kind: FunctionKind, *, has_roles: bool = False
) -> list[str]:
    if kind in ("loss", "weight"):
        return TokenProof(
            function_of(settings, kind),
            has_roles,
            settings.reads_versions,
        ).faults()
    has_values = settings.advantage == "gae" or (
        has_roles and settings.advantage == "turn_gae"
    )
    return EpisodeProof(settings, kind, has_values).faults()


@pytest.mark.parametrize(("name", "expected"), WRONG_LOSSES.items())
def test_wrong_losses_are_refused_with_the_property_that_they_lack(name, expected):
    lines = faults(chosen("loss", f"{MODULE}:{name}"), "loss")
    title, example = expected
    start = f"loss {MODULE}:{name}: {title}: "
    assert [line for line in lines if line.startswith(start) and example in line], lines
    assert not [line for line in lines if "\n" in line]


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_of_ones_own_are_proved(name: str) -> None:
    assert faults(chosen("loss", f"{MODULE}:{name}"), "loss") == []


@pytest.mark.parametrize(("kind", "name", "arguments"), BUILT_IN)
def test_built_in_functions_are_proved(kind, name, arguments):
    assert faults(chosen(kind, name, **arguments), kind, has_roles=True) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("loss", "gmpo:loss"),
        ("loss", "top_entropy:loss"),
        ("loss", "covariance:clip_cov"),
        ("loss", "covariance:kl_cov"),
        ("weight", "dppo:weight"),
        ("loss", "oapl:loss"),
        ("weight", "m2po:weight"),
        ("weight", "vespo:weight"),
        ("advantage", "maxrl:advantage"),
        ("advantage", "gigpo:advantage"),
        ("advantage", "gdpo:advantage"),
        ("advantage", "oapl:advantage"),
        ("reward", "alp:reward"),
        ("filter", "difficulty:filter"),
    ],
)
def test_algorithms_of_papers_are_proved(kind: FunctionKind, name: str) -> None:
    assert faults(chosen(kind, f"deploy.algorithms.{name}"), kind) == []


def test_an_example_is_the_smallest_one_and_other_layouts_are_named() -> None:
    (line,) = faults(chosen("loss", f"{MODULE}:divides_by_length"), "loss")
    assert line.endswith(
        "loss of token 0 is 0.355851917, not 1.06755575: sequences x (x is a trained token); "
        "also with a sequence on two ranks, each sequence on one of two ranks, a micro batch for "
        "each sequence"
    )


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("weight", "weight_of_mean_lag", "layout: padding: weight of token 0"),
        (
            "advantage",
            "against_the_first",
            "order of episodes: episode 0, number 0 is 0, not 1 for",
        ),
        ("advantage", "by_name_of_group", "names of groups: "),
        ("advantage", "without_epsilon", "a value is not finite"),
        ("advantage", "running_mean", "state: "),
        ("advantage", "one_too_few", "result: rewards 0.5: 0 advantages of 1 episodes"),
        (
            "reward",
            "reward_by_place",
            "order of episodes: episode 0, number 0 is 1, not 2 for",
        ),
        ("reward", "reward_log", "a reward is no finite number: -inf"),
        ("reward", "reward_at_random", "state: "),
        ("filter", "first_decides", "order of episodes: result 0 is 1, not 0 for the"),
        (
            "filter",
            "deviates",
            "rounding: it keeps a group of 7 rewards 0.173 and leaves out one of",
        ),
        (
            "loss",
            "encloses_the_first_scale",
            "state: calls change scale (enclosed) of its module",
        ),
        (
            "loss",
            "calls_what_encloses_the_first_scale",
            "state: calls change scale (enclosed of _inner) of its module",
        ),
        ("loss", "stops_at_a_mean_gap", "layout: a micro batch for each sequence"),
        ("filter", "neither", "the result is neither true nor false: None"),
    ],
)
def test_other_wrong_functions_are_refused(
    kind: FunctionKind, name: str, expected: str
) -> None:
    lines = faults(chosen(kind, f"{MODULE}:{name}"), kind)
    assert [line for line in lines if expected in line], lines


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("weight", "weight_of_lags"),
        ("weight", "weight_in_float32"),
        ("weight", "weight_by_a_module_that_changes"),
        ("advantage", "only_from_0_to_1"),
        ("reward", "reward_of_metrics"),
        ("filter", "mean_between"),
    ],
)
def test_other_right_functions_are_proved(kind: FunctionKind, name: str) -> None:
    assert faults(chosen(kind, f"{MODULE}:{name}"), kind) == []
