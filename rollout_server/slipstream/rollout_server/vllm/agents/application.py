"""vLLM's own HTTP application, in this process and without a port, over our engine.

It answers chat completions, responses, Anthropic's messages and the list of models. vLLM's server
has more paths, a metrics registry and middlewares, all of which are left out.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from slipstream.core.errors import SlipstreamError
from slipstream.core.models.vision.placed import image_tokens
from slipstream.core.settings.config import RolloutServerSection
from slipstream.rollout_server.agents.limits import ServedCall
from slipstream.rollout_server.agents.recorder import MESSAGES_PATH, RESPONSES_PATH
from slipstream.rollout_server.engine_interface import (
    PartSize,
    RequestRefused,
    TextOptions,
    TextPart,
)
from slipstream.rollout_server.vllm.agents.agent_prompts import CURRENT, PromptRenderer
from slipstream.rollout_server.vllm.vllm_requests import VllmParts
from vllm.entrypoints.anthropic.api_router import attach_router as attach_messages
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

# The name of the only model; requests may name any.
MODEL = "policy"

# vLLM's parsers of tools that lose calls in a stream whose parts hold several tokens.
ONE_TOKEN_PARSERS = ("deepseek_v3", "deepseek_v31", "hunyuan_a13b", "xlam")


class RecordingClient:
    """The engine of vLLM's application: each reply is sampled and recorded by a `Recorder`."""

    errored = False
    is_running = True
    input_processor = None

    def __init__(self, parts: VllmParts, tool_parser: str | None = None) -> None:
        self._tool_parser = tool_parser
        self.vllm_config = parts.vllm_config
        self.model_config = parts.vllm_config.model_config
        self.renderer = parts.renderer

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """See vLLM; a recorder admits calls."""

    async def is_tracing_enabled(self) -> bool:
        """See vLLM."""
        return False

    def generate(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        **others: Any,  # noqa: ANN401 - vLLM's own
    ) -> AsyncGenerator[RequestOutput, None]:
        """See vLLM; of the parameters only those count that the run leaves to a request."""
        current = CURRENT.get()
        call = None if current is None else current[1].call
        if current is None or call is None:
            raise VLLMValidationError("an agent's prompt must be messages", parameter="prompt")
        recorder, opened = current
        options = TextOptions(
            is_streamed=sampling_params.output_kind is RequestOutputKind.DELTA,
            parts=self._part_size(opened),
            by_start=recorder.is_judge,
            stop=tuple(sampling_params.stop or ()),
            seed=sampling_params.seed,
            num_logprobs=sampling_params.logprobs,
            with_stop=sampling_params.include_stop_str_in_output,
            skip_special_tokens=sampling_params.skip_special_tokens,
            spaces_between_special_tokens=sampling_params.spaces_between_special_tokens,
        )
        most = sampling_params.max_tokens or recorder.sampling.max_reply_tokens
        parts = recorder.sample(opened, most, options)
        return _outputs(parts, request_id, call.prompt)

    def _part_size(self, opened: ServedCall) -> PartSize:
        if not opened.has_tools:
            return "large"
        return "tokens" if self._tool_parser in ONE_TOKEN_PARSERS else "chunks"


async def _outputs(
    parts: AsyncGenerator[TextPart, None], request_id: str, prompt: list[int]
) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for part in parts:
            end = part.generation
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
    except RequestRefused as error:
        raise VLLMValidationError(str(error)) from error
    except SlipstreamError as error:
        # The engine could not serve this request, or is gone: a client may try again.
        raise RetryableRequestError(str(error)) from error


def open_applications(parts: VllmParts, settings: RolloutServerSection) -> tuple[FastAPI, FastAPI]:
    """Builds the application of requests without tools, and that of requests with tools.

    vLLM's parsers of calls cut calls out of replies to requests without tools too, and lose them.
    It takes a second or two and no event loop: call it in a thread.
    """
    model = parts.vllm_config.model_config
    shown = model.multimodal_config
    max_images = 0 if shown is None else shown.get_limit_per_prompt("image")
    images = image_tokens(Path(model.model), max_images=max_images)
    file = settings.chat_template
    template = None if file is None else file.read_text(encoding="utf-8")
    renderer = PromptRenderer(parts.renderer, images, template=template)
    plain = _open_application(parts, settings.model_copy(update={"tool_parser": None}), renderer)
    if settings.tool_parser is None:
        return plain, plain
    return plain, _open_application(parts, settings, renderer)


def _open_application(
    parts: VllmParts, settings: RolloutServerSection, renderer: PromptRenderer
) -> FastAPI:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    assert isinstance(arguments, argparse.Namespace)
    arguments.model = parts.vllm_config.model_config.model
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
    client: Any = RecordingClient(parts, settings.tool_parser)
    asyncio.run(init_app_state(client, app.state, arguments, ("generate",)))
    app.state.online_renderer.renderer = renderer
    return app


def as_messages(path: str, reply: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Returns the chat messages that vLLM makes of `reply` when a client sends it back."""
    if path == MESSAGES_PATH:
        request = AnthropicMessagesRequest(
            model="policy", max_tokens=1, messages=[{"role": "assistant", "content": reply}]
        )
        messages: list[dict[str, Any]] = []
        AnthropicServingMessages._convert_messages(request.messages, messages)
        return messages
    if path == RESPONSES_PATH:
        items = ResponsesRequest(input=reply).input
        return list(construct_input_messages(request_input=items))
    return [reply]
