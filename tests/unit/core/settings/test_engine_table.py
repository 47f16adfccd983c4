"""The table `rollout_server.engine` before vLLM sees it."""

import pytest
from pydantic import JsonValue
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError


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
