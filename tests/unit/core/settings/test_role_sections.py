import pytest
from pydantic import ValidationError
from slipstream.core.models.model_rules import adapter_problems
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.role_sections import LoraSection

NAMED = {"rank": 8, "publish": "adapters", "adapters": ("code", "math")}


def test_targets_go_by_either_name() -> None:
    assert LoraSection().modules == (
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    )
    assert LoraSection(rank=8, target_modules=("o_proj", "down_proj")).modules == (
        "linear_proj",
        "linear_fc2",
    )
    fused = LoraSection(
        rank=8, target_modules=("k_proj", "v_proj", "q_proj", "linear_fc1")
    )
    assert fused.modules == ("linear_qkv", "linear_fc1")


@pytest.mark.parametrize(
    "table", [{"alpha": 64.0}, {"target_modules": ("o_proj",)}], ids=str
)
def test_adapters_that_would_not_be_trained_are_refused(table: dict) -> None:
    (name,) = table
    with pytest.raises(
        ValidationError, match=f"rank must be given with lora.{name}: without it"
    ):
        LoraSection(**table)
    assert LoraSection(rank=0, **table).rank == 0


def test_part_of_a_fused_matrix_is_refused_with_what_is_missing() -> None:
    with pytest.raises(
        ValidationError, match="all of q_proj, k_proj, v_proj .* k_proj is missing"
    ):
        LoraSection(rank=8, target_modules=("q_proj", "v_proj"))


def test_no_target_and_an_unknown_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="must name a matrix"):
        LoraSection(rank=8, target_modules=())
    with pytest.raises(ValidationError, match="target_modules"):
        LoraSection(rank=8, target_modules=("lm_head",))


PUBLISHED = {"rank": 8, "publish": "adapters"}
ATTENTION = {"target_modules": ("linear_qkv", "o_proj")}
DENSE = {"architectures": ["Qwen3ForCausalLM"]}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
FUSED = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}
DELTA = {"architectures": ["Qwen3_5ForCausalLM"]}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 4,
    "kv_lora_rank": 8,
}
KIMI = LATENT | {"architectures": ["KimiK25ForConditionalGeneration"]}
NO_FUSED = "lora.target_modules must leave linear_fc1 and linear_fc2 out for a"


NO_LATENT = "for a model with latent attention, got"
# Section, model, tensor parallel ranks, and the beginning of the problem.
ADAPTERS = [
    ({"rank": 8}, EXPERTS, 2, ""),
    (PUBLISHED, DENSE, 2, ""),
    (PUBLISHED, EXPERTS, 2, "lora.publish must be merged with adapters on experts, go"),
    (NAMED, EXPERTS, 2, "lora.adapters must be empty with adapters on experts, got co"),
    (PUBLISHED | ATTENTION, EXPERTS, 2, ""),
    (NAMED | ATTENTION, EXPERTS, 2, ""),
    # Files hold the experts as one tensor; that is told before anything else.
    *((section, FUSED, 2, NO_FUSED) for section in ({"rank": 8}, PUBLISHED, NAMED)),
    ({}, FUSED, 2, ""),
    ({"rank": 8} | ATTENTION, FUSED, 2, ""),
    ({"rank": 8}, DELTA, 2, ""),
    (NAMED, DELTA, 2, ""),
    ({"rank": 8}, LATENT, 1, ""),
    ({}, LATENT, 2, ""),
    (
        {"rank": 8},
        LATENT,
        2,
        "learner.parallel.tp must be 1 for adapters in a model with latent",
    ),
    ({"rank": 8} | ATTENTION, KIMI, 1, ""),
    (
        {"rank": 8},
        KIMI,
        1,
        f"{NO_FUSED} KimiK25ForConditionalGeneration: PEFT does not find",
    ),
    (
        PUBLISHED | {"target_modules": ("linear_qkv",)},
        LATENT,
        1,
        "lora.publish must be merged",
    ),
    (
        NAMED | ATTENTION,
        LATENT,
        1,
        f"lora.adapters must be empty {NO_LATENT} code, math: ",
    ),
]


@pytest.mark.parametrize(("section", "model", "tp", "problem"), ADAPTERS)
def test_adapters_that_a_model_cannot_have_or_publish_are_refused(
    section, model, tp, problem
):
    problems = list(adapter_problems(LoraSection(**section), ModelSizes.of(model), tp))
    assert len(problems) == bool(problem), problems
    assert "".join(problems).startswith(problem)


def test_adapters_alone_are_published_only_where_there_are_some_that_vllm_takes() -> (
    None
):
    assert not LoraSection(rank=8).publishes_adapters
    assert LoraSection(rank=512, publish="adapters").publishes_adapters
    for rank in (0, 513):
        with pytest.raises(
            ValidationError, match=f"lora.rank must be 1 to 512 .*, got {rank}"
        ):
            LoraSection(rank=rank, publish="adapters")


def test_several_adapters_reach_servers_apart_and_have_names_that_differ() -> None:
    assert LoraSection(**NAMED).adapters == ("code", "math")
    with pytest.raises(
        ValidationError, match="lora.publish must be adapters with several .*'merg"
    ):
        LoraSection(**NAMED | {"publish": "merged"})
    with pytest.raises(ValidationError, match="lora.adapters must differ, got a, a"):
        LoraSection(**NAMED | {"adapters": ("a", "a")})
    for wrong in ("", "a/b", "a b", "../a", "x" * 65):
        with pytest.raises(ValidationError, match="adapters"):
            LoraSection(**NAMED | {"adapters": (wrong,)})
    with pytest.raises(ValidationError, match="at most 16"):
        LoraSection(**NAMED | {"adapters": tuple(f"a{n}" for n in range(17))})
