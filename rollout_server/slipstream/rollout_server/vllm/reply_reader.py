"""Reads reasoning and tool calls in replies, with the parsers that vLLM uses for agents."""

import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from slipstream.core.errors import EnvironmentFailed
from slipstream.core.models.families import family_of
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.agents.recorder import CURRENT, MESSAGES_PATH
from slipstream.rollout_server.chat import (
    ENDED_BY_MODEL,
    ParsedReply,
    ParsedToolCall,
    ReplyEnding,
    TemplateInputs,
    read_arguments,
)
from slipstream.rollout_server.engine_interface import GenerationFailed
from slipstream.rollout_server.episodes.renderer import LAST_TOKENS
from slipstream.rollout_server.vllm.finished_calls import calls_that_ended
from slipstream.v1 import trajectory_pb2
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParser
from vllm.tool_parsers.utils import get_function_tools

log = logging.getLogger(__name__)
_CACHED_REQUESTS = 128
# A longer id, which some models write themselves, does not fit into a message and is replaced.
_MAX_ID_BYTES = 1024
# The errors of parsers for calls that a model wrote wrongly.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class WholeReply(Parser):  # type: ignore[misc]
    """Reads whole replies with the parser of vLLM behind it in a class's bases.

    A stream gets its reply in one part: from replies in parts many parsers of vLLM lose calls, and
    behind a prompt with ended thoughts of an earlier reply they take new thoughts for text.
    """

    # How the reply to an environment ended. The call of an agent has the ending of its own reply.
    ending: ReplyEnding = ENDED_BY_MODEL
    _prompt: Sequence[int] = ()
    # Whether the parser behind this class reads calls through `extract_tool_calls`.
    _extracts = False

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None, **options: Any) -> None:  # noqa: ANN401 - vLLM's own
        super().__init__(tokenizer, _chat_tools(tools), **options)

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Implements vLLM's method."""
        self._prompt = prompt_token_ids
        super().set_prompt_token_ids(prompt_token_ids)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:  # noqa: ANN401 - vLLM's own
        """Implements vLLM's method; without a mark of thoughts the reply is an answer."""
        parser = self.reasoning_parser
        start = parser and parser.reasoning_start_str
        end = parser and parser.reasoning_end_str
        if start and end and start not in model_output and end not in model_output:
            prompt_end: str = self.model_tokenizer.decode(self._prompt[-LAST_TOKENS:])
            if prompt_end.rfind(start) <= prompt_end.rfind(end):
                return None, model_output
        parts: tuple[str | None, str | None] = super().extract_reasoning(model_output, request)
        return parts

    def extract_tool_calls(
        self,
        model_output: str,
        request: Any,  # noqa: ANN401 - vLLM's own
    ) -> ExtractedToolCallInformation:
        """Implements vLLM's method.

        Calls that a parser cannot read are text with any parser. So is a call that a limit or a
        stop text ended in the middle.
        """
        self._extracts = True
        extract = super().extract_tool_calls

        def calls_in(parser: ToolParser | None, text: str) -> ExtractedToolCallInformation:
            self._tool_parser = parser
            try:
                calls: ExtractedToolCallInformation = extract(text, request)
                if calls.tool_calls or not calls.tools_called:
                    return calls
            except _UNREADABLE as error:
                log.info("a reply is text, as its calls cannot be read: %r", error)
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=text)

        parser = self._tool_parser
        ending = self._ending
        if parser is None or ending.by_model:
            return calls_in(parser, model_output)
        return calls_that_ended(parser, model_output, ending.stop, calls_in)

    def parse(
        self,
        model_output: str,
        request: Any,  # noqa: ANN401 - vLLM's own
        **keywords: Any,  # noqa: ANN401 - vLLM's own
    ) -> tuple[str | None, str | None, list[FunctionCall]]:
        """Implements vLLM's method; tells the current call what its client gets."""
        chat_request = request.model_copy(update={"tools": _chat_tools(request.tools)})
        reasoning, content, parsed_calls = super().parse(model_output, chat_request, **keywords)
        calls = [
            call
            if call.id and len(call.id.encode()) <= _MAX_ID_BYTES
            else call.model_copy(update={"id": make_tool_call_id()})
            for call in parsed_calls or ()
        ]
        if calls and not (self._ending.by_model or self._extracts):
            # A parser without `extract_tool_calls` tells no end of a call. Only the last call can
            # have none.
            *calls, last_call = calls
            content = (content or "") + last_call.arguments
        if (current := CURRENT.get()) is not None:
            _, opened = current
            arguments = [read_arguments(call.arguments) for call in calls]
            if opened.path == MESSAGES_PATH and not all(isinstance(a, dict) for a in arguments):
                # Anthropic's API has no place for such calls.
                log.info("a reply is text, as a call's arguments are no object: %r", model_output)
                reasoning = None
                content = model_output
                calls = []
            answered = calls[:1] if request.parallel_tool_calls is False else calls
            functions = [{"id": call.id, "function": call.model_dump()} for call in answered]
            message = {"role": "assistant", "content": content, "reasoning": reasoning}
            opened.reply = {**message, "tool_calls": functions}
        return reasoning, content, calls

    @property
    def _ending(self) -> ReplyEnding:
        current = CURRENT.get()
        return self.ending if current is None else current[1].ending

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,  # noqa: ANN401 - vLLM's own
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage:
        """Implements vLLM's method for a part that is the whole reply."""
        assert finished, "what is parsed is not streamed in parts"
        self.set_prompt_token_ids(prompt_token_ids or ())
        reasoning, content, calls = self.parse(
            delta_text,
            request,
            enable_auto_tools=self.tool_parser is not None,
            model_output_token_ids=delta_token_ids,
        )
        return DeltaMessage(
            reasoning=(reasoning or None) if request.include_reasoning else None,
            content=content or None,
            tool_calls=[
                DeltaToolCall(
                    index=index,
                    id=call.id,
                    type="function",
                    function=DeltaFunctionCall(name=call.name, arguments=call.arguments),
                )
                for index, call in enumerate(calls)
            ],
        )


