"""A tiny model whose tokenizer writes any text byte by byte, with ChatML, tools and reasoning."""

from collections.abc import Sequence
from pathlib import Path

END = "<|im_end|>"
SPECIAL_TOKENS = ["<pad>", "<|im_start|>", END]
# Tokens that belong to the text, as a parser of tool calls wants them.
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def make_chat_tokenizer(
    folder: Path,
    template: str = CHAT_TEMPLATE,
    *,
    words: Sequence[str] = (),
    end: str = END,
    start: str | None = None,
) -> int:
    """Saves the tokenizer; returns the size of its vocabulary. Each of `words` is one token.

    `end` and `start` are its tokens EOS and BOS.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [
        *SPECIAL_TOKENS,
        *MARKS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *words,
    ]
    tokenizer = Tokenizer(
        models.BPE({name: n for n, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(name, special=False, normalized=False) for name in (*MARKS, *words)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=end,
        bos_token=start,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return len(names)


def make_chat_model(
    folder: Path,
    *,
    with_weights: bool = True,
    max_length: int = 4096,
    words: Sequence[str] = (),
) -> Path:
    """Saves a tiny Llama, with random weights or with none; returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=make_chat_tokenizer(folder, words=words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    if with_weights:
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder
