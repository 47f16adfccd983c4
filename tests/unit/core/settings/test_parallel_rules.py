import itertools
from typing import Any

import pytest
from slipstream.core.models.model_rules import layout_problems, model_problems
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.parallel_rules import (
    RankLayout,
    table_problems,
    world_problems,
)
from slipstream.core.settings.sections import LearnerSection, ParallelSection
from support.fakes.small_configs import refusals


def layout_of(world_size: int, sizes: dict[str, int]) -> RankLayout:
    return RankLayout.of(ParallelSection(**sizes), world_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world_size", "sizes", "dp", "expert_dp"),
    [
        (8, {"tp": 2, "pp": 4}, 1, 1),
        # etp is tp unless it is given, and neither grid divides the other.
        (32, {"tp": 2, "ep": 8}, 16, 2),
        (32, {"tp": 2, "ep": 8, "etp": 1}, 16, 4),
        (32, {"tp": 2, "cp": 4, "ep": 8}, 4, 2),
        (32, {"tp": 2, "pp": 4, "ep": 8, "etp": 1}, 4, 1),
        (6, {"tp": 3, "ep": 2, "etp": 1}, 2, 3),
    ],
)
def test_data_parallel_sizes_are_what_the_other_sizes_leave(
    world_size, sizes, dp, expert_dp
):
    layout = layout_of(world_size, sizes)
    assert (layout.dp, layout.expert_dp) == (dp, expert_dp)


def test_description_names_every_group_that_has_more_than_one_rank() -> None:
    assert layout_of(8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}).describe(
        has_experts=True
    ) == (
        "8 ranks: tp 2, pp 2, cp 1, dp 2; experts: ep 2, etp 1, dp 2\n"
        "tp: 4 x 2: [0 1] [2 3] [4 5] [6 7]\n"
        "dp: 4 x 2: [0 2] [1 3] [4 6] [5 7]\n"
        "pp: 4 x 2: [0 4] [1 5] [2 6] [3 7]\n"
        "ep: 4 x 2: [0 1] [2 3] [4 5] [6 7]\n"
        "expert_dp: 4 x 2: [0 2] [1 3] [4 6] [5 7]"
    )
    assert (
        layout_of(1, {}).describe(has_experts=False) == "1 rank: tp 1, pp 1, cp 1, dp 1"
    )


def test_description_of_many_ranks_is_short() -> None:
    lines = (
        layout_of(256, {"tp": 8, "pp": 16, "cp": 2})
        .describe(has_experts=False)
        .splitlines()
    )
    assert lines[1] == (
        "tp: 32 x 8: [0-7] [8-15] [16-23] [24-31] [32-39] [40-47] [48-55] ... [248-255]"
    )
    assert lines[3].startswith("pp: 16 x 16: [0 16 32 .. 240] [1 17 33 .. 241]")
    assert max(map(len, lines)) < 200


DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
}
MIXTURE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def problems(learner: dict[str, Any], sizes: dict[str, Any]) -> list[str]:
    section = LearnerSection.model_validate(learner)
    model = ModelSizes.of(sizes)
    return list(
        itertools.chain(
            world_problems(section),
            table_problems(section),
            model_problems(model),
            layout_problems(model, section.parallel, section.transformer),
        )
    )


# world size, parallel sizes, whether the model is a mixture
POSSIBLE: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, DENSE),
    (6, {"tp": 2}, DENSE),
    (8, {"tp": 4, "pp": 2, "vpp": 4}, DENSE),
    (16, {"tp": 2, "cp": 4, "pp": 2}, DENSE),
    (2, {"tp": 2, "etp": 2}, DENSE),
    (1, {}, MIXTURE),
    (8, {"ep": 8}, MIXTURE),
    (8, {"tp": 2, "ep": 4}, MIXTURE),
    (8, {"tp": 2, "ep": 8, "etp": 1}, MIXTURE),
    (16, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, MIXTURE),
    # DP 4, TP 2, EP 8 on 32 ranks, in each of its readings.
    (32, {"tp": 2, "cp": 4, "ep": 8}, MIXTURE),
    (32, {"tp": 2, "ep": 8}, MIXTURE),
    (32, {"tp": 2, "ep": 8, "etp": 1}, MIXTURE),
    (32, {"tp": 2, "pp": 4, "ep": 8, "etp": 1}, MIXTURE),
]


@pytest.mark.parametrize(("world_size", "parallel", "sizes"), POSSIBLE)
def test_possible_layout_has_no_problem(world_size, parallel, sizes):
    assert problems({"world_size": world_size, "parallel": parallel}, sizes) == []


