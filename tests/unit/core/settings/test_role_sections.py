import pytest
from pydantic import ValidationError
from slipstream.core.settings.role_sections import LoraSection

NAMED = {"rank": 8, "publish": "adapters", "adapters": ("code", "math")}


def test_targets_go_by_either_name() -> None:
    assert LoraSection().modules == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert LoraSection(target_modules=("o_proj", "down_proj")).modules == (
        "linear_proj",
        "linear_fc2",
    )
    fused = LoraSection(target_modules=("k_proj", "v_proj", "q_proj", "linear_fc1"))
    assert fused.modules == ("linear_qkv", "linear_fc1")


def test_part_of_a_fused_matrix_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ValidationError, match="all of q_proj, k_proj, v_proj .* k_proj is missing"):
        LoraSection(target_modules=("q_proj", "v_proj"))


def test_no_target_and_an_unknown_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="must name a matrix"):
        LoraSection(target_modules=())
    with pytest.raises(ValidationError, match="target_modules"):
        LoraSection(target_modules=("lm_head",))


PUBLISHED = {"rank": 8, "publish": "adapters"}
ATTENTION = {"target_modules": ("linear_qkv", "o_proj")}
FUSED = {"num_experts": 4, "has_fused_experts": True}
DELTA = {"num_experts": 4, "has_delta_nets": True}
DENSE_DELTA = {"num_experts": 0, "has_delta_nets": True}
NO_FUSED = "lora.target_modules must leave linear_fc1 and linear_fc2 out for a"


@pytest.mark.parametrize(
    ("section", "model", "problem"),
    [
        ({"rank": 8}, {"num_experts": 4}, ""),
        (PUBLISHED, {"num_experts": 0}, ""),
        (PUBLISHED, {"num_experts": 4}, "lora.publish must be merged with adapters on experts, go"),
        (NAMED, {"num_experts": 4}, "lora.adapters must be empty with adapters on experts, got co"),
        (PUBLISHED | ATTENTION, {"num_experts": 4}, ""),
        (NAMED | ATTENTION, {"num_experts": 4}, ""),
        # Files hold the experts as one tensor; that is told before anything else.
        ({"rank": 8}, FUSED, NO_FUSED),
        (PUBLISHED, FUSED, NO_FUSED),
        (NAMED, FUSED, NO_FUSED),
        ({}, FUSED, ""),
        ({"rank": 8} | ATTENTION, FUSED, ""),
        ({"rank": 8}, DELTA, ""),
        (PUBLISHED | ATTENTION, DELTA, "lora.publish must be merged for a model with delta nets, "),
        (NAMED | ATTENTION, DENSE_DELTA, "lora.adapters must be empty for a model with delta nets"),
        ({"rank": 8}, {"num_experts": 4, "latent_tp": 1}, ""),
        ({}, {"num_experts": 4, "latent_tp": 2}, ""),
        (
            {"rank": 8},
            {"num_experts": 4, "latent_tp": 2},
            "learner.parallel.tp must be 1 for adapters in a model with latent attention, got 2",
        ),
        (
            PUBLISHED | {"target_modules": ("linear_qkv",)},
            {"num_experts": 4, "latent_tp": 1},
            "lora.publish must be merged for a model with latent attention, got",
        ),
        (
            NAMED,
            {"num_experts": 0, "latent_tp": 1},
            "lora.adapters must be empty for a model with latent attention, got code, math: ",
        ),
    ],
)
def test_adapters_that_a_model_cannot_have_or_publish_are_refused(section, model, problem):
    found = list(LoraSection(**section).problems(**model))
    assert len(found) == bool(problem), found
    assert "".join(found).startswith(problem)


def test_adapters_alone_are_published_only_where_there_are_some_that_vllm_takes() -> None:
    assert not LoraSection(rank=8).publishes_adapters
    assert LoraSection(rank=512, publish="adapters").publishes_adapters
    for rank in (0, 513):
        with pytest.raises(ValidationError, match=f"lora.rank must be 1 to 512 .*, got {rank}"):
            LoraSection(rank=rank, publish="adapters")


def test_several_adapters_reach_servers_apart_and_have_names_that_differ() -> None:
    assert LoraSection(**NAMED).adapters == ("code", "math")
    with pytest.raises(ValidationError, match="lora.publish must be adapters with several .*'merg"):
        LoraSection(**NAMED | {"publish": "merged"})
    with pytest.raises(ValidationError, match="lora.adapters must differ, got a, a"):
        LoraSection(**NAMED | {"adapters": ("a", "a")})
    for wrong in ("", "a/b", "a b", "../a", "x" * 65):
        with pytest.raises(ValidationError, match="adapters"):
            LoraSection(**NAMED | {"adapters": (wrong,)})
    with pytest.raises(ValidationError, match="at most 16"):
        LoraSection(**NAMED | {"adapters": tuple(f"a{n}" for n in range(17))})
