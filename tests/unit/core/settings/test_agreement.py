"""Which settings go with `algorithm.agreement = "bits"`."""

from typing import Any

import pytest
from slipstream.core.errors import ConfigError
from support.fakes.small_configs import refusals, small_config

BITS = {"algorithm": {"agreement": "bits"}}


@pytest.mark.parametrize(
    ("tables", "line"),
    refusals("""
learner = {world_size = 2, parallel.cp = 2}
    needs learner.parallel.cp = 1
rollout_server.engine.speculative_config = {}
    excludes rollout_server.engine.speculative_config: it may change kernels
lora.rank = 4
    needs lora.rank = 0: merged and separate adapters round
sampling.temperature = 0.7
    needs sampling.temperature = 1.0
sampling.top_p = 0.9
    needs sampling.top_p = 1.0
sampling.top_k = 5
    needs sampling.top_k = 0
learner = {world_size = 2, parallel.tp = 2}
    needs learner.parallel.tp = 1: the parts of a split product are added up in another order,
    got 2
rollout_server.tensor_parallel_size = 2
    needs rollout_server.tensor_parallel_size = 1
rollout_server.pipeline_parallel_size = 2
    needs rollout_server.pipeline_parallel_size = 1: bits of stages were not compared, got 2
model = {path = "model", dtype = "bfloat16"}, rollout_server.quantization = "fp8_per_channel"
    needs rollout_server.quantization = 'off'
rollout_server.recompute_context = false
    needs rollout_server.recompute_context = True: else replies go on with keys and values of
    older weights, got False
rollout_server.engine.kv_cache_dtype = "fp8"
    excludes rollout_server.engine.kv_cache_dtype: it may change kernels
learner.transformer.deterministic_mode = true
    excludes learner.transformer.deterministic_mode
"""),
)
def test_what_has_other_kernels_is_refused(tables: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        small_config(**{**BITS, **tables})
    assert line in str(error.value)


def test_stages_replicas_and_sizes_keep_the_bits() -> None:
    config = small_config(
        **BITS,
        learner={"world_size": 4, "parallel": {"pp": 2}},
        rollout_server={
            "engine": {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
        },
    )
    assert config.algorithm.agreement == "bits"
