"""Finds the tool calls of a reply whose text ends in the middle: at a limit, or at a stop text.

Many parsers of vLLM hand out a call whose text did not end, with the arguments read so far, as if
the model had said them. A call whose text did not end must not run.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation
from vllm.parser.engine.adapters import ParserEngineToolAdapter
from vllm.parser.engine.events import EventType
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
from vllm.tool_parsers import ToolParser

# By the class of a parser of its own kind that completes what a model wrote of a call: the mark at
# the end of its calls, if `tool_call_end_token` does not name it. Others read whole calls alone.
_END_MARKS = {"ApertusToolParser": "<|tools_suffix|>"}
# States of an engine of parsers in which a call is open.
_IN_CALLS = frozenset(
    {
        ParserState.TOOL_PREAMBLE,
        ParserState.TOOL_NAME,
        ParserState.TOOL_ARGS,
        ParserState.TOOL_BETWEEN,
    }
)

Extract: TypeAlias = Callable[[ToolParser, str], ExtractedToolCallInformation]


def calls_that_ended(
    parser: ToolParser, text: str, stop: str, extract: Extract
) -> ExtractedToolCallInformation:
    """Returns the calls in `text`, which ends in the middle, whose own text ended.

    The text of a call that did not end is content. `stop` is the text that ended the reply behind
    `text`, or "". `extract` reads a text with a parser, and finds no calls where it cannot.
    """
    if isinstance(parser, ParserEngineToolAdapter):
        end = _end_in_engine(parser, text, stop)
    else:
        end = _end_of_text(parser, text, stop, extract)
    if end is None:
        return extract(_anew(parser), text)
    ended_calls = extract(_anew(parser), text[:end])
    if not ended_calls.tool_calls:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=text)
    rest = text[end:]
    if not _has_words(parser, rest):
        return ended_calls
    content = ended_calls.content or ""
    return ended_calls.model_copy(update={"content": content + rest})


class _EngineState(NamedTuple):
    """What an engine of parsers has read of a text.

    `next_mark` is the mark of a call that began where the last call ended, or "".
    """

    num_ended: int
    is_open: bool
    next_mark: str


def _end_in_engine(parser: ParserEngineToolAdapter, text: str, stop: str) -> int | None:
    """Returns the end of the last call that ended, 0 without one, or None if no call is open."""
    state = _engine_state(parser, text + stop)
    if not state.is_open:
        return None
    if not state.num_ended:
        return 0

    def num_ended(end: int) -> int:
        return _engine_state(parser, text[:end]).num_ended

    ends = range(len(text) + 1)
    end = bisect_left(ends, state.num_ended, key=num_ended)
    if end > len(text):
        # The stop text itself ended the last call.
        return None
    next_mark = _engine_state(parser, text[:end]).next_mark
    return end - len(next_mark)


def _engine_state(parser: ParserEngineToolAdapter, text: str) -> _EngineState:
    wrapper = parser._parser_engine
    wrapper._reset(initial_state=ParserState.CONTENT)
    engine = wrapper._engine
    events = wrapper._feed(text, [])
    # vLLM's `finish` begins so; then it ends the open call, as if the model had done so.
    pending_items = engine._scanner.flush_pending()
    events += engine._process_scanner_items(pending_items)
    pending_tokens = engine._lexer.flush()
    events += engine._process_lex_tokens(pending_tokens)
    num_ended = 0
    next_mark = ""
    for event in events:
        if event.type is EventType.TOOL_CALL_END:
            num_ended += 1
            next_mark = ""
        elif event.type is EventType.TOOL_CALL_START:
            next_mark = event.value
        elif event.value:
            next_mark = ""
    is_open = engine.state in _IN_CALLS
    if is_open and engine.config.tool_args_json and _is_closed(engine):
        # Whole JSON cannot go on, with or without a mark behind it.
        return _EngineState(num_ended + 1, is_open=False, next_mark="")
    return _EngineState(num_ended, is_open, next_mark)


def _is_closed(engine: StreamingParserEngine) -> bool:
    """Returns whether the JSON of the open call's arguments has been closed."""
    if engine._args_in_string or engine._args_brace_depth:
        return False
    held_back: str = engine._args_buffer
    return held_back.rstrip().endswith("}")


def _end_of_text(parser: ToolParser, text: str, stop: str, extract: Extract) -> int | None:
    """Returns what `_end_in_engine` does, for a parser of its own kind."""

    def num_calls(end: int) -> int:
        calls = extract(_anew(parser), text[:end])
        return len(calls.tool_calls)

    num_in_text = num_calls(len(text))
    if not num_in_text:
        # Kimi K3's parser leaves out what it does not understand of the calls.
        opening = getattr(parser, "tools_open", None)
        return 0 if isinstance(opening, str) and opening in text else None
    class_mark = _END_MARKS.get(type(parser).__name__)
    mark = getattr(parser, "tool_call_end_token", class_mark)
    if isinstance(mark, str) and mark:
        place = (text + stop).rfind(mark)
        end = place + len(mark) if place >= 0 else 0
        return None if end > len(text) else end
    ends = range(len(text) + 1)
    return bisect_left(ends, num_in_text, key=num_calls)


def _anew(parser: ToolParser) -> ToolParser:
    """Returns a parser like `parser`, which may keep what it read, as if it had read nothing."""
    if isinstance(parser, ParserEngineToolAdapter):
        return parser
    return type(parser)(parser.model_tokenizer, parser.tools)


def _has_words(parser: ToolParser, text: str) -> bool:
    """Returns whether `text` has more than white space and added tokens, such as closing marks."""
    tokenizer: Any = parser.model_tokenizer
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, "")
    return bool(text.strip())
