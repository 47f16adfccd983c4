"""The layer that drafts: its sizes, its tensors, and the folder by which vLLM makes it.

It is the layer of EAGLE (arXiv:2401.15077): from a token's embedding and the policy's last hidden
state before that token it computes the next hidden state. Embeddings and output layer are the
policy's. vLLM's `EagleLlamaForCausalLM` computes the same from the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.models.model_sizes import ModelSizes

# Beginning of the names of its tensors among the published weights.
PREFIX = "draft."


@dataclass(frozen=True)
class DraftShape:
    """The sizes of the layer; its attention has the policy's heads, so that caches are alike."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def of(cls, sizes: ModelSizes) -> DraftShape:
        """Returns the shape beside a policy of `sizes`, whose attention is plain."""
        return cls(
            hidden=sizes.hidden,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            ffn=sizes.experts_per_token * sizes.expert_ffn if sizes.experts else sizes.ffn,
            vocab=sizes.vocab,
            rope_theta=float(dict(sizes.rope).get("rope_theta") or 10000.0),
            norm_eps=sizes.norm_eps or 1e-6,
        )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields name and shape of each tensor, by vLLM's names."""
        hidden, layer = self.hidden, "layers.0."
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "fc.weight", (hidden, 2 * hidden)
        yield f"{layer}self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        yield f"{layer}mlp.gate_proj.weight", (self.ffn, hidden)
        yield f"{layer}mlp.up_proj.weight", (self.ffn, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, self.ffn)

    def write_folder(self, folder: Path, dtype: str) -> None:
        """Writes the config.json of the layer, which vLLM wants, into a new `folder`."""
        folder.mkdir()
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "dtype": dtype,
        }
        (folder / "config.json").write_text(json.dumps(values, indent=2))
