"""Makes random models in the shapes of the benchmarks, as Hugging Face folders with a tokenizer.

    python -m benchmarks.common.shapes 8B FOLDER

Every token of the tokenizer is one word, so that any reply can be read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.measure import program

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 4 << 30
HEAD_DIM = 128
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<reply>' }}{% endif %}"
)
IMAGE_TOKENS = ("<vision>", "<image>", "<video>", "</vision>")
IMAGE_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<vision><image></vision>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<reply>' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    groups: int
    vocab: int
    tied: bool
    head_dim: int = HEAD_DIM

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries = self.heads * self.head_dim
        keys = self.groups * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (self.hidden,)
            yield prefix + "self_attn.q_proj.weight", (queries, self.hidden)
            yield prefix + "self_attn.k_proj.weight", (keys, self.hidden)
            yield prefix + "self_attn.v_proj.weight", (keys, self.hidden)
            yield prefix + "self_attn.o_proj.weight", (self.hidden, queries)
            yield prefix + "self_attn.q_norm.weight", (self.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (self.head_dim,)
            yield prefix + "post_attention_layernorm.weight", (self.hidden,)
            yield prefix + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield prefix + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield prefix + "mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def config(self, dtype: str, max_positions: int) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": max_positions,
            "max_window_layers": self.layers,
            "use_sliding_window": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": dtype,
        }


SHAPES = {
    "tiny": Shape(64, 192, 2, 2, 1, 256, tied=True, head_dim=32),
    "small": Shape(256, 768, 4, 8, 4, 1024, tied=True, head_dim=32),
    "0.6B": Shape(1024, 3072, 28, 16, 8, 151936, tied=True),
    "1.7B": Shape(2048, 6144, 28, 16, 8, 151936, tied=True),
    "8B": Shape(4096, 12288, 36, 32, 8, 151936, tied=False),
}


def make_shape(
    folder: Path, name: str, *, dtype: str = "bfloat16", max_positions: int = 4096, layers: int = 0
) -> Path:
    """Writes a random model of shape `name`; `layers` replaces its own number unless 0."""
    import torch
    from safetensors.torch import save_file

    shape = replace(SHAPES[name], layers=layers) if layers else SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, shape.vocab)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for tensor_name, sizes in shape.tensors():
        if len(sizes) == 1:
            drawn = torch.ones(sizes)
        else:
            # Drawn in float32 first: generators differ in how they draw bfloat16.
            drawn = 0.02 * torch.randn(sizes, generator=generator, device=device)
        tensor = drawn.to(getattr(torch, dtype)).cpu()
        if size and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][tensor_name] = tensor
        size += tensor.nbytes
    weight_map = {}
    for place, shard in enumerate(shards, 1):
        file = f"model-{place:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = shape.config(dtype, max_positions)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    return folder


def make_apart(
    folder: Path, name: str, *, dtype: str = "bfloat16", max_positions: int = 4096, layers: int = 0
) -> Path:
    """Runs `make_shape` in a process of its own, whose end frees the GPU."""
    options = {"--dtype": dtype, "--max-positions": max_positions, "--layers": layers}
    values = [str(part) for option in options.items() for part in option]
    subprocess.run([*program("common.shapes"), name, str(folder), *values], check=True)
    return folder


def make_tokenizer(folder: Path, vocab: int, *, sees_images: bool = False) -> None:
    """Saves a tokenizer of `vocab` words, each of which is one token.

    If `sees_images`, some words mark images, and the chat template writes them.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<reply>", *(IMAGE_TOKENS if sees_images else ())]
    words = [*special, *(f"w{number}" for number in range(vocab - len(special)))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        chat_template=IMAGE_TEMPLATE if sees_images else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--max-positions", type=int, default=4096)
    arguments = parser.parse_args()
    make_shape(
        arguments.folder,
        arguments.shape,
        dtype=arguments.dtype,
        max_positions=arguments.max_positions,
        layers=arguments.layers,
    )


if __name__ == "__main__":
    sys.exit(main())
