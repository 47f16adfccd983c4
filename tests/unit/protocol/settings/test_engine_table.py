"""The table `rollout_server.engine` before vLLM sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import JsonValue
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config_file import parse_config
from slipstream.protocol.settings.vllm_source import VllmSource

ARGUMENTS = '''
from typing import ClassVar, Literal, Optional
from vllm.config import CacheConfig, CompilationConfig, Enumeration
from vllm.config.cache import CacheDType
import torch

@dataclass
class EngineArgs:
    """With a docstring."""

    block_size: int | None = None
    watermark: float = CacheConfig.watermark
    cache_dtype: CacheDType = "auto"
    load_format: str | Literal["dummy"] = "auto"
    chunked: bool | None = None
    sizes: list[int] | None = get_field(CacheConfig, "sizes")
    quantization: "dict[str, Any] | Unknown | None" = None
    compilation_config: CompilationConfig = get_field(VllmConfig, "compilation_config")
    backend: Enumeration | None = None
    dtype: torch.dtype | None = None
    maybe: Optional[int] = None
    count: ClassVar[int] = 3
    resolved: int = field(init=False)
    _private: int = 0

    def __post_init__(self) -> None:
        other: int = 3

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
'''
CONFIGS = """
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
class Enumeration(Enum):
    A = "a"
"""
CACHE = """
from typing import Literal
CacheDType = Literal["auto", "fp8_e4m3"]
"""
COMPILATION = """
@config
class PassConfig:
    fuse: bool = False

@config
class CompilationConfig:
    mode: int = 0
    pass_config: PassConfig = None
    inductor: dict[str, Any] = None
"""
NAMES = {
    *("block_size", "watermark", "cache_dtype", "load_format", "chunked", "sizes", "quantization"),
    *("compilation_config", "backend", "dtype", "maybe", "enable_log_requests"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> VllmSource:
    folder = tmp_path_factory.mktemp("site") / "vllm"
    for name, text in (
        ("engine/arg_utils.py", ARGUMENTS),
        ("config/__init__.py", CONFIGS),
        ("config/cache.py", CACHE),
        ("config/compilation.py", COMPILATION),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return VllmSource(folder)


def test_the_names_are_the_fields_of_the_class_and_its_bases(source: VllmSource) -> None:
    assert set(source.arguments()) == NAMES


@pytest.mark.parametrize(
    "table",
    [
        {"block_size": 16, "watermark": 1, "chunked": True, "sizes": [1], "enable_log_requests": 0},
        {"cache_dtype": "FP8-E4M3", "load_format": "tensorizer", "quantization": {"any": {"x": 1}}},
        {"compilation_config": {"mode": "text", "pass_config": {"fuse": 1}, "inductor": {"x": {}}}},
        {"backend": 3, "dtype": "half", "maybe": "?"},
    ],
    ids=lambda table: next(iter(table)),
)
def test_what_vllm_may_take_passes(source: VllmSource, table: dict[str, JsonValue]) -> None:
    found = list(source.problems(table))
    wrong_type = "rollout_server.engine.enable_log_requests must be true or false, got 0"
    assert found == ([wrong_type] if "enable_log_requests" in table else [])


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"blok_size": 3},
            "unknown key rollout_server.engine.blok_size; did you mean 'block_size'",
        ),
        ({"zzz": 3}, "unknown key rollout_server.engine.zzz"),
        ({"_private": 3}, "unknown key rollout_server.engine._private"),
        ({"block_size": "16"}, "rollout_server.engine.block_size must be an integer, got '16'"),
        ({"block_size": True}, "rollout_server.engine.block_size must be an integer, got True"),
        ({"watermark": "x"}, "rollout_server.engine.watermark must be a number, got 'x'"),
        ({"sizes": 3}, "rollout_server.engine.sizes must be a list, got 3"),
        (
            {"cache_dtype": "fp9"},
            "rollout_server.engine.cache_dtype must be one of auto, fp8_e4m3, got 'fp9'",
        ),
        (
            {"compilation_config": 3},
            "rollout_server.engine.compilation_config must be a table, got 3",
        ),
        (
            {"compilation_config": {"modes": 3}},
            "unknown key rollout_server.engine.compilation_config.modes; did you mean 'mode'?",
        ),
        (
            {"compilation_config": {"pass_config": {"fused": True}}},
            "unknown key rollout_server.engine.compilation_config.pass_config.fused; did you mean",
        ),
    ],
    ids=str,
)
def test_what_vllm_would_refuse_is_one_line(
    source: VllmSource, table: dict[str, JsonValue], line: str
) -> None:
    (found,) = source.problems(table)
    assert found.startswith(line)


def test_another_vllm_without_these_arguments_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no vllm.engine.arg_utils.AsyncEngineArgs; 0\.32\.0"
    ):
        VllmSource(tmp_path).arguments()


@pytest.mark.parametrize(
    ("engine", "line"),
    [
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
        *(
            (
                {"load_format": load_format},
                "rollout_server.engine.load_format cannot be 'ipc_cache': such weights lie in "
                "another process, and a publish would change them for every engine there",
            )
            for load_format in ("ipc_cache", "IPC_Cache")
        ),
        *(
            (
                {name: value},
                f"rollout_server.engine.{name} cannot be passed through: prefixes that are cached "
                "outside of the engine would stay those of older weights",
            )
            for name, value in (("kv_transfer_config", {}), ("kv_offloading_backend", "lmcache"))
        ),
        (
            {"enable_eplb": True},
            "rollout_server.engine.enable_eplb cannot be passed through: an expert that vLLM has "
            "moved would get the weights of another at each publish",
        ),
        (
            {"watermark_config": {"key": 1}},
            "rollout_server.engine.watermark_config cannot be passed through: the learner needs "
            "the log-probabilities of the distribution that was sampled from",
        ),
        (
            {"kv_events_config": {"enable_kv_cache_events": True}},
            "rollout_server.engine.kv_events_config cannot be passed through: it opens a port "
            "without TLS or token",
        ),
        (
            {"runner": "pooling"},
            "rollout_server.engine.runner cannot be passed through: the engine samples replies",
        ),
        (
            {"max_num_queued_reqs": 4},
            "rollout_server.engine.max_num_queued_reqs cannot be passed through: set "
            "rollout_server.max_episodes; a request that is turned away is a failed episode",
        ),
        (
            {"hf_overrides": {"rope_theta": 5000.0}},
            "rollout_server.engine.hf_overrides cannot be passed through: the learner would "
            "compute without them; change the model's config.json",
        ),
        (
            {"max_num_batched_tokens": 63},
            "rollout_server.engine.max_num_batched_tokens must be at least "
            "rollout_server.max_episodes: each episode has a token in a batch, got 63 and 64",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_decided_elsewhere_is_refused_without_vllm(
    engine: dict[str, JsonValue], line: str
) -> None:
    table: dict[str, JsonValue] = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": "models/tiny"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
        "rollout_server": {"engine": engine},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(table, source="test")
    assert str(caught.value) == f"test: {line}"
