"""The table `rollout_server.engine` against vLLM's real arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.protocol.errors import ConfigError  # noqa: E402
from slipstream.protocol.settings.config import Config  # noqa: E402
from slipstream.protocol.settings.config_file import parse_config  # noqa: E402
from tiny_models import SMALLEST, make_model_folder  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), **SMALLEST)


def config_with(
    model: Path, engine: dict[str, object], lora: dict[str, object] | None = None
) -> Config:
    table = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
        "rollout_server": {"max_episodes": 16, "enforce_eager": True, "engine": engine},
        "lora": lora or {},
    }
    return parse_config(table, source="test")


def test_settings_reach_vllm_by_name(model: Path) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    passed = {"max_num_batched_tokens": 192, "block_size": 32, "load_format": "dummy"}
    settings = engine_config(config_with(model, passed), seed=3)
    assert settings.scheduler_config.max_num_batched_tokens == 192
    assert settings.cache_config.block_size == 32
    assert settings.load_config.load_format == "dummy"
    assert settings.scheduler_config.max_num_seqs == 16
    assert settings.model_config.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize(("head", "dtype"), [("float32", torch.float32), ("model", torch.bfloat16)])
def test_logits_have_the_type_that_the_learners_have(
    model: Path, head: str, dtype: torch.dtype
) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    config = config_with(model, {"hf_overrides": {"rope_theta": 5000.0}})
    section = config.model.model_copy(update={"dtype": "bfloat16", "head_dtype": head})
    settings = engine_config(config.model_copy(update={"model": section}), seed=3)
    assert settings.model_config.head_dtype == dtype


def test_the_type_of_logits_cannot_be_passed_by(model: Path) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    config = config_with(model, {"hf_overrides": {"head_dtype": "float16"}})
    with pytest.raises(ConfigError, match="decided by model.head_dtype"):
        engine_config(config, seed=3)


@pytest.mark.parametrize(("async_scheduling", "name"), [(True, "Async"), (False, "")])
def test_the_scheduler_is_ours_with_and_without_async_scheduling(
    async_scheduling: bool, name: str
) -> None:
    from slipstream.rollout_server.inference.chunking_scheduler import scheduler_class
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    found = scheduler_class(async_scheduling=async_scheduling)
    assert found.__name__ == f"{name}ChunkingScheduler"
    assert issubclass(found, AsyncScheduler) is async_scheduling


def test_the_engine_is_started_with_our_scheduler(model: Path) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    settings = engine_config(config_with(model, {}), seed=3).scheduler_config
    assert "Chunking" in settings.get_scheduler_cls().__name__


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (
            {"max_num_batched_token": 4},
            "unknown key rollout_server.engine.max_num_batched_token; "
            "did you mean 'max_num_batched_tokens'?",
        ),
        (
            {"logprobs_mode": "raw_logprobs"},
            "rollout_server.engine.logprobs_mode cannot be passed through: the learner needs the "
            "log-probabilities of the distribution that was sampled from",
        ),
        (
            {"max_num_seqs": 4},
            "rollout_server.engine.max_num_seqs cannot be passed through: "
            "set rollout_server.max_episodes",
        ),
        (
            {"offload_group_size": 4},
            "rollout_server.engine.offload_group_size cannot be passed through: layers that are "
            "fetched from main memory would stay those of the start",
        ),
        (
            {"distributed_executor_backend": "ray"},
            "rollout_server.engine.distributed_executor_backend must be one of mp, uni, got 'ray'",
        ),
        ({"max_num_batched_tokens": 2}, "vLLM refuses its settings: "),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(
    model: Path, engine: dict[str, object], line: str
) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    with pytest.raises(ConfigError) as caught:
        engine_config(config_with(model, engine), seed=3)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_every_name_that_is_refused_is_one_of_vllm() -> None:
    import dataclasses

    from slipstream.rollout_server.inference.engine_arguments import _OWNED
    from vllm import AsyncEngineArgs

    assert set(_OWNED) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_adapters_alone_get_room_for_one_on_the_matrices_that_are_trained(model: Path) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    lora = {"rank": 24, "target_modules": ["linear_qkv", "o_proj"]}
    assert engine_config(config_with(model, {}, lora), seed=3).lora_config is None
    settings = engine_config(config_with(model, {}, lora | {"publish": "adapters"}), seed=3)
    found = settings.lora_config
    assert found is not None
    # The next rank for which vLLM has kernels.
    assert (found.max_lora_rank, found.max_loras) == (32, 1)
    assert found.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_a_model_that_takes_no_adapters_in_vllm_is_refused(model: Path, tmp_path: Path) -> None:
    from slipstream.rollout_server.inference.engine_arguments import engine_config

    folder = tmp_path / "gpt2"
    shutil.copytree(model, folder)
    transformers.GPT2Config(n_embd=32, n_layer=1, n_head=1, n_positions=256).save_pretrained(folder)
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"architectures": ["GPT2LMHeadModel"]}))
    config = config_with(folder, {}, {"rank": 8, "publish": "adapters"})
    with pytest.raises(ConfigError, match="vLLM's GPT2LMHeadModel takes no adapters"):
        engine_config(config, seed=3)
