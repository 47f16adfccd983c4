"""Creates the model of the quickstart: a tiny random Llama with a tokenizer of 28 words."""

import argparse
import string
from pathlib import Path

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<reply>"]
WORDS = [*string.ascii_lowercase, "0", "1"]
CHAT_TEMPLATE = (
    "{{ '<s>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<reply>' + message['content'] + '</s>' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<reply>' }}{% endif %}"
)


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
        additional_special_tokens=["<reply>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def make_model(
    folder: Path,
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_attention_heads: int = 2,
    num_key_value_heads: int = 1,
    tie_word_embeddings: bool = False,
    max_position_embeddings: int = 256,
    seed: int = 0,
) -> None:
    """Saves a random float32 Llama, whose heads of 32 dimensions vLLM's CPU attention supports."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(WORDS),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
        # transformers makes the embedding of a token for padding zero, and does not train it.
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tie_word_embeddings,
        # The range is larger than usual: so small a model learns several times faster with it.
        initializer_range=0.08,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Writes the model and its tokenizer to the folder that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(arguments.folder)
    make_model(arguments.folder, seed=arguments.seed)


if __name__ == "__main__":
    main()