def _chat_tools(tools: Sequence[Any] | None) -> list[ChatCompletionToolsParam]:
    """Returns tools of any API as those of chat completions: some parsers read no others."""
    chat_tools: list[ChatCompletionToolsParam] = []
    for tool in get_function_tools(tools or ()):
        if not isinstance(tool, ChatCompletionToolsParam):
            function = tool.model_dump(include={"name", "description", "parameters", "strict"})
            tool = ChatCompletionToolsParam(function=function)
        chat_tools.append(tool)
    return chat_tools


def of_whole_replies(kind: type[Parser] | None, llm: EngineClient) -> type[Parser] | None:
    """Returns a class of vLLM's parsers as one that reads whole replies alone.

    Raises the error of a parser that reads none, such as one made for another model.
    """
    # A model that writes a call wrongly is no fault of the server.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    whole_kind = kind and type(kind.__name__, (WholeReply, kind), {})
    if whole_kind is not None and issubclass(whole_kind, DelegatingParser):
        parser = whole_kind(llm.renderer.get_tokenizer(), model_config=llm.model_config)
        parser.extract_reasoning("", ChatCompletionRequest(messages=[]))
    return whole_kind


class ReplyReader:
    """Parses whole replies into reasoning, tool calls and text; stateless."""

    def __init__(self, llm: EngineClient, settings: RolloutServerSection) -> None:
        """Opens the parsers; raises vLLM's error for parsers that do not fit the tokenizer."""
        self._llm = llm
        self._model = llm.model_config
        self._tokenizer: Any = llm.renderer.get_tokenizer()
        self._special_ids = frozenset(self._tokenizer.all_special_ids)
        self._settings = settings
        # A parser of tool calls would also cut calls out of replies to requests without tools, and
        # lose them. The parser with tools is made last: if a model has its own parser class, vLLM
        # keeps the newest parser in that class.
        self._plain_kind = self._parsing(None)
        self._kind = self._parsing(settings.tool_parser)
        self._request = lru_cache(_CACHED_REQUESTS)(self._make_request)

    def _parsing(self, tool_parser: str | None) -> type[Parser] | None:
        kind: type[Parser] | None = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=self._settings.reasoning_parser,
            enable_auto_tools=tool_parser is not None,
            model_name=self._model.model,
            is_harmony=family_of(self._model.hf_config.to_dict()).engine.is_harmony,
            tokenizer=self._tokenizer,
        )
        return of_whole_replies(kind, self._llm)

    def check(self, inputs: TemplateInputs) -> None:
        try:
            self._request(inputs)
        except Exception as error:
            cause = f"vLLM refuses its tools: {type(error).__name__}: {error}"
            raise EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause) from error

    def read(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        inputs: TemplateInputs,
        ending: ReplyEnding = ENDED_BY_MODEL,
    ) -> ParsedReply:
        request = self._request(inputs)
        tokens = list(token_ids)
        # A special token with which the model ended the reply is no part of its text.
        if ending.by_model and tokens and tokens[-1] in self._special_ids:
            tokens.pop()
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        try:
            parser = self._parser(request, inputs)
            parser.ending = ending
            parser.set_prompt_token_ids(prompt)
            reasoning, content, calls = parser.parse(
                text,
                request,
                enable_auto_tools=self._settings.tool_parser is not None,
                model_output_token_ids=tokens,
            )
        except Exception as error:
            raise GenerationFailed(
                f"rollout_server.tool_parser = {self._settings.tool_parser!r}, reasoning_parser = "
                f"{self._settings.reasoning_parser!r} cannot read a reply: "
                f"{type(error).__name__}: {error}"
            ) from error
        return ParsedReply(
            content or "",
            reasoning or "",
            tuple(ParsedToolCall(call.id, call.name, call.arguments) for call in calls),
        )

    def _parser(self, request: ChatCompletionRequest, inputs: TemplateInputs) -> Parser:
        values = dict(self._settings.chat_template_kwargs)
        if inputs.values:
            values |= json.loads(inputs.values)
        kind = self._kind if inputs.tools else self._plain_kind
        assert kind is not None, "replies that no parser reads have no reader"
        return kind(
            self._tokenizer, request.tools, chat_template_kwargs=values, model_config=self._model
        )

    def _make_request(self, inputs: TemplateInputs) -> ChatCompletionRequest:
        """Returns the chat request that vLLM's parsers need to parse a reply."""
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
        if inputs.tools:
            fields["tools"] = json.loads(inputs.tools)
        request = ChatCompletionRequest(**fields)
        adjusted = self._parser(request, inputs).adjust_request(request)
        assert isinstance(adjusted, ChatCompletionRequest)
        return adjusted
