"""Calls in replies that end anywhere, as each parser of vLLM reads them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
# One of each kind: with an engine of terminals, of JSON, of a list; an own one with a mark.
USUAL = {"qwen3_coder", "mistral", "granite", "hermes", "apertus", "hy_v3"}
NAMES = [
    name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in sorted(TEXTS)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_chat_tokenizer(folder, words=marks((*MARKS, *SPECIAL_TOKENS)))
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return tokenizer


def parsed(name: str, tokenizer: Any, text: str, ending: ReplyEnding) -> tuple[list, str]:
    kind = ParserManager.get_parser(
        tool_parser_name=name, enable_auto_tools=True, model_name="", tokenizer=tokenizer
    )
    renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    llm: Any = SimpleNamespace(renderer=renderer, model_config=None)
    request = ChatCompletionRequest(messages=[], tools=TOOLS)
    whole_kind = of_whole_replies(kind, llm)
    assert whole_kind is not None
    parser = whole_kind(tokenizer, request.tools)
    parser.ending = ending
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    _, content, calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=token_ids
    )
    return [(call.name, json.loads(call.arguments)) for call in calls], content or ""


def test_each_parser_of_vllm_has_a_text() -> None:
    assert set(_TOOL_PARSERS_TO_REGISTER) == set(TEXTS) | ELSEWHERE


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_handed_out_only_if_its_text_ended(name: str, tokenizer: Any) -> None:
    text = TEXTS[name]
    calls, _ = parsed(name, tokenizer, text, ENDED_BY_MODEL)
    assert calls in (CALLS, CALLS[:1])
    assert parsed(name, tokenizer, text, CUT)[0] == calls
    for end in range(len(text)):
        handed, content = parsed(name, tokenizer, text[:end], CUT)
        assert handed == CALLS[: len(handed)]
        if not handed and "51" in text[:end]:
            # Some formats have marks around each text, too.
            assert content.rstrip().endswith(text[:end].rstrip()[-8:])


def test_the_text_of_a_second_call_that_was_cut_stays(tokenizer: Any) -> None:
    text = TEXTS["qwen3_coder"]
    end = text.index("62") + 1
    calls, content = parsed("qwen3_coder", tokenizer, text[:end], CUT)
    assert calls == CALLS[:1]
    assert content.startswith("I call.")
    assert content.endswith("<function=add>\n<parameter=a>\n6")


@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
def test_a_stop_text_may_be_the_end_of_a_call(name: str, tokenizer: Any) -> None:
    text, _, _ = TEXTS[name].partition("</tool_call>")
    ending = ReplyEnding(by_model=False, stop="</tool_call>")
    assert parsed(name, tokenizer, text, ending)[0] == CALLS[:1]


def test_what_a_model_ends_without_a_mark_is_a_call(tokenizer: Any) -> None:
    text, _, _ = TEXTS["hermes"].partition("\n</tool_call>")
    assert parsed("hermes", tokenizer, text, ENDED_BY_MODEL)[0] == CALLS[:1]
