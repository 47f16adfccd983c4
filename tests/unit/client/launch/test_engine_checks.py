"""What is said of an engine before it starts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.launch import fit
from slipstream.client.launch.fit import (
    compiler_problem,
    describe_engine,
    processor_problems,
)
from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.scene import Scene
from slipstream.core.models.model_rules import cpu_cache_bytes
from slipstream.core.settings.sections import RolloutServerSection
from support.fakes.small_configs import NGRAM, config_of, small_config

COMPILER = {"PATH": "/usr/bin:/bin", "CXX": "sh"}
NO_COMPILER = {"PATH": "/usr/bin:/bin", "CXX": "no-such-compiler"}
SWITCHED_OFF = COMPILER | {"TORCHDYNAMO_DISABLE": "1"}


def server(enforce_eager: bool | None) -> RolloutServerSection:
    return RolloutServerSection(enforce_eager=enforce_eager)


@pytest.mark.parametrize(
    ("setting", "on_cpu", "is_eager"),
    [
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (True, True, True),
        (False, True, False),
        (False, False, False),
    ],
)
def test_engines_compile_on_gpus_and_where_it_is_asked_for(setting, on_cpu, is_eager):
    assert server(setting).is_eager(on_cpu=on_cpu) == is_eager
    description = describe_engine(server(setting), on_cpu=on_cpu)
    assert f"enforce_eager is {str(is_eager).lower()}" in description
    assert ("by default" in description) == (setting is None)


@pytest.mark.parametrize(
    ("environ", "on_cpu"),
    [(NO_COMPILER, True), (SWITCHED_OFF, True), (NO_COMPILER, False)],
)
def test_the_defaults_start_without_a_compiler_for_cpus(environ, on_cpu):
    assert compiler_problem(server(None), environ, on_cpu=on_cpu) == ""


def test_compiled_graphs_on_a_cpu_need_a_compiler() -> None:
    assert compiler_problem(server(False), COMPILER, on_cpu=True) == ""
    problem = compiler_problem(server(False), NO_COMPILER, on_cpu=True)
    assert problem.startswith(
        "rollout_server.enforce_eager = false needs a C++ compiler on CPUs"
    )
    assert "no-such-compiler" in problem


def test_the_check_of_an_engine_says_how_it_would_run_the_model(tmp_path: Path) -> None:
    config = small_config(
        model={"path": str(tmp_path)}, rollout_server={"enforce_eager": True}
    )
    line = fit.check_engine(Scene(config))
    assert line == describe_engine(config.rollout_server, on_cpu=not uses_gpus())
    assert "enforce_eager is true" in line


@pytest.mark.parametrize(
    ("setting", "on_cpu"), [(None, False), (False, False), (False, True)]
)
def test_graphs_that_the_environment_switches_off_are_refused(setting, on_cpu):
    problem = compiler_problem(server(setting), SWITCHED_OFF, on_cpu=on_cpu)
    assert "TORCHDYNAMO_DISABLE=1 switches that off" in problem
    unset = SWITCHED_OFF | {"TORCHDYNAMO_DISABLE": "0"}
    assert compiler_problem(server(setting), unset, on_cpu=on_cpu) == ""


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
        (
            DELTA_NETS,
            {"model": {"dtype": "float32"}},
            r'model\.dtype must be "bfloat16" .* delta',
        ),
        (DELTA_NETS, {"model": {"dtype": "bfloat16"}}, ""),
        (
            DELTA_NETS,
            {"rollout_server": {"engine": DRAFTS}},
            "speculative_config .* delta nets",
        ),
        ({}, {"rollout_server": {"engine": DRAFTS}}, ""),
        ({}, {"rollout_server": {"quantization": "fp8_per_channel"}}, ""),
        (
            EXPERTS,
            {"rollout_server": {"engine": {"enable_expert_parallel": True}}},
            r"enable_expert_parallel must be left out on a CPU",
        ),
        (
            EXPERTS,
            {"rollout_server": {"engine": {"enable_expert_parallel": False}}},
            "",
        ),
        (
            EXPERTS,
            {"lora": {"rank": 8, "publish": "adapters"}},
            r"lora\.publish must be merged",
        ),
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
        name: getattr(config, name).model_copy(update=values)
        for name, values in changed.items()
    }
    config = config.model_copy(update=sections)
    monkeypatch.setattr(fit, "uses_gpus", lambda: True)
    assert processor_problems(config) == ()
    monkeypatch.setattr(fit, "uses_gpus", lambda: False)
    assert bool(message) == bool(processor_problems(config))
    assert not message or re.search(message, processor_problems(config)[0])


@pytest.mark.parametrize(
    ("tp", "stages", "tokens", "mib"),
    [
        (1, 1, 512, 1024),
        (1, 1, 2048, 2560),
        (2, 1, 2048, 1280),
        (1, 2, 2048, 1280),
        # 22 of the 64 layers.
        (1, 3, 4096, 1584),
    ],
)
def test_the_cache_on_a_cpu_has_room_for_the_longest_episode(
    tp, stages, tokens, mib, tmp_path
):
    # 2 * 64 layers * 16 heads * 256 * 2 bytes = 1 MiB a token.
    sizes = {"num_hidden_layers": 64, "num_key_value_heads": 16, "head_dim": 256}
    (tmp_path / "config.json").write_text(
        json.dumps(sizes | {"num_attention_heads": 32})
    )
    config = small_config(
        model={"path": str(tmp_path)},
        sampling={"max_episode_tokens": tokens},
        rollout_server={"tensor_parallel_size": tp, "pipeline_parallel_size": stages},
    )
    assert cpu_cache_bytes(config) == mib << 20
