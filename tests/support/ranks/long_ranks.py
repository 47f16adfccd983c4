"""Program of one rank: a model beyond its original length before and after a step, in one layout.

A job is MODEL.LAYOUT.LENGTH.
"""

from pathlib import Path

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.learner.trainer.layers import attention

from support.ranks.rank_program import kept, likelier, opened, score, weights_of

LAYOUTS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
}
LEARNING_RATE, ADAM_EPS = 1e-2, 1e-3
VOCAB, ORIGINAL, LONGEST = 64, 1024, 131072
# Half of the product's length needs blocks of queries then, for a quarter of the work.
MOST_SCORES = attention.MOST_SCORES // 4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": LONGEST / ORIGINAL,
    "original_max_position_embeddings": ORIGINAL,
}


def make_model(folder: Path, name: str, *, layers: int) -> None:
    """A random model in float32 whose original length is a small part of what it may be given."""
    import transformers

    kinds = {
        "llama": ("Llama", {}),
        # The window is longer than a block of queries' share of the original length.
        "mistral": ("Mistral", {"sliding_window": 700}),
        "gpt-oss": (
            "GptOss",
            {"sliding_window": 300, "num_local_experts": 4, "num_experts_per_tok": 2}
            | {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        ),
    }
    kind, values = kinds[name]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "rope_parameters": YARN,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | values)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if parameter.dim() > 1 and not place.endswith("_bias"):
                # Attention must look far: flat scores would hide where a token stands.
                parameter.mul_(5.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def sequences_of(length: int) -> list[np.ndarray]:
    """One sequence of `length` tokens and some short ones, which are packed together."""
    random = np.random.default_rng(length)
    sizes = (length, 700, 60, 9)
    return [random.integers(0, VOCAB, size).astype(np.uint32) for size in sizes]


def config_of(folder: Path, layout: str, length: int):
    world_size, parallel = LAYOUTS[layout]
    table = {
        "run": {"name": "long", "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": LEARNING_RATE},
        "sampling": {"max_reply_tokens": length - 8, "max_episode_tokens": length},
        "learner": {
            "world_size": world_size,
            "parallel": parallel,
            "micro_batch_tokens": length // world_size,
            "weight_decay": 0.0,
            "optimizer": {"adam_eps": ADAM_EPS},
            "grad_clip": 0.0,
            "timeout_s": 600.0,
        },
    }
    return parse_config(table, source="test")


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence

    model, layout, length = job.split(".")
    if int(length) < LONGEST:
        attention.MOST_SCORES = MOST_SCORES
    config = config_of(folder / model, layout, int(length))
    policy = opened(config)
    max_tokens = config.learner.micro_batch_tokens
    token_ids = sequences_of(int(length))
    sequences = [TrainingSequence.of_tokens(one) for one in token_ids]
    found = {"before": score(policy, token_ids, max_tokens=max_tokens)}
    found["norm"] = torch.tensor(likelier(policy, sequences, LEARNING_RATE, max_tokens=max_tokens))
    found["after"] = score(policy, token_ids, max_tokens=max_tokens)
    kept(policy, found | {"weights": weights_of(policy)}, folder / f"{job}.pt")
