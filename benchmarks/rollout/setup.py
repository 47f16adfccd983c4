"""The model and the settings of benchmarks/rollout/throughput.py."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common.measure import ROOT, toml_of
from benchmarks.rollout.engines import START_LIMIT_S

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 2048,
    },
}


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """What is run, and on what; `fill_sizes` chooses what is left out."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=list(SHAPES), help="qwen3-0.6b; on a CPU tiny")
    parser.add_argument("--concurrent", type=int, help="requests at one time; 512, on a CPU 64")
    parser.add_argument("--prompt-tokens", type=int, help="128; on a CPU 32")
    parser.add_argument("--reply-tokens", type=int, help="512; on a CPU 64")
    parser.add_argument("--memory", type=float, default=0.42, help="GPU memory of each engine")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--quantization", default="off", help="rollout_server.quantization")
    parser.add_argument("--workers", type=int, default=4, help="environment processes")
    parser.add_argument("--out", type=Path)


def fill_sizes(arguments: argparse.Namespace) -> None:
    """Completes what `add_size_arguments` reads."""
    on_cpu = arguments.device == "cpu"
    arguments.shape = arguments.shape or ("tiny" if on_cpu else "qwen3-0.6b")
    arguments.concurrent = arguments.concurrent or (64 if on_cpu else 512)
    arguments.prompt_tokens = arguments.prompt_tokens or (32 if on_cpu else 128)
    arguments.reply_tokens = arguments.reply_tokens or (64 if on_cpu else 512)
    is_plain = on_cpu and arguments.quantization == "off"
    arguments.dtype = "float32" if is_plain else "bfloat16"
    arguments.enforce_eager = on_cpu


def make_model(folder: Path, shape: str, dtype: str) -> None:
    """A Hugging Face folder without weights."""
    sys.path.insert(0, str(ROOT / "deploy"))
    from slipstream.learner.trainer.tiny_model import make_tokenizer

    folder.mkdir(parents=True)
    make_tokenizer(folder)
    sizes = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "dtype": dtype,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(sizes))


def config_text(arguments: argparse.Namespace, folder: Path) -> str:
    engine = {"load_format": "dummy", **json.loads(arguments.engine)}
    given = ", ".join(f"{key} = {toml_of(value)}" for key, value in engine.items())
    return f"""
[run]
name = "rollout"
dir = "{folder}"
steps = 1

[model]
path = "{folder}/model"
dtype = "{arguments.dtype}"

[algorithm]
group_size = 2
groups_per_step = 1
learning_rate = 1e-5
agreement = "{getattr(arguments, "agreement", "close")}"

[sampling]
max_reply_tokens = {3 * arguments.reply_tokens // 2}
max_episode_tokens = {arguments.prompt_tokens + 3 * arguments.reply_tokens // 2}

[debug]
ignore_eos = true

[learner]
micro_batch_tokens = {arguments.prompt_tokens + 3 * arguments.reply_tokens // 2}

[rollout_server]
max_episodes = {arguments.concurrent}
gpu_memory_utilization = {arguments.memory}
tensor_parallel_size = {arguments.tensor_parallel_size}
enforce_eager = {str(arguments.enforce_eager).lower()}
start_timeout_s = {START_LIMIT_S}
quantization = "{arguments.quantization}"
engine = {{ {given} }}

[controller]
heartbeat_timeout_s = 20
"""
