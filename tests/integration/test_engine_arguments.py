"""The table `rollout_server.engine` against vLLM's real arguments."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from slipstream.core.errors import ConfigError
from slipstream.core.extension import installed
from slipstream.core.models.images import load_processor
from slipstream.core.models.model_sizes import decoder_table
from slipstream.core.settings.config import Config
from slipstream.core.settings.engine_table import OWNED
from slipstream.core.settings.sections import SamplingSection
from slipstream.extensions.fast_decoding.server import (
    arguments,
    chunking_scheduler,
    decode_attention,
)
from slipstream.extensions.fast_decoding.server.arguments import (
    ATTENTION,
    DECODE_BACKEND,
    GPU_WORKER,
    SAMPLER,
    disabled_features,
    engine_arguments,
)
from slipstream.rollout_server.vllm.engine_arguments import (
    check_precision,
    engine_config,
    own_values,
    tower_values,
)
from slipstream.rollout_server.vllm.engine_scheduler import (
    EngineScheduler,
    scheduler_class,
)
from slipstream.rollout_server.vllm.passed_table import (
    argument_types,
    parser_problems,
    table_problems,
)
from support.fakes.parity_models import make_mixture
from support.fakes.small_configs import NGRAM, small_config
from support.fakes.tiny_models import SMALLEST, make_model_folder, make_seeing_model
from support.ranks.loader_ranks import in_ranks
from support.rigs.forking_engine import image_questions
from vllm import AsyncEngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.async_scheduler import AsyncScheduler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), **SMALLEST)


def config_with(
    model: Path,
    engine: dict[str, object],
    lora: dict[str, object] | None = None,
    *,
    settings: dict[str, object] | None = None,
) -> Config:
    server = {"max_episodes": 16, "enforce_eager": True, "engine": engine} | (
        settings or {}
    )
    return small_config(
        model={"path": str(model), "dtype": "float32"},
        sampling={"max_reply_tokens": 8, "max_episode_tokens": 64},
        rollout_server=server,
        lora=lora or {},
    )


def test_settings_reach_vllm_by_name(model: Path) -> None:
    passed = {"max_num_batched_tokens": 192, "block_size": 32, "load_format": "dummy"}
    settings = engine_config(config_with(model, passed), seed=3)
    assert settings.scheduler_config.max_num_batched_tokens == 192
    assert settings.cache_config.block_size == 32
    assert settings.load_config.load_format == "dummy"
    assert settings.scheduler_config.max_num_seqs == 16
    assert settings.model_config.logprobs_mode == "processed_logprobs"


def in_bfloat16(config: Config) -> Config:
    """Returns the settings of a run in the type in which vLLM computes delta nets on a CPU."""
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    return config.model_copy(update={"model": model})


def test_states_of_delta_nets_are_kept_in_float32_as_the_learner_computes_them(
    model, tmp_path
):
    delta_nets = make_model_folder(tmp_path / "model", **SMALLEST)
    architectures = ["Qwen3NextForCausalLM"]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    transformers.Qwen3NextConfig(**sizes, architectures=architectures).save_pretrained(
        delta_nets
    )
    # On a CPU vLLM chooses the same by itself, so what it was asked for is looked at.
    config = in_bfloat16(config_with(delta_nets, {}))
    assert own_values(config, seed=3)["mamba_ssm_cache_dtype"] == "float32"
    assert "mamba_ssm_cache_dtype" not in own_values(config_with(model, {}), seed=3)
    assert engine_config(config, seed=3).cache_config.mamba_ssm_cache_dtype == "float32"
    setting = in_bfloat16(
        config_with(delta_nets, {"mamba_ssm_cache_dtype": "bfloat16"})
    )
    with pytest.raises(
        ConfigError, match='model.dtype must be "bfloat16" .* delta nets .* CPU'
    ):
        engine_config(config_with(delta_nets, {}), seed=3)
    assert (
        engine_config(setting, seed=3).cache_config.mamba_ssm_cache_dtype == "bfloat16"
    )


@pytest.mark.parametrize(("dtype", "is_told"), [("float32", True), ("bfloat16", False)])
def test_latent_attention_in_float32_is_none_for_amx(
    tmp_path: Path, dtype: str, is_told: bool
):
    folder = make_model_folder(tmp_path / "model", **SMALLEST)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**table, "kv_lora_rank": 8}))
    config = small_config(model={"path": str(folder), "dtype": dtype})
    assert ("attention_backend" in own_values(config, 0)) is is_told


def test_a_cache_on_a_cpu_has_room_for_an_episode_or_what_it_is_given(
    model: Path,
) -> None:
    cache_config = engine_config(config_with(model, {}), seed=3).cache_config
    assert cache_config.kv_cache_memory_bytes == 1 << 30
    passed = {"kv_cache_memory_bytes": 1 << 28}
    cache_config = engine_config(config_with(model, passed), seed=3).cache_config
    assert cache_config.kv_cache_memory_bytes == 1 << 28


@pytest.mark.parametrize(
    ("passed", "interval"), [({}, 1), ({"prefill_schedule_interval": 8}, 8)]
)
def test_prompts_of_an_eager_engine_wait_only_if_vllm_is_told_so(
    model, passed, interval
):
    settings = engine_config(config_with(model, passed), seed=3).scheduler_config
    assert settings.prefill_schedule_interval == interval


def test_drafts_reach_vllm(model: Path) -> None:
    passed = {"speculative_config": NGRAM}
    speculative_config = engine_config(
        config_with(model, passed), seed=0
    ).speculative_config
    assert (speculative_config.method, speculative_config.num_speculative_tokens) == (
        "ngram",
        4,
    )
    wrong = {"speculative_config": {"method": "ngram", "num_tokens": 4}}
    with pytest.raises(ConfigError, match=r"vLLM refuses its settings: .*num_tokens"):
        engine_config(config_with(model, wrong), seed=0)


def test_logits_have_the_type_that_the_learners_have(model: Path) -> None:
    config = config_with(model, {})
    section = config.model.model_copy(update={"dtype": "bfloat16"})
    settings = engine_config(config.model_copy(update={"model": section}), seed=3)
    assert settings.model_config.head_dtype == torch.float32


def config_in_fp8(model: Path, method: str) -> Config:
    config = config_with(
        model, {"kv_cache_dtype": "fp8"}, settings={"quantization": "off"}
    )
    server = config.rollout_server.model_copy(update={"quantization": method})
    section = config.model.model_copy(update={"dtype": "bfloat16"})
    return config.model_copy(update={"model": section, "rollout_server": server})


def test_precisions_reach_vllm_by_their_names(model: Path) -> None:
    plain = engine_config(config_with(model, {}), seed=3)
    assert plain.model_config.quantization is None
    settings = engine_config(config_in_fp8(model, "fp8_per_channel"), seed=3)
    assert settings.quant_config.get_name() == "online"
    assert settings.cache_config.cache_dtype == "fp8"


def test_a_gpu_that_cannot_compute_in_fp8_refuses_in_one_line() -> None:
    # vLLM's platform here is one that has no FP8.
    with pytest.raises(ConfigError) as refused:
        check_precision("fp8_per_channel")
    assert str(refused.value) == (
        "rollout_server.quantization = 'fp8_per_channel' needs a GPU of compute capability 8.9 or "
        "above; set 'off'"
    )
    check_precision("off")


BITS = "algorithm.agreement = 'bits' needs vLLM's own"
ENGINE_TABLE = "rollout_server.engine"


@pytest.mark.parametrize(
    ("hopper", "engine", "settings", "attention", "sampler"),
    [
        (True, {}, {}, None, None),
        (False, {}, {}, "the GPU is not of the Hopper family", None),
        (
            True,
            {"attention_config": {"backend": "FLASH_ATTN"}},
            {},
            f"{ENGINE_TABLE}.attention_config names another attention",
            None,
        ),
        (
            True,
            {"attention_backend": "TRITON_ATTN"},
            {},
            f"{ENGINE_TABLE}.attention_backend names another attention",
            None,
        ),
        (True, {}, {"algorithm": {"agreement": "bits"}}, BITS, BITS),
        (
            True,
            {},
            {"sampling": {"max_episode_tokens": 4097}},
            "sampling.max_episode_tokens is over 4096",
            None,
        ),
    ],
)
def test_our_kernels_are_used_where_they_were_measured(
    monkeypatch, hopper, engine, settings, attention, sampler
):
    families = {90} if hopper else {100}
    platform = SimpleNamespace(is_device_capability_family=families.__contains__)
    monkeypatch.setattr(arguments, "current_platform", platform)
    registered = []
    monkeypatch.setattr(
        arguments, "register_backend", lambda *names: registered.append(names)
    )
    defaults = {
        "sampling": {"max_episode_tokens": 4096},
        "learner": {"micro_batch_tokens": 8192},
        "rollout_server": {"engine": engine},
    }
    config = small_config(**{**defaults, **settings})
    causes = {ATTENTION: attention, SAMPLER: sampler}
    expected = {feature: cause for feature, cause in causes.items() if cause}
    assert disabled_features(config, on_cpu=False) == expected
    values = engine_arguments(config, None, on_cpu=False)
    assert registered == (
        [] if attention else [(AttentionBackendEnum.FLASH_ATTN, DECODE_BACKEND)]
    )
    assert values.get("worker_cls") == (None if sampler else GPU_WORKER)


def test_an_engine_on_a_cpu_has_neither_of_our_kernels_and_says_so() -> None:
    cause = "the engine computes on a CPU"
    causes = disabled_features(small_config(), on_cpu=True)
    assert causes == {ATTENTION: cause, SAMPLER: cause}
    assert engine_arguments(small_config(), None, on_cpu=True) == {}


@pytest.mark.parametrize(
    ("settings", "interval"),
    [
        ({}, 33),
        ({"enforce_eager": True}, None),
        # The user's own number stays.
        ({"engine": {"prefill_schedule_interval": 4}}, None),
    ],
)
def test_prompts_wait_where_there_are_graphs(monkeypatch, settings, interval) -> None:
    platform = SimpleNamespace(is_device_capability_family=lambda _: False)
    monkeypatch.setattr(arguments, "current_platform", platform)
    values = engine_arguments(small_config(rollout_server=settings), None, on_cpu=False)
    assert values.get("prefill_schedule_interval") == interval


@pytest.mark.parametrize(
    ("most_queries", "requests", "longest", "is_kernels"),
    [
        (1, 64, 4096, True),
        (1, 63, 4096, False),
        (1, 1, 1536, True),
        (2, 512, 1000, False),
    ],
)
def test_the_kernel_takes_steps_of_one_token_each_that_fill_the_gpu(
    monkeypatch, most_queries, requests, longest, is_kernels
):
    backend = resolve_obj_by_qualname(DECODE_BACKEND)
    assert backend.get_name() == "FLASH_ATTN"
    implementation = object.__new__(backend.get_impl_cls())
    implementation._is_plain = True
    implementation.num_kv_heads = 8
    implementation.scale = 1.0
    calls = []
    monkeypatch.setattr(decode_attention, "decode", lambda *_: calls.append("ours"))
    monkeypatch.setattr(
        FlashAttentionImpl, "forward", lambda *_: calls.append("vLLM's")
    )
    metadata = SimpleNamespace(
        max_query_len=most_queries,
        max_seq_len=longest,
        seq_lens=torch.zeros(requests),
        block_table=None,
        rswa_prefix_lens=None,
    )
    output = torch.zeros(1)
    for plain in (True, False):
        implementation._is_plain = plain
        assert implementation.forward(*[None] * 5, metadata, output) is output
    # A step of vLLM's that only measures memory has no metadata.
    implementation.forward(*[None] * 5, None, output)
    assert calls == ["ours" if is_kernels else "vLLM's", "vLLM's", "vLLM's"]


@pytest.mark.parametrize(("async_scheduling", "name"), [(True, "Async"), (False, "")])
def test_the_scheduler_is_ours_with_and_without_async_scheduling(
    async_scheduling: bool, name: str
):
    scheduler = scheduler_class(installed(), async_scheduling=async_scheduling)
    assert scheduler.__name__ == f"{name}ChunkingScheduler"
    assert issubclass(scheduler, AsyncScheduler) is async_scheduling


@pytest.mark.parametrize(("async_scheduling", "name"), [(True, "Async"), (False, "")])
def test_without_extensions_the_scheduler_is_the_engines(
    async_scheduling: bool, name: str
):
    scheduler = scheduler_class((), async_scheduling=async_scheduling)
    assert scheduler.__name__ == f"{name}EngineScheduler"
    assert issubclass(scheduler, AsyncScheduler) is async_scheduling


def test_chunks_behind_another_extensions_scheduler_are_refused() -> None:
    class Other(EngineScheduler):
        pass

    with pytest.raises(
        ConfigError, match="fast_decoding cannot stand behind another extension"
    ):
        chunking_scheduler.scheduler_class(Other)


def test_the_engine_is_started_with_our_scheduler(model: Path) -> None:
    settings = engine_config(config_with(model, {}), seed=3).scheduler_config
    assert "Chunking" in settings.get_scheduler_cls().__name__


KEY = "rollout_server.engine"
NO_CHUNKS = {"max_num_batched_tokens": 32, "enable_chunked_prefill": False}


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (
            {"block_sise": 4},
            f"unknown key {KEY}.block_sise; did you mean 'block_size'?",
        ),
        (NO_CHUNKS, "vLLM refuses its settings: "),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(model, engine, line):
    with pytest.raises(ConfigError) as caught:
        engine_config(config_with(model, engine), seed=3)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_few_arguments_have_a_type_that_only_vllm_knows() -> None:
    kinds = argument_types()
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs) if field.init}
    assert kinds.keys() == {name for name in fields if not name.startswith("_")}
    assert sum(kind is None for kind in kinds.values()) < 5


def test_every_name_that_is_refused_is_one_of_vllm() -> None:
    assert set(OWNED) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (
            {"block_sise": 16},
            f"unknown key {KEY}.block_sise; did you mean 'block_size'?",
        ),
        ({"zzz": 3}, f"unknown key {KEY}.zzz"),
        (
            {"max_num_seq": 3},
            f"unknown key {KEY}.max_num_seq; 'max_num_seqs' cannot be passed through: set "
            "rollout_server.max_episodes",
        ),
        (
            {"block_size": True},
            f"{KEY}.block_size = True is refused by vLLM: Input should be a valid integer",
        ),
        (
            {"compilation_config": {"splitting_ops": 3, "backend": 4}},
            f"{KEY}.compilation_config (backend) = 4 is refused by vLLM: Input should be a valid s",
        ),
        (
            {"compilation_config": {"mode": "text"}},
            f"{KEY}.compilation_config (mode) = 'text' is refused by vLLM: Value error, Invalid co",
        ),
    ],
    ids=str,
)
def test_what_vllm_refuses_is_one_line(engine: dict[str, object], line: str) -> None:
    (problem,) = table_problems(engine)
    assert problem.startswith(line)
    assert "\n" not in problem


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_cache_dtype": "FP8-E4M3", "load_format": "tensorizer"},
        {
            "compilation_config": {
                "cudagraph_mode": "none",
                "pass_config": {},
                "mode": 3,
            }
        },
        {"compilation_config": {"inductor_compile_config": {"x": {}}}},
        {
            "attention_backend": "FLASH_ATTN",
            "attention_config": {"backend": "FLASH_ATTN"},
        },
        {"max_num_batched_tokens": 8192, "async_scheduling": False},
        {"model_loader_extra_config": {"a": 1}, "limit_mm_per_prompt": {"image": 2}},
    ],
    ids=str,
)
def test_what_vllm_may_take_passes(engine: dict[str, object]) -> None:
    assert list(table_problems(engine)) == []


def test_defaults_of_vllm_have_the_types_of_their_arguments() -> None:
    plain = (bool, int, float, str, list, dict)
    defaults = {f.name: f.default for f in dataclasses.fields(AsyncEngineArgs)}
    table = {
        name: value
        for name, value in defaults.items()
        if isinstance(value, plain) and not name.startswith("_")
    }
    assert len(table) > 60
    assert list(table_problems(table)) == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tool_parser": "hermes", "reasoning_parser": "qwen3"}, ""),
        (
            {"tool_parser": "hermse"},
            "rollout_server.tool_parser must be a parser of vLLM, got 'hermse'; did you mean "
            "'hermes'?",
        ),
        (
            {"reasoning_parser": "qwen33"},
            "rollout_server.reasoning_parser must be a parser of vLLM, got 'qwen33'; did you mean",
        ),
        ({"tool_parser": "zzz"}, "got 'zzz'; there are "),
    ],
    ids=str,
)
def test_a_parser_that_vllm_lacks_is_one_line(
    model: Path, settings: dict[str, object], line: str
):
    problems = list(
        parser_problems(config_with(model, {}, settings=settings).rollout_server)
    )
    assert bool(problems) == bool(line)
    assert line in "".join(problems)


def test_adapters_alone_get_room_for_one_on_the_matrices_that_are_trained(
    model: Path,
) -> None:
    lora = {"rank": 24, "target_modules": ["linear_qkv", "o_proj"]}
    assert engine_config(config_with(model, {}, lora), seed=3).lora_config is None
    settings = engine_config(
        config_with(model, {}, lora | {"publish": "adapters"}), seed=3
    )
    lora_config = settings.lora_config
    # The next rank for which vLLM has kernels.
    assert (lora_config.max_lora_rank, lora_config.max_loras) == (32, 2)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    delta_nets = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    assert attention | delta_nets < set(lora_config.target_modules)
    assert not {"gate_proj", "up_proj", "down_proj"} & set(lora_config.target_modules)
    with_adapters = lora | {"publish": "adapters", "adapters": ["a", "b", "c"]}
    # A single place stays empty for the judge.
    assert (
        engine_config(
            config_with(model, {}, with_adapters), seed=3
        ).lora_config.max_loras
        == 4
    )


def test_a_model_that_takes_no_adapters_in_vllm_is_refused(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "gpt2"
    shutil.copytree(model, folder)
    transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=1, n_positions=256
    ).save_pretrained(folder)
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(sizes | {"architectures": ["GPT2LMHeadModel"]})
    )
    config = config_with(folder, {}, {"rank": 8, "publish": "adapters"})
    with pytest.raises(ConfigError, match="vLLM's GPT2LMHeadModel takes no adapters"):
        engine_config(config, seed=3)


def test_a_tower_is_loaded_without_images_too() -> None:
    table = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_vl_text"},
        "vision_config": {"hidden_size": 8},
    }
    sampling = SamplingSection(max_reply_tokens=8, max_episode_tokens=16)
    values = tower_values(decoder_table(table), sampling)
    assert values["limit_mm_per_prompt"] == {"image": 1}
    assert tower_values({"architectures": ["LlamaForCausalLM"]}, sampling) == {}


@pytest.mark.long
def test_a_server_asks_about_images_without_kernels_of_delta_nets(
    tmp_path: Path,
) -> None:
    # vLLM forks the engine only from a process without CUDA, which these kernels start.
    make_seeing_model(tmp_path, "qwen3_5_moe")
    largest = load_processor(tmp_path).max_tokens
    answers = in_ranks(1, image_questions, tmp_path)
    assert answers == [([{"image": largest}, {"image": 1}], [])]


def test_adapters_apart_beside_experts_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "mixture"
    make_mixture(folder, seed=0, num_hidden_layers=2)
    lora = {"rank": 8, "target_modules": ["linear_qkv", "linear_proj"]}
    assert engine_config(config_with(folder, {}, lora), seed=3).lora_config is None
    config = config_with(folder, {}, lora | {"publish": "adapters"})
    with pytest.raises(
        ConfigError, match="must be merged for a mixture of experts on a CPU"
    ):
        engine_config(config, seed=3)
