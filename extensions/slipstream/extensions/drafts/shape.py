"""The layer that drafts: its sizes, its tensors, and the folder by which vLLM makes it.

It is the layer of EAGLE (arXiv:2401.15077): from a token's embedding and the policy's last hidden
state before that token it computes the next hidden state. Embeddings and output layer are the
policy's. vLLM's `EagleLlamaForCausalLM` computes the same from the same tensors.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from slipstream.core.errors import ConfigError
from slipstream.core.models.model_files import held_tensors, missing_weights
from slipstream.core.models.model_sizes import ModelSizes, read_model_sizes, read_model_table
from slipstream.core.settings.config import Config

# The layer's folder in an exported folder of the policy.
FOLDER = "draft"


@dataclass(frozen=True)
class DraftShape:
    """The sizes of the layer by the names of its config.json.

    Its attention has the policy's heads, so that caches are alike.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    num_hidden_layers: int = 1

    @classmethod
    def of(cls, sizes: ModelSizes) -> Self:
        """Returns the shape beside a policy of `sizes`, whose attention is plain."""
        return cls(
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=(
                sizes.experts_per_token * sizes.expert_ffn if sizes.experts else sizes.ffn
            ),
            vocab_size=sizes.vocab,
            rope_theta=float(dict(sizes.rope).get("rope_theta") or 10000.0),
            rms_norm_eps=sizes.norm_eps or 1e-6,
        )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields name and shape of each tensor, by vLLM's names."""
        hidden = self.hidden_size
        ffn = self.intermediate_size
        layer = "layers.0."
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        yield "fc.weight", (hidden, 2 * hidden)
        yield f"{layer}self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        yield f"{layer}mlp.gate_proj.weight", (ffn, hidden)
        yield f"{layer}mlp.up_proj.weight", (ffn, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, ffn)

    def write_folder(self, folder: Path, dtype: str) -> None:
        """Writes the config.json of the layer, which vLLM wants, into a new `folder`."""
        folder.mkdir()
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        text = json.dumps(kind | asdict(self) | {"dtype": dtype}, indent=2)
        (folder / "config.json").write_text(text)

    def check(self, folder: Path) -> None:
        """Raises ConfigError for a damaged `folder`, and for the layer of another model."""
        setting = f"model.path's folder {FOLDER}"
        for damage in missing_weights(folder, setting):
            raise ConfigError(damage)
        stored = read_model_table(folder)
        values = asdict(self)
        present = {name: stored[name] for name in values if name in stored}
        expected = {name: values[name] for name in present} | dict(self.tensors())
        present |= {name: shape for name, (_, shape) in held_tensors(folder).items()}
        for name in present | expected:
            if present.get(name) != expected.get(name):
                raise ConfigError(
                    f"{setting} must hold the layer of drafts beside this model, whose {name} is "
                    f"{expected.get(name)}: {folder} has {present.get(name)}"
                )


def num_parameters(config: Config) -> int:
    """Returns the approximate number of the layer's: one layer, and a product of two states."""
    sizes = read_model_sizes(config.model.path)
    return sizes.layer_parameters + 2 * sizes.hidden**2


def model_problems(sizes: ModelSizes) -> Iterator[str]:
    """Yields one line if a layer of full attention cannot draft beside the model's own layers."""
    unsuited = {
        "latent attention": sizes.latent_size,
        "delta nets": sizes.linear_heads or sizes.family.is_delta,
        "sliding windows": sizes.uses_sliding_window,
    }
    for what, has in unsuited.items():
        if has:
            yield (
                f"drafts needs a model.path of full attention alone: the layer beside {what} was "
                "not tested"
            )


def begun(config: Config) -> tuple[DraftShape, Path | None]:
    """Returns the layer's shape in a run, and the folder in which it begins, if there is one.

    An exported folder has one if its run had a layer that drafts; else the layer begins with random
    values. Raises ConfigError for the layer of another model, and for a model without full
    attention.
    """
    sizes = read_model_sizes(config.model.path)
    for problem in model_problems(sizes):
        raise ConfigError(problem)
    shape = DraftShape.of(sizes)
    folder = config.model.path / FOLDER
    if not any(folder.glob("*.safetensors")):
        return shape, None
    shape.check(folder)
    return shape, folder
