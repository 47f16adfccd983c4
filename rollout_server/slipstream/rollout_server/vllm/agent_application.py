"""vLLM's own HTTP application, in this process and without a port, over this server's engine.

It answers chat completions, responses, Anthropic's messages and the list of models. vLLM's server
has more paths, a metrics registry and middlewares, all of which are left out. A prompt that
continues a conversation has the conversation's exact tokens and images.
"""

import argparse
import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from slipstream.core.models.images import PlacedImage, data_of_url
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.agents.agent_api import MODEL, Answering
from slipstream.rollout_server.agents.conversations import Found, message_key
from slipstream.rollout_server.agents.recorder import (
    CHAT_PATH,
    CURRENT,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Recorder,
)
from slipstream.rollout_server.agents.request_rules import Refusal, ServedCall
from slipstream.rollout_server.chat import PLACEHOLDER, REPLY, RESULT, ReplyEnding
from slipstream.rollout_server.engine_interface import FinishReason, TextOptions, TextPart
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed, limited_time
from slipstream.rollout_server.vllm.reply_reader import of_whole_replies
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.api_router import attach_router as attach_messages
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor,
    SimpleStreamingState,
    _StateType,
)
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Stands for an image in the messages that are rendered; no template may change its text.
MARK = "slipstreamimageplaceholder"
_IMAGE_PARTS = {"image_url", "input_image"}
# Types of message parts whose text vLLM reads. vLLM would fetch the images and files of others.
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}

_REPLY = REPLY.for_template()
_RESULT = RESULT.for_template()
# Texts with more characters are rendered in a thread, so that they do not hold up other episodes.
_INLINE_CHARACTERS = 20_000
# Characters of a message that an error shows.
_SHOWN = 40
Message = Mapping[str, Any]


