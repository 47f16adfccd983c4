"""The text of a reply, read whole or in parts, is what vLLM reads token by token."""

import random
from types import SimpleNamespace

import pytest
from slipstream.rollout_server.engine_interface import TextOptions
from slipstream.rollout_server.vllm.vllm_requests import ReplyText
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

SPECIAL = ["<s>", "</s>", "<tool>"]
TEXT = [
    "the wörld is größer than 3 apples 🍎🍏, 日本語 too",
    "a b c the the",
    "<x> { } \n\n tab\t",
]


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Makes a small tokenizer with pieces of bytes, or with words that begin with a space."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("with_stop", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
@pytest.mark.parametrize("longest", [20, 3, 1])
def test_a_reply_that_is_read_in_parts_is_read_alike(
    kind, with_stop, skip_special_tokens, longest
):
    words = tokenizer(kind)
    options = TextOptions(with_stop=with_stop, skip_special_tokens=skip_special_tokens)
    generator = random.Random(3)
    for _ in range(300):
        sizes = generator.randint(1, 12), generator.randint(1, 20)
        prompt, reply = (
            [generator.randrange(len(words)) for _ in range(n)] for n in sizes
        )
        if kind == "bytes":
            # A prompt is text, and a reply may end in the middle of a character.
            parts = [" ".join(generator.sample(TEXT, 2)) for _ in range(2)]
            prompt, reply = (
                words.encode(part, add_special_tokens=False) for part in parts
            )
            reply = reply[: generator.randint(1, len(reply))]
        stopped = generator.random() < 0.5
        parameters = SamplingParams(
            include_stop_str_in_output=with_stop,
            skip_special_tokens=skip_special_tokens,
        )
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=prompt, sampling_params=parameters
        )
        one_by_one = FastIncrementalDetokenizer(words, request)
        text = ReplyText(words, prompt, options)
        while reply:
            part = reply[:longest]
            reply = reply[longest:]
            reason = None if reply else "stop" if stopped else "length"
            one_by_one.update(list(part), stopped and not reply)
            expected = one_by_one.get_next_output_text(finished=not reply, delta=True)
            assert text.read(part, reason) == expected
