import pytest
from pydantic import ValidationError
from slipstream.core.settings.lora_section import LoraSection

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


def test_adapters_of_experts_reach_servers_merged() -> None:
    assert list(LoraSection(rank=8).problems(num_experts=4)) == []
    section = LoraSection(rank=8, publish="adapters")
    assert list(section.problems(num_experts=0)) == []
    (problem,) = section.problems(num_experts=4)
    assert problem.startswith(
        "lora.publish must be merged with adapters on experts, got 'adapters'"
    )
    (problem,) = LoraSection(**NAMED).problems(num_experts=4)
    assert problem.startswith("lora.adapters must be empty with adapters on experts, got code, mat")
    attention = LoraSection(rank=8, publish="adapters", target_modules=("linear_qkv", "o_proj"))
    assert list(attention.problems(num_experts=4)) == []


def test_experts_of_which_files_hold_one_tensor_get_no_adapters() -> None:
    (problem,) = LoraSection(rank=8).problems(num_experts=4, has_fused_experts=True)
    assert problem.startswith("lora.target_modules must leave linear_fc1 and linear_fc2 out for a")
    assert list(LoraSection().problems(num_experts=4, has_fused_experts=True)) == []
    attention = LoraSection(rank=8, target_modules=("linear_qkv", "o_proj"))
    assert list(attention.problems(num_experts=4, has_fused_experts=True)) == []


def test_adapters_on_delta_nets_reach_servers_merged() -> None:
    assert list(LoraSection(rank=8).problems(num_experts=4, has_delta_nets=True)) == []
    section = LoraSection(rank=8, publish="adapters", target_modules=("linear_qkv", "o_proj"))
    (problem,) = section.problems(num_experts=4, has_delta_nets=True)
    assert problem.startswith("lora.publish must be merged for a model with delta nets, got 'ad")


def test_adapters_on_latent_attention_reach_servers_merged_and_from_whole_matrices() -> None:
    assert list(LoraSection(rank=8).problems(num_experts=4, latent_tp=1)) == []
    assert list(LoraSection().problems(num_experts=4, latent_tp=2)) == []
    (problem,) = LoraSection(rank=8).problems(num_experts=4, latent_tp=2)
    assert problem == (
        "learner.parallel.tp must be 1 for adapters in a model with latent attention, got 2"
    )
    section = LoraSection(rank=8, publish="adapters", target_modules=("linear_qkv",))
    (problem,) = section.problems(num_experts=4, latent_tp=1)
    assert problem.startswith("lora.publish must be merged for a model with latent attention, got")
    (problem,) = LoraSection(**NAMED).problems(num_experts=0, latent_tp=1)
    assert problem.startswith(
        "lora.adapters must be empty for a model with latent attention, got code, math: "
    )


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


def test_several_adapters_are_refused_by_their_own_name_where_none_can_be_published() -> None:
    section = LoraSection(**NAMED | {"target_modules": ("linear_qkv",)})
    for kind in ({"has_delta_nets": True}, {"latent_tp": 1}):
        (problem,) = section.problems(num_experts=0, **kind)
        assert problem.startswith("lora.adapters must be empty for a model with")
        assert "got code, math" in problem
    one = LoraSection(rank=4, publish="adapters", target_modules=("linear_qkv",))
    (problem,) = one.problems(num_experts=0, has_delta_nets=True)
    assert problem.startswith("lora.publish must be merged for a model with delta nets")


def test_adapters_on_experts_in_one_tensor_are_refused_first() -> None:
    for section in (LoraSection(rank=4, publish="adapters"), LoraSection(**NAMED)):
        (problem,) = section.problems(num_experts=4, has_fused_experts=True)
        assert problem.startswith("lora.target_modules must leave")
