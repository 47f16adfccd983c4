"""Makes a tiny random Qwen2.5-VL, Qwen3-VL or Qwen3.5 for the example of colours."""

from __future__ import annotations

import argparse
from pathlib import Path

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<reply>", "<vision>", "<image>", "<video>", "</vision>"]
WORDS = ["red", "green", "blue", "yellow", "colour", "0", "1"]
CHAT_TEMPLATE = (
    "{{ '<s>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<reply>' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<vision><image></vision>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<reply>' }}{% endif %}"
)
# Family -> transformers' name of its classes.
FAMILIES = {
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}


def make_tokenizer(folder: Path) -> None:
    """Saves a tokenizer whose tokens are single words; text is split at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def make_model(folder: Path, family: str, *, seed: int = 0, **sizes: object) -> None:
    """Saves a random model of `family` in float32 with its image processor.

    Its heads have 32 dimensions, the smallest that vLLM's CPU attention takes. `sizes` are of the
    decoder.
    """
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    is_third = family != "qwen2_5_vl"
    has_delta_nets = family.startswith("qwen3_5")
    mixture = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        # Another number than hidden_size: transformers looks at it to know the form of a file.
        "moe_intermediate_size": 96,
        **({"shared_expert_intermediate_size": 64} if has_delta_nets else {"norm_topk_prob": True}),
    }
    # vLLM's kernels for a CPU take these sizes of heads and this convolution only.
    delta_nets = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    sections = [6, 5, 5] if is_third else [4, 6, 6]
    decoder = {
        "vocab_size": len(SPECIAL_TOKENS) + len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # transformers does not train the embedding of a token for padding.
        "pad_token_id": None,
        "initializer_range": 0.08,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2] if has_delta_nets else sections,
            **({"mrope_interleaved": True} if is_third else {}),
            **({"partial_rotary_factor": 0.5} if has_delta_nets else {}),
        },
        **({"head_dim": 32} if is_third else {}),
        **(mixture if family.endswith("_moe") else {}),
        **(delta_nets if has_delta_nets else {}),
        **sizes,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": decoder["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "initializer_range": 0.08,
    }
    if is_third:
        tower["num_position_embeddings"] = 64
        if not has_delta_nets:
            tower["deepstack_visual_indexes"] = [0]
    else:
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
    ids = ("vision_start", "image", "video", "vision_end")
    kind = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(
        text_config=decoder,
        vision_config=tower,
        tie_word_embeddings=False,
        dtype="float32",
        **{f"{name}_token_id": 4 + place for place, name in enumerate(ids)},
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    # Published files of Qwen3.5 have the experts of a layer in one tensor, as transformers does.
    model.save_pretrained(folder, save_original_format=family != "qwen3_5_moe")
    if family == "qwen3_vl_moe":
        _turn_experts(folder / "model.safetensors")
    Qwen2VLImageProcessorPil(
        patch_size=14, size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    ).save_pretrained(folder)


def _turn_experts(file: Path) -> None:
    """Writes the experts as published files have them, and transformers after it loaded them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    """Writes the folder that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(arguments.folder)
    make_model(arguments.folder, arguments.family, seed=arguments.seed)


if __name__ == "__main__":
    main()