class PromptRenderer:
    """Replaces vLLM's renderer, which turns the messages of a request into a prompt.

    Only the messages after a recorded conversation are tokenized; the conversation's tokens are
    reused.
    """

    def __init__(self, renderer: BaseRenderer, episode_renderer: Renderer) -> None:
        """`episode_renderer` tokenizes: when vLLM truncates, its tokenizer changes its state."""
        self._inner = renderer
        self._own = episode_renderer
        self._image_text = "" if episode_renderer.images is None else episode_renderer.image_text
        # Whether results of tools can follow a reply; None before the first result.
        self._has_place: bool | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - everything else is vLLM's
        return getattr(self._inner, name)

    async def render_chat_async(
        self,
        conversations: Sequence[list[Message]],
        chat_params: ChatParams,
        tok_params: TokenizeParams | None = None,
        **options: Any,  # noqa: ANN401 - vLLM's own
    ) -> tuple[list[list[Message]], list[TokensInput]]:
        """Implements vLLM's method; the prompt of the current call comes from its recorder."""
        current = CURRENT.get()
        if current is None:
            with _refusals():
                for conversation in conversations:
                    without_images(conversation, sees_images=False)
            rendered: tuple[list[list[Message]], list[TokensInput]]
            rendered = await self._inner.render_chat_async(
                conversations, chat_params, tok_params, **options
            )
            return rendered
        (messages,) = conversations
        recorder, opened = current
        with _refusals():
            prompt = await self._prompt(recorder, opened, messages, chat_params)
        return [messages], [tokens_input(prompt)]

    async def _prompt(
        self, recorder: Recorder, opened: ServedCall, messages: list[Message], params: ChatParams
    ) -> list[int]:
        values = params.chat_template_kwargs
        settings = json.dumps(values, sort_keys=True, default=str)
        previous = recorder.find(opened, settings, [message_key(message) for message in messages])
        # A request to continue a message that the client wrote is tokenized as a whole.
        if values.get("continue_final_message") or values.get("add_generation_prompt") is False:
            previous = None
        length = sum(len(message.get("content") or "") for message in messages)
        max_characters = recorder.sampling.max_episode_tokens * self._own.longest_token
        marked, images = without_images(messages, sees_images=self._own.images is not None)

        async def render(previous: Found | None) -> list[int] | None:
            if length <= _INLINE_CHARACTERS:
                return self._render(marked, params, previous, max_characters)
            return await asyncio.to_thread(self._render, marked, params, previous, max_characters)

        context = await render(previous)
        if context is None:
            previous = None
            context = await render(None)
        assert context is not None
        placed: Sequence[PlacedImage] = ()
        if self._own.images is not None:
            num_known = previous.num_messages if previous else 0
            new = [image for new_images in images[num_known:] for image in new_images]
            context, placed = self._own.images.expanded(context, new)
        return await recorder.begin(opened, previous.turn if previous else None, context, placed)

    def _render(
        self,
        messages: list[Message],
        params: ChatParams,
        previous: Found | None,
        max_characters: int,
    ) -> list[int] | None:
        """Returns the tokens of the messages after `previous`, or None if they cannot be appended.

        If `previous` is None, all messages are tokenized. A text of more than `max_characters` is
        not tokenized: the result is then more placeholder tokens than any limit allows.
        """
        values = params.chat_template_kwargs
        closed = replace(params, chat_template_kwargs={**values, "add_generation_prompt": False})
        if previous is None:
            text = self._text(messages, params)
            if values.get("add_generation_prompt") and not values.get("continue_final_message"):
                text = self._own.asking(text, lambda: self._text([*messages, _REPLY], closed))
            self._check_written(messages, messages, text, params)
            return self._tokens(text, max_characters)
        num_known = previous.num_messages
        new = messages[num_known:]
        if any(message.get("role") == "tool" for message in new) and not self._takes_results(
            params
        ):
            return None
        try:
            text = self._text([*messages[: num_known - 1], _REPLY, *new], params)
        except VLLMValidationError:
            # A template may demand what a plain reply lacks, such as calls before their results.
            return None
        if text.count(PLACEHOLDER) != 1:
            return None
        _, _, tail = text.partition(PLACEHOLDER)
        self._check_written(messages, new, tail, params)
        if messages[num_known - 1].get("tool_calls"):
            # Some templates write results by the names of calls; those that cannot write this call
            # write them behind a plain reply.
            with contextlib.suppress(VLLMValidationError):
                if not self._text(messages, params).endswith(tail):
                    return None
        with_reply = [*messages[: num_known - 1], _REPLY, *new, _REPLY]
        tail = self._own.asking(tail, lambda: self._text(with_reply, closed))
        last = previous.turn.branch.token_ids[previous.turn.end - 1]
        if last in self._own.added:
            # The reply has ended: what is left out of the template's end is the token itself, with
            # white space before it.
            tokens = self._tokens(tail.lstrip(), max_characters)
            if tokens[:1] == [last]:
                return tokens[1:]
        return self._tokens(tail, max_characters)

    def _check_written(
        self,
        messages: list[Message],
        new: list[Message],
        text: str,
        params: ChatParams,
    ) -> None:
        """Raises VLLMValidationError if `text` lacks one of `new` because the template drops it.

        A text that the template writes otherwise, such as escaped, is found by a mark in its place.
        """
        for message in new:
            content = message.get("content")
            if message.get("role") == "assistant" or not isinstance(content, str):
                continue
            if content.strip() in text:
                continue
            marked = [
                {**other, "content": _RESULT["content"]} if other is message else other
                for other in messages
            ]
            try:
                is_written = _RESULT["content"] in self._text(marked, params)
            except VLLMValidationError:
                # The template wants another text there, and has written this one.
                continue
            if not is_written:
                raise VLLMValidationError(
                    f"the chat template leaves out a message of role {message.get('role')!r}, "
                    f"{content[:_SHOWN]!r}: write it into one that the template shows",
                    parameter="messages",
                )

    def _takes_results(self, params: ChatParams) -> bool:
        """Returns whether the template renders tool results after a reply, not inside its calls."""
        if self._has_place is None:
            try:
                text = self._text([{"role": "user", "content": "a"}, _REPLY, _RESULT], params)
            except VLLMValidationError:
                text = ""
            self._has_place = _RESULT["content"] in text.partition(PLACEHOLDER)[2]
        return self._has_place

    def _text(self, messages: list[Message], params: ChatParams) -> str:
        try:
            with limited_time():
                _, prompt = self._inner.render_messages(messages, params)
        except VLLMValidationError:
            raise
        except Exception as error:
            # A template is a program, which may raise anything.
            cause = f"the chat template fails: {type(error).__name__}: {error}"
            raise VLLMValidationError(cause, parameter="messages") from error
        if not isinstance(prompt.get("prompt"), str):
            raise VLLMValidationError("this model's prompts are not text", parameter="model")
        return str(prompt["prompt"])

    def _tokens(self, text: str, most_characters: int) -> list[int]:
        if len(text) > most_characters:
            # Tokenizing it would only delay the answer that it is too long.
            return [0] * (most_characters // self._own.longest_token + 1)
        return self._own.tokens(text.replace(MARK, self._image_text))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Re-raises an error about messages as vLLM's error, which is reported to the agent."""
    try:
        yield
    except VLLMValidationError:
        raise
    except (Refusal, RenderingFailed, ValueError) as error:
        raise VLLMValidationError(str(error), parameter="messages") from error


def without_images(
    messages: Sequence[Mapping[str, Any]], *, sees_images: bool
) -> tuple[list[Mapping[str, Any]], list[list[bytes]]]:
    """Returns the messages with a placeholder for each image, and each message's list of images.

    Raises ValueError for a part that is neither text nor an image in a data URL, or for an image
    unless the model `sees_images`.
    """
    marked: list[Mapping[str, Any]] = []
    images: list[list[bytes]] = []
    for message in messages:
        message_images: list[bytes] = []
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            parts = [_marked(part, message_images, sees_images=sees_images) for part in content]
            message = {**message, "content": parts} if message_images else message
        marked.append(message)
        images.append(message_images)
    return marked, images


def _marked(part: object, images: list[bytes], *, sees_images: bool) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else "text"
    if kind in _TEXT_PARTS:
        return part
    if not (sees_images and kind in _IMAGE_PARTS and isinstance(part, Mapping)):
        allowed = "text or images" if sees_images else "text"
        raise ValueError(f"messages of agents must be {allowed}, got a part of type {kind}")
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    images.append(data_of_url(str(url)))
    return {"type": "text", "text": MARK}


class RecordingClient:
    """The engine of vLLM's application: each reply is sampled and recorded by a `Recorder`."""

    errored = False
    is_running = True
    input_processor = None

    def __init__(self, llm: EngineClient, *, is_parsed: bool) -> None:
        """A parser reads the replies, as a whole, if `is_parsed`."""
        self._is_parsed = is_parsed
        self.vllm_config = llm.vllm_config
        self.model_config = llm.model_config
        self.renderer = llm.renderer

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Implements vLLM's method; admits every call."""

    async def is_tracing_enabled(self) -> bool:
        """Implements vLLM's method; returns False."""
        return False

    def generate(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        **unused: Any,  # noqa: ANN401 - vLLM's own
    ) -> AsyncGenerator[RequestOutput, None]:
        """Implements vLLM's method; uses only the parameters that a request may choose here."""
        current = CURRENT.get()
        call = None if current is None else current[1].call
        if current is None or call is None:
            raise VLLMValidationError("an agent's prompt must be messages", parameter="prompt")
        recorder, opened = current
        is_streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        options = TextOptions(
            is_streamed=is_streamed and not self._is_parsed,
            stop=tuple(sampling_params.stop or ()),
            seed=sampling_params.seed,
            num_logprobs=sampling_params.logprobs,
            with_stop=sampling_params.include_stop_str_in_output,
            # Parsers look for marks, some of which are special tokens.
            skip_special_tokens=sampling_params.skip_special_tokens and not self._is_parsed,
            spaces_between_special_tokens=sampling_params.spaces_between_special_tokens,
        )
        reply_limit = sampling_params.max_tokens or recorder.sampling.max_reply_tokens
        parts = recorder.sample(opened, reply_limit, options)
        return _outputs(parts, request_id, opened, with_stop=options.with_stop)


async def _outputs(
    parts: AsyncGenerator[TextPart, None],
    request_id: str,
    opened: ServedCall,
    *,
    with_stop: bool,
) -> AsyncGenerator[RequestOutput, None]:
    assert opened.call is not None, "a call begins before it is sampled"
    prompt = opened.call.prompt
    text = ""
    async for part in parts:
        end = part.generation
        text += part.text
        if end is not None:
            # A parser that reads the reply tells it anew.
            opened.reply = {"role": "assistant", "content": text}
            opened.is_cut = end.finish_reason is FinishReason.LENGTH
            opened.ending = _ending(end.finish_reason, part.stop_reason, with_stop=with_stop)
        completion = CompletionOutput(
            index=0,
            text=part.text,
            token_ids=part.token_ids,
            cumulative_logprob=None,
            logprobs=part.top_logprobs,
            finish_reason=None if end is None else end.finish_reason.value,
            stop_reason=part.stop_reason,
        )
        cached = None if end is None else end.cached_tokens
        yield RequestOutput(
            request_id, None, prompt, None, [completion], end is not None, None,
            num_cached_tokens=cached,
        )  # fmt: skip


def _ending(reason: FinishReason, stop_reason: int | str | None, *, with_stop: bool) -> ReplyEnding:
    """Returns how a reply ended; `with_stop` says that its text has the stop text."""
    if isinstance(stop_reason, str):
        return ReplyEnding(by_model=False, stop="" if with_stop else stop_reason)
    return ReplyEnding(by_model=reason is FinishReason.STOP)


def open_answering(
    llm: EngineClient, episode_renderer: Renderer, settings: RolloutServerSection
) -> Answering:
    """Returns the API for agents, of vLLM's applications for requests without and with tools.

    With a tool parser, vLLM would cut tool calls out of replies to requests without tools too,
    and lose them. Call this in a thread: it takes a second or two
    and needs no event loop.
    """
    renderer = PromptRenderer(llm.renderer, episode_renderer)
    plain = _open_application(llm, settings.model_copy(update={"tool_parser": None}), renderer)
    return Answering(
        plain,
        None if settings.tool_parser is None else _open_application(llm, settings, renderer),
        fields={
            CHAT_PATH: {*ChatCompletionRequest.model_fields},
            RESPONSES_PATH: {*ResponsesRequest.model_fields},
            MESSAGES_PATH: {*AnthropicMessagesRequest.model_fields},
        },
        variables=episode_renderer.variables,
        has_drafts=llm.vllm_config.speculative_config is not None,
    )


def _open_application(
    llm: EngineClient, settings: RolloutServerSection, renderer: PromptRenderer
) -> FastAPI:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    assert isinstance(arguments, argparse.Namespace)
    arguments.model = llm.model_config.model
    arguments.served_model_name = [MODEL]
    arguments.enable_prompt_tokens_details = True
    arguments.chat_template = settings.chat_template and str(settings.chat_template)
    arguments.default_chat_template_kwargs = dict(settings.chat_template_kwargs) or None
    arguments.enable_auto_tool_choice = settings.tool_parser is not None
    arguments.tool_call_parser = settings.tool_parser
    arguments.structured_outputs_config.reasoning_parser = settings.reasoning_parser or ""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.args = arguments
    for attach in (attach_chat, attach_responses, attach_messages, attach_models):
        attach(app)
    init_exception_handler(app)
    # vLLM logs a traceback for each request that it refuses; the agent has the cause in its answer.
    logging.getLogger("vllm.entrypoints").setLevel(logging.CRITICAL)
    is_parsed = settings.tool_parser is not None or settings.reasoning_parser is not None
    client: Any = RecordingClient(llm, is_parsed=is_parsed)
    asyncio.run(
        init_app_state(
            client,
            app.state,
            arguments,
            ("generate",),
        )
    )
    app.state.online_renderer.renderer = renderer
    responses = app.state.openai_serving_responses
    chat = app.state.openai_serving_chat
    _answer_as_openai(responses)
    for reading in (responses, app.state.online_renderer):
        reading.parser = of_whole_replies(reading.parser, llm)
    for serving in (chat, app.state.anthropic_serving_messages):
        serving.parser_cls = of_whole_replies(serving.parser_cls, llm)
        _tell_limits(serving)
    stream = chat.chat_completion_stream_generator

    async def streamed(*arguments: Any, **keywords: Any) -> AsyncGenerator[str, None]:  # noqa: ANN401
        async for event in stream(*arguments, **keywords):
            for part in _single_parts(event):
                yield part

    chat.chat_completion_stream_generator = streamed
    return app


def _single_parts(event: str) -> Iterator[str]:
    """Yields a chunk of vLLM's stream as OpenAI's: each has thoughts, a text or one call.

    The chunk of a reply that a parser has read may have all of them; clients read one.
    """
    if '"tool_calls":[{' not in event and '"reasoning":"' not in event:
        yield event
        return
    chunk = json.loads(event.removeprefix("data: "))
    (choice,) = chunk["choices"]
    calls = choice["delta"].pop("tool_calls", ())
    deltas = [{name: value} for name, value in choice["delta"].items() if value]
    deltas += [{"tool_calls": [call]} for call in calls]
    for number, delta in enumerate(deltas, start=1):
        part = {**choice, "delta": delta}
        part |= {"logprobs": None, "token_ids": None} if number > 1 else {}
        part |= {"finish_reason": None} if number < len(deltas) else {}
        yield f"data: {json.dumps({**chunk, 'choices': [part]})}\n\n"


def _tell_limits(serving: OpenAIServingChat) -> None:
    """Makes vLLM end a reply that a limit cut with the reason "length", as its streams do.

    vLLM gives the reason "tool_calls" to a whole reply with calls, however it ended.
    """
    answer = serving.chat_completion_full_generator

    async def answered(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - vLLM's own
        response = await answer(*arguments, **keywords)
        current = CURRENT.get()
        if current is not None and current[1].is_cut:
            for choice in getattr(response, "choices", ()):
                choice.finish_reason = FinishReason.LENGTH.value
        return response

    serving.chat_completion_full_generator = answered


def _answer_as_openai(serving: OpenAIServingResponses) -> None:
    """Makes vLLM answer an empty text as a message with one empty part, and count in numbers alone.

    vLLM answers a message without parts, which it cannot read itself, or no message at all. Clients
    that check what they read refuse the lists in its counts of tokens.
    """
    stream = serving._process_simple_streaming_events
    answer = serving.responses_full_generator

    async def streamed(*arguments: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - vLLM's own
        async for event in stream(*arguments):
            yield event
        context = arguments[3]
        numbered = arguments[-1]
        items = context.streamed_output_items
        if not _has_text_or_call(items):
            message, events = _empty_message(len(items))
            context.streamed_output_items = [*items, *message]
            for event in events:
                yield numbered(event)

    async def answered(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - vLLM's own
        response = await answer(*arguments, **keywords)
        if not isinstance(response, ResponsesResponse):
            return response
        if not _has_text_or_call(response.output):
            other_items = [item for item in response.output if item.type != "message"]
            response.output = [*other_items, *_empty_message(len(other_items))[0]]
        assert response.usage is not None, "whatever is answered was counted"
        for details in (response.usage.input_tokens_details, response.usage.output_tokens_details):
            for name in [name for name in vars(details) if name.endswith("_per_turn")]:
                delattr(details, name)
        return response

    serving._process_simple_streaming_events = streamed
    serving.responses_full_generator = answered


def _empty_message(index: int) -> tuple[list[Any], list[Any]]:
    """Returns the output item, as a list, of an empty text at `index`, and its events."""
    writer = SimpleStreamingEventProcessor(SimpleStreamingState(output_index=index))
    events = writer.open(_StateType.CONTENT)
    # Clients end a text that has begun with a part of it.
    events += writer._STATE_HANDLERS[_StateType.CONTENT].delta_fn(writer.state, "", [])
    events += writer.close_current()
    *_, part_done, item_done = events
    item_done.item.content = [part_done.part]
    return [item_done.item], events


def _has_text_or_call(items: Sequence[Any]) -> bool:
    return any(item.type != "reasoning" and getattr(item, "content", True) for item in items)
