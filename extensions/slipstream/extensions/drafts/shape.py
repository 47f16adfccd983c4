"""The layer that drafts: its sizes, its tensors, and the folder by which vLLM makes it.

It is the layer of EAGLE (arXiv:2401.15077): from a token's embedding and the policy's last hidden
state before that token it computes the next hidden state. Embeddings and output layer are the
policy's. vLLM's `EagleLlamaForCausalLM` computes the same from the same tensors.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slipstream.core.errors import ConfigError
from slipstream.core.models.model_files import held_tensors, missing_weights
from slipstream.core.models.model_sizes import ModelSizes, read_model_sizes, read_model_table
from slipstream.core.settings.config import Config

# Beginning of the names of its tensors among the published weights.
PREFIX = "draft."
# Its folder in an exported folder of the policy.
FOLDER = "draft"


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
    def of(cls, sizes: ModelSizes) -> Self:
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

    def values(self) -> dict[str, Any]:
        """Returns what the layer's config.json says of its sizes."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
        }

    def write_folder(self, folder: Path, dtype: str) -> None:
        """Writes the config.json of the layer, which vLLM wants, into a new `folder`."""
        folder.mkdir()
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        text = json.dumps(kind | self.values() | {"dtype": dtype}, indent=2)
        (folder / "config.json").write_text(text)

    def check(self, folder: Path) -> None:
        """Raises ConfigError for a damaged `folder`, and for the layer of another model."""
        setting = f"model.path's folder {FOLDER}"
        for damage in missing_weights(folder, setting):
            raise ConfigError(damage)
        told, values = read_model_table(folder), self.values()
        held = {name: told[name] for name in values if name in told}
        wanted = {name: values[name] for name in held} | dict(self.tensors())
        held |= {name: shape for name, (_, shape) in held_tensors(folder).items()}
        for name in held | wanted:
            if held.get(name) != wanted.get(name):
                raise ConfigError(
                    f"{setting} must hold the layer of drafts beside this model, whose {name} is "
                    f"{wanted.get(name)}: {folder} has {held.get(name)}"
                )


def begun(config: Config) -> tuple[DraftShape, Path | None]:
    """Returns the layer's shape in a run, and the folder in which it begins, if there is one.

    An exported folder has one if its run had a layer that drafts; else the layer begins with random
    values. Raises ConfigError for the layer of another model.
    """
    shape = DraftShape.of(read_model_sizes(config.model.path))
    folder = config.model.path / FOLDER
    if not any(folder.glob("*.safetensors")):
        return shape, None
    shape.check(folder)
    return shape, folder
