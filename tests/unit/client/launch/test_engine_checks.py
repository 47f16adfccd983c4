"""What is said of an engine before it starts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.launch import fit
from slipstream.client.launch.fit import processor_problems
from slipstream.core.models.model_rules import cpu_cache_bytes
from support.fakes.small_configs import NGRAM, config_of, small_config

DELTA_NETS = {
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
DRAFTS = {"speculative_config": NGRAM}


@pytest.mark.parametrize(
    ("table", "changed", "message"),
    [
        (DELTA_NETS, {"model": {"dtype": "float32"}}, r'model\.dtype must be "bfloat16" .* delta'),
        (DELTA_NETS, {"model": {"dtype": "bfloat16"}}, ""),
        (DELTA_NETS, {"rollout_server": {"engine": DRAFTS}}, "speculative_config .* delta nets"),
        ({}, {"rollout_server": {"engine": DRAFTS}}, ""),
        ({}, {"rollout_server": {"quantization": "fp8_per_channel"}}, ""),
        (EXPERTS, {"lora": {"rank": 8, "publish": "adapters"}}, r"lora\.publish must be merged"),
        (EXPERTS, {"lora": {"rank": 8}}, ""),
        (
            EXPERTS,
            {"rollout_server": {"quantization": "fp8_per_channel"}},
            r"quantization must be off for a mixture of experts on a CPU.*got 'fp8_per_channel'$",
        ),
    ],
)
def test_what_an_engine_cannot_do_on_a_cpu_is_refused_before_anything_is_loaded(
    table: dict[str, Any],
    changed: dict[str, dict[str, Any]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(table))
    config = config_of(tmp_path)
    changed = {**changed, "model": {**changed.get("model", {}), "path": tmp_path}}
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in changed.items()
    }
    config = config.model_copy(update=sections)
    monkeypatch.setattr(fit, "uses_gpus", lambda: True)
    assert processor_problems(config) == ()
    monkeypatch.setattr(fit, "uses_gpus", lambda: False)
    assert bool(message) == bool(processor_problems(config))
    assert not message or re.search(message, processor_problems(config)[0])


@pytest.mark.parametrize(
    ("tp", "tokens", "mib"), [(1, 512, 1024), (1, 2048, 2560), (2, 2048, 1280)]
)
def test_the_cache_on_a_cpu_has_room_for_the_longest_episode(tp, tokens, mib, tmp_path):
    # 2 * 64 layers * 16 heads * 256 * 2 bytes = 1 MiB a token.
    sizes = {"num_hidden_layers": 64, "num_key_value_heads": 16, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 32}))
    config = small_config(
        model={"path": str(tmp_path)},
        sampling={"max_episode_tokens": tokens},
        rollout_server={"tensor_parallel_size": tp},
    )
    assert cpu_cache_bytes(config) == mib << 20
