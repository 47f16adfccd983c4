"""Calls in replies that end anywhere, as each parser of vLLM reads them."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from slipstream.rollout_server.chat import ENDED_BY_MODEL, ReplyEnding
from slipstream.rollout_server.vllm.reply_reader import of_whole_replies
from support.fakes.chat_models import MARKS, SPECIAL_TOKENS, make_chat_tokenizer
from support.fakes.tool_call_texts import CALLS, TEXTS, TOOLS, marks
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER

CUT = ReplyEnding(by_model=False)
# Parsers that need a package, a file of the hub, or a template in the model's folder.
ELSEWHERE = {"cohere_command3", "cohere_command4", "openai", "hf"}
# A parser of each kind: with an engine of terminals, of JSON, of a list; an own one with a mark.
USUAL = {"qwen3_coder", "mistral", "granite", "hermes", "apertus", "hy_v3"}


def parser_names() -> Iterator[Any]:
    for name in sorted(TEXTS):
        if name in USUAL:
            yield name
        else:
            yield pytest.param(name, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    words = marks((*MARKS, *SPECIAL_TOKENS))
    make_chat_tokenizer(folder, words=words)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    special_tokens = ["<|python_tag|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens})
    return tokenizer


class Reply(NamedTuple):
    """The calls that a parser hands out of a text, and the text that stays content."""

    calls: list[tuple[str, Any]]
    content: str


def parsed(name: str, tokenizer: Any, text: str, ending: ReplyEnding) -> Reply:
    kind = ParserManager.get_parser(
        tool_parser_name=name,
        enable_auto_tools=True,
        model_name="",
        tokenizer=tokenizer,
    )
    llm: Any = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
        model_config=None,
    )
    whole_kind = of_whole_replies(kind, llm)
    assert whole_kind is not None
    request = ChatCompletionRequest(messages=[], tools=TOOLS)
    parser = whole_kind(tokenizer, request.tools)
    parser.ending = ending
    _, content, parsed_calls = parser.parse(
        text,
        request,
        enable_auto_tools=True,
        model_output_token_ids=tokenizer.encode(text, add_special_tokens=False),
    )
    calls = []
    for call in parsed_calls:
        arguments = json.loads(call.arguments)
        calls.append((call.name, arguments))
    return Reply(calls, content or "")


def test_each_parser_of_vllm_has_a_text() -> None:
    assert set(_TOOL_PARSERS_TO_REGISTER) == set(TEXTS) | ELSEWHERE


@pytest.mark.parametrize("name", parser_names())
def test_a_call_is_handed_out_only_if_its_text_ended(name: str, tokenizer: Any) -> None:
    text = TEXTS[name]
    reply = parsed(name, tokenizer, text, ENDED_BY_MODEL)
    assert reply.calls in (CALLS, CALLS[:1])
    cut_reply = parsed(name, tokenizer, text, CUT)
    assert cut_reply.calls == reply.calls
    for end in range(len(text)):
        sampled_text = text[:end]
        cut_reply = parsed(name, tokenizer, sampled_text, CUT)
        num_calls = len(cut_reply.calls)
        assert cut_reply.calls == CALLS[:num_calls]
        if not num_calls and "51" in sampled_text:
            # Some formats have marks around each text, too.
            tail = sampled_text.rstrip()[-8:]
            assert cut_reply.content.rstrip().endswith(tail)


def test_the_text_of_a_second_call_that_was_cut_stays(tokenizer: Any) -> None:
    text = TEXTS["qwen3_coder"]
    end = text.index("62") + 1
    reply = parsed("qwen3_coder", tokenizer, text[:end], CUT)
    assert reply.calls == CALLS[:1]
    assert reply.content.startswith("I call.")
    assert reply.content.endswith("<function=add>\n<parameter=a>\n6")


@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
def test_a_stop_text_may_be_the_end_of_a_call(name: str, tokenizer: Any) -> None:
    text, _, _ = TEXTS[name].partition("</tool_call>")
    ending = ReplyEnding(by_model=False, stop="</tool_call>")
    reply = parsed(name, tokenizer, text, ending)
    assert reply.calls == CALLS[:1]


def test_what_a_model_ends_without_a_mark_is_a_call(tokenizer: Any) -> None:
    text, _, _ = TEXTS["hermes"].partition("\n</tool_call>")
    reply = parsed("hermes", tokenizer, text, ENDED_BY_MODEL)
    assert reply.calls == CALLS[:1]