IMPOSSIBLE: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
    (
        6,
        {"tp": 4},
        DENSE,
        "learner.world_size must be a multiple of tp * pp * cp = 4, got 6",
    ),
    (12, {"tp": 2, "cp": 2, "pp": 2}, DENSE, "a multiple of tp * pp * cp = 8, got 12"),
    (4, {"ep": 8}, MIXTURE, "a multiple of ep * etp * pp = 8, got 4"),
    (8, {"tp": 2, "ep": 8}, MIXTURE, "a multiple of ep * etp * pp = 16, got 8"),
    (8, {"pp": 2, "ep": 8}, MIXTURE, "a multiple of ep * etp * pp = 16, got 8"),
    (3, {"tp": 1, "etp": 2}, MIXTURE, "a multiple of ep * etp * pp = 2, got 3"),
    (2, {"vpp": 2}, DENSE, "learner.parallel.vpp needs pp > 1, got vpp = 2 and pp = 1"),
    (
        2,
        {"pp": 2, "vpp": 1},
        DENSE,
        "learner.parallel.vpp must be 2 or more, or left out, got 1",
    ),
    (
        3,
        {"tp": 3},
        DENSE,
        "learner.parallel.tp must divide the model's 8 attention heads, got 3",
    ),
    (
        8,
        {"tp": 8},
        DENSE,
        "learner.parallel.tp must divide the model's 4 key-value heads, got 8",
    ),
    (
        4,
        {"tp": 4},
        DENSE | {"intermediate_size": 98},
        "learner.parallel.tp must divide the interm",
    ),
    (
        3,
        {"pp": 3},
        DENSE,
        "learner.parallel.pp * vpp must divide the model's 8 layers, got 3",
    ),
    (
        4,
        {"pp": 4, "vpp": 4},
        DENSE,
        "pp * vpp must divide the model's 8 layers, got 16",
    ),
    (
        2,
        {"ep": 2},
        DENSE,
        "learner.parallel.ep must be 1: the model has no experts, got 2",
    ),
    (
        2,
        {"tp": 2, "etp": 1},
        DENSE,
        "learner.parallel.etp must be left out: the model has no expe",
    ),
    (
        3,
        {"ep": 3},
        MIXTURE,
        "learner.parallel.ep must divide the model's 8 experts, got 3",
    ),
    (
        16,
        {"ep": 16},
        MIXTURE,
        "learner.parallel.ep must divide the model's 8 experts, got 16",
    ),
    (
        16,
        {"etp": 16},
        MIXTURE,
        "learner.parallel.etp (None: tp) must divide the experts' intermed",
    ),
]


@pytest.mark.parametrize(("world_size", "parallel", "sizes", "message"), IMPOSSIBLE)
def test_impossible_layout_is_named_with_its_rule(world_size, parallel, sizes, message):
    lines = problems({"world_size": world_size, "parallel": parallel}, sizes)
    assert any(message in problem for problem in lines), lines


def test_ranks_of_a_node_divide_the_world() -> None:
    assert problems({"world_size": 6, "ranks_per_node": 4}, DENSE) == [
        "learner.world_size must be a multiple of ranks_per_node, got 6 and 4"
    ]


def test_micro_batches_hold_pairs_of_chunks_under_context_parallelism() -> None:
    assert problems(
        {"world_size": 2, "micro_batch_tokens": 95, "parallel": {"cp": 2}}, DENSE
    ) == [
        "learner.micro_batch_tokens must be even with learner.parallel.cp > 1, as each sequence is "
        "cut into 2 * cp equal chunks, got 95"
    ]
    assert problems({"micro_batch_tokens": 95}, DENSE) == []


FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
TEXT = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
# transformer settings, parallel sizes, number of layers, part of the message or "" where it fits
STAGES: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({FIRST: 2}, {"pp": 3}, 8, ""),
    ({FIRST: 2}, {"pp": 3}, 7, "the 5 layers between the first"),
    ({FIRST: 3, LAST: 3}, {"pp": 3}, 8, ""),
    (
        {FIRST: 3, LAST: 3},
        {"pp": 2},
        8,
        "the 2 layers between the first and the last stage",
    ),
    ({LAST: 0}, {"pp": 2}, 8, "must be multiples of vpp"),
    (
        {FIRST: 3},
        {"pp": 2, "vpp": 2},
        9,
        "must be multiples of vpp, got 3 and None with vpp = 2",
    ),
    ({TEXT: True}, {"pp": 4}, 7, ""),
    ({TEXT: True}, {"pp": 4}, 8, "layers with 1 for account"),
    ({TEXT: True, LOSS: True}, {"pp": 16}, 126, ""),
    ({LOSS: True, FIRST: 3}, {"pp": 2}, 8, f"{LOSS} excludes {FIRST}"),
    ({"pipeline_model_parallel_layout": "Et*3|t*5L"}, {"pp": 2}, 7, ""),
]


@pytest.mark.parametrize(("transformer", "parallel", "layers", "message"), STAGES)
def test_layers_are_shared_out_over_the_stages_as_megatron_does(
    transformer: dict[str, Any], parallel: dict[str, Any], layers: int, message: str
) -> None:
    learner = {
        "world_size": parallel["pp"],
        "parallel": parallel,
        "transformer": transformer,
    }
    lines = problems(learner, DENSE | {"num_hidden_layers": layers})
    assert len(lines) == bool(message), lines
    assert message in "".join(lines)


# settings of the learner, part of the message
TABLES: list[tuple[dict[str, Any], str]] = [
    (
        {"ddp": {"use_megatron_fsdp": True}},
        "learner.ddp.use_megatron_fsdp is not supported",
    ),
    (
        {"ddp": {"check_for_nan_in_grad": True}},
        "ddp.check_for_nan_in_grad is not supported",
    ),
    *refusals("""
ddp = {overlap_param_gather = true, overlap_grad_reduce = true}
    learner.ddp.overlap_param_gather needs ddp.use_distributed_optimizer = true
ddp = {overlap_param_gather = true, use_distributed_optimizer = true}
    learner.ddp.overlap_param_gather needs learner.ddp.overlap_grad_reduce = true
ddp.num_distributed_optimizer_instances = 2
    num_distributed_optimizer_instances must be 1, got 2
optimizer.optimizer = "sgd", ddp.use_distributed_optimizer = true
    learner.ddp.use_distributed_optimizer must be false with optimizer.optimizer sgd
ddp.data_parallel_sharding_strategy = "optim_grads_params"
    learner.ddp.data_parallel_sharding_strategy is not supported
ddp.megatron_fsdp_main_params_dtype = "bfloat16"
    learner.ddp.megatron_fsdp_main_params_dtype is not supported
optimizer.log_num_zeros_in_grad = true
    learner.optimizer.log_num_zeros_in_grad is not supported
optimizer.overlap_param_gather = true
    learner.optimizer.overlap_param_gather: set learner.ddp.overlap_param_gather instead
optimizer.use_precision_aware_optimizer = true
    use_precision_aware_optimizer needs learner.ddp.use_distributed_optimizer = true
optimizer.optimizer_cpu_offload = true
    optimizer_cpu_offload needs learner.ddp.use_distributed_optimizer = true
optimizer.optimizer = "muon", ddp = {overlap_param_gather = true, overlap_grad_reduce = true}
    overlap_param_gather must be false with learner.optimizer.optimizer muon
optimizer = {optimizer = "muon", optimizer_cpu_offload = true}
    learner.optimizer.optimizer_cpu_offload needs learner.optimizer.optimizer adam, got 'muon'
optimizer = {optimizer = "muon", use_precision_aware_optimizer = true}
    use_precision_aware_optimizer needs learner.optimizer.optimizer adam, got 'muon'
optimizer.optimizer_offload_fraction = 1.5
    optimizer_offload_fraction must be 0 to 1, got 1.5
transformer.recompute_num_layers = 1
    learner.transformer.recompute_num_layers needs recompute_granularity = 'full'
transformer.recompute_granularity = "selective", transformer.recompute_method = "block"
    learner.transformer.recompute_method needs recompute_granularity = 'full'
transformer.moe_token_dispatcher_type = "allgather"
    must be alltoall or flex: others refuse sequences of different lengths, got 'allgather'
transformer.moe_router_enable_expert_bias = true
    the policy that is trained must be the one that samples
transformer.overlap_moe_expert_parallel_comm = true
    learner.transformer.overlap_moe_expert_parallel_comm is not supported
transformer.microbatch_group_size_per_vp_stage = 4, world_size = 2, parallel = {pp = 2, vpp = 2}
    microbatch_group_size_per_vp_stage must be pp: micro batches come in
    multiples of it, got 4 and 2
"""),
]


@pytest.mark.parametrize(("learner", "message"), TABLES)
def test_settings_for_megatron_that_contradict_each_other_are_refused(learner, message):
    lines = problems(learner, DENSE)
    assert len(lines) == 1, lines
    assert message in lines[0]


def test_settings_for_megatron_that_go_together_are_not_refused() -> None:
    learner = {
        "ddp": {
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_grad_reduce": True,
        },
        "optimizer": {
            "use_precision_aware_optimizer": True,
            "optimizer_offload_fraction": 0.5,
        },
        "transformer": {
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
        },
    }
    assert problems(learner, DENSE) == []


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, True),
        ({"transformer": {"recompute_granularity": "selective"}}, False),
        ({"transformer": {"cpu_offloading": True}}, False),
        ({"transformer": {"cpu_offloading": False}}, True),
    ],
)
def test_recomputation_is_planned_unless_a_setting_decides_it(learner, expected):
    assert LearnerSection(**learner).plans_recompute is expected


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, False),
        ({"world_size": 2}, True),
        ({"world_size": 2, "parallel": {"cp": 2}}, True),
        ({"world_size": 2, "parallel": {"tp": 2}}, False),
        ({"world_size": 4, "parallel": {"pp": 2}}, True),
        ({"world_size": 2, "optimizer": {"optimizer": "sgd"}}, False),
        ({"world_size": 2, "ddp": {"use_distributed_optimizer": False}}, False),
        ({"ddp": {"use_distributed_optimizer": True}}, True),
    ],
)
def test_replicas_split_adams_state_unless_a_setting_decides_it(learner, expected):
    assert LearnerSection(**learner).use_distributed_optimizer is expected


def test_tensor_parallel_ranks_split_the_tokens_unless_a_setting_decides_it() -> None:
    learner: dict[str, Any] = {"world_size": 2, "parallel": {"tp": 2}}
    same = {"transformer": {"sequence_parallel": False}}
    assert not LearnerSection().sequence_parallel
    assert LearnerSection(**learner).sequence_parallel
    assert not LearnerSection(**learner, **same).sequence_parallel
    assert problems(learner | same, DENSE) == []
    assert problems(learner | same, MIXTURE) == [
        "learner.transformer.sequence_parallel must be true: Megatron trains mixtures of experts "
        "with tp > 1 in no other way, got tp = 2"
    ]
    assert problems({"transformer": {"sequence_parallel": True}}, DENSE) == [
        "learner.transformer.sequence_parallel needs tp > 1, got tp = 1"
    ]


# Fields that differ in config.json, part of the message.
MODELS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": None}, "of architecture without a name, which cannot be loaded"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ({"use_sliding_window": True}, "a sliding window"),
    ({"sliding_window": 4096}, "a sliding window"),
    (
        {"rope_scaling": {"type": "longrope"}},
        "transformers chooses factors for each sequence",
    ),
    ({"rope_scaling": {"type": "proportional"}}, "got 'proportional': was not tested"),
    ({"decoder_sparse_step": 2}, "dense layers in between"),
    ({"mlp_only_layers": [0]}, "dense layers in between"),
    (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok must be 1 to the 8 experts, got 9",
    ),
    ({"num_experts_per_tok": 1}, "leaves the router no gradient"),
    *refusals("""
architectures = ["GPT2LMHeadModel"], num_experts = 0
    a model of architecture GPT2LMHeadModel, which cannot be loaded
architectures = ["Gemma2ForCausalLM"], num_experts = 0
    a model of architecture Gemma2ForCausalLM, which cannot be loaded
architectures = ["DeepseekV2ForCausalLM"]
    a mixture of experts of architecture DeepseekV2ForCausalLM, which cannot be loaded
architectures = ["NemotronHForCausalLM"], num_experts = 0
    a model of architecture NemotronHForCausalLM, which cannot be loaded
architectures = ["PhimoeForCausalLM"]
    a mixture of experts of architecture PhimoeForCausalLM, which cannot be loaded; known are
    DeepseekV3ForCausalLM,
rope_parameters.rope_type = "dynamic"
    the rope_type must be one of default, linear, llama3, yarn, got 'dynamic': transformers scales
    by the length of each sequence
architectures = ["MixtralForCausalLM"]
    a mixture of experts of architecture MixtralForCausalLM, which cannot be loaded
"""),
]


@pytest.mark.parametrize(("change", "message"), MODELS)
def test_model_that_cannot_be_trained_is_refused(
    change: dict[str, Any], message: str
) -> None:
    lines = problems({}, MIXTURE | change)
    assert len(lines) == 1, lines
    assert message in lines[0]


def test_a_window_that_is_switched_off_is_none() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False}
    assert problems({}, MIXTURE | off) == []
    assert problems({}, MIXTURE | {"sliding_window": None}) == []


def test_gpt_oss_normalizes_experts_without_saying_so() -> None:
    silent = {key: value for key, value in MIXTURE.items() if key != "norm_topk_prob"}
    single_expert = silent | {"num_experts_per_tok": 1}
    assert problems({}, single_expert) == []
    (problem,) = problems({}, single_expert | {"architectures": ["GptOssForCausalLM"]})
    assert "leaves the router no gradient" in problem


def test_a_shared_expert_is_split_evenly() -> None:
    learner = {"world_size": 4, "parallel": {"tp": 4}}
    assert problems(learner, MIXTURE | {"shared_expert_intermediate_size": 32}) == []
    (problem,) = problems(learner, MIXTURE | {"shared_expert_intermediate_size": 30})
    assert problem.endswith(
        "must divide the shared expert's intermediate size of 30, got 4"
    )


def test_old_and_new_forms_of_rope_settings_are_read() -> None:
    for rope in (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "llama3"}, "rope_theta": 5e5},
        {"rope_scaling": None, "rope_theta": 1e6},
    ):
        assert problems({}, DENSE | rope) == []
