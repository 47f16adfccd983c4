"""The HTTP API of agents over a scripted engine, and clients of the SDKs for it; no network."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import httpx2
from slipstream.core.configuration.reply_ends import find_reply_ends
from slipstream.core.models.images import image_tokens
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.agents.agent_api import Answering
from slipstream.rollout_server.agents.recorder import Recorder
from slipstream.rollout_server.engine_interface import Generation, Sampling
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.rollout_server.vllm.agent_services import AgentServices
from slipstream.v1.environment_pb2 import AgentCall

from support.fakes.chat_models import make_chat_model
from support.fakes.scripted_engine import ScriptedEngine
from support.fakes.small_configs import config_of_engine
from support.rigs.started_engine import become_a_server
from support.rigs.waiting import until

NO_VALUES: Mapping[str, Any] = MappingProxyType({})
SAMPLING = Sampling(
    1.0, 1.0, 0, 400, 100, 3000, max_total_tokens=20_000, max_branches=50
)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'


def script(prompt: str) -> str:
    """Replies by the last message: tool calls as asked for, or its text again with its length."""
    last = (
        prompt.rsplit("<|im_start|>", 2)[1]
        .partition("\n")[2]
        .removesuffix("<|im_end|>\n")
    )
    if last.startswith("call"):
        return "I call." + "".join(CALL % int(word) for word in last.split()[1:])
    if last.startswith("space"):
        return "\n\n" + "".join(CALL % int(word) for word in last.split()[1:])
    if last == "think":
        return "<think>Hm.</think>Yes."
    if last == "nothing":
        return ""
    return f"You said {last!r}, {len(prompt)} \u00e9\u20ac"


def agent_config(
    folder: Path, *, max_tokens: int = 3000, **rollout_server: object
) -> Config:
    return config_of_engine(
        folder,
        learner={"micro_batch_tokens": max(max_tokens, 4096)},
        sampling={
            "max_reply_tokens": 400,
            "max_episode_tokens": max_tokens,
            "max_turns": 100,
        },
        rollout_server={"tool_parser": "hermes", **rollout_server},
    )


def scripted_engine(config: Config, script: Callable[[str], str]) -> ScriptedEngine:
    become_a_server(config)
    from slipstream.rollout_server.vllm.engine_arguments import engine_config
    from vllm.renderers import renderer_from_config

    settings = engine_config(config, 1)
    renderer = renderer_from_config(settings)
    engine = ScriptedEngine(renderer.get_tokenizer(), script)
    server = config.rollout_server
    folder = config.model.path
    engine.llm = SimpleNamespace(
        vllm_config=settings, model_config=settings.model_config, renderer=renderer
    )
    engine.renderer = Renderer(
        folder,
        template=server.chat_template,
        values=server.chat_template_kwargs,
        images=image_tokens(folder),
        ends=find_reply_ends(config),
    )
    engine.agents = agent_services(engine, server)
    return engine


def agent_services(engine: Any, settings: RolloutServerSection) -> AgentServices:
    return AgentServices(engine.llm, engine.renderer, settings)


@dataclass
class AgentRig:
    """One server's API; `begin` starts an episode, whose clients call it."""

    engine: Any
    api: Answering
    recorder: Recorder = field(init=False)
    sampled_tokens: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(
        self,
        sampling: Sampling = SAMPLING,
        *,
        template_values: Mapping[str, Any] = NO_VALUES,
    ) -> Recorder:
        self._number += 1
        self.sampled_tokens = 0
        self.engine.samples.clear()

        def sampled(generation: Generation) -> None:
            self.sampled_tokens += len(generation.token_ids)

        self.recorder = Recorder(
            self.engine.requests,
            f"episode-{self._number}",
            sampling,
            sampled=sampled,
            template_values=template_values,
        )
        return self.recorder

    def http(self, branch: str = "") -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            transport=_Transport(self, branch), base_url="http://agent"
        )

    def openai(self, branch: str = "", **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(
            base_url="http://agent/v1",
            api_key="key",
            http_client=self.http(branch),
            max_retries=0,
            **options,
        )

    def anthropic(self, branch: str = "") -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url="http://agent",
            api_key="key",
            http_client=self.http(branch),
            max_retries=0,
        )

    def check(self) -> None:
        """Every token that the engine sampled is recorded once, behind the prompt that it read."""
        recorded = []
        for branch in self.recorder.conversations.branches:
            assert len(branch.run_lengths) % 2 == 0
            assert sum(branch.run_lengths) == len(branch.token_ids)
            end = 0
            logprobs = [
                value
                for part in branch.sampled
                for value in part["behavior_logprobs"].tolist()
            ]
            for context, sampled in zip(
                branch.run_lengths[::2], branch.run_lengths[1::2], strict=True
            ):
                start = end + context
                end = end + context + sampled
                values = [round(value, 6) for value in logprobs[:sampled]]
                del logprobs[:sampled]
                recorded.append(
                    (branch.token_ids[:start], branch.token_ids[start:end], values)
                )
            assert not logprobs
        theirs = [
            (
                sample.prompt,
                sample.tokens,
                [round(value, 6) for value in sample.logprobs],
            )
            for sample in self.engine.samples
            if sample.tokens
        ]
        assert sorted(recorded, key=str) == sorted(theirs, key=str)
        assert self.sampled_tokens == sum(len(tokens) for _, tokens, _ in theirs)
        assert not self.recorder.open_calls

    async def closed(self) -> None:
        await until(lambda: not self.recorder.open_calls)

    def runs(self) -> list[int]:
        return [
            len(branch.run_lengths) // 2
            for branch in self.recorder.conversations.branches
        ]


class _Transport(httpx2.AsyncBaseTransport):
    """Hands requests to the recorder of the rig's episode."""

    numbers = 0

    def __init__(self, rig: AgentRig, branch: str) -> None:
        self._rig = rig
        self._branch = branch

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        _Transport.numbers += 1
        body = await request.aread()
        path = request.url.raw_path.decode()
        call = AgentCall(
            call=_Transport.numbers,
            method=request.method,
            path=path,
            body=body,
            branch=self._branch,
        )
        parts = self._rig.api.answer(self._rig.recorder, call)
        first = await anext(parts)

        async def rest() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(parts):
                yield first.body
                if not first.is_last:
                    async for part in parts:
                        yield part.body

        headers = [
            (header.name, header.value)
            for header in first.headers
            if header.name != "content-length"
        ]
        return httpx2.Response(first.status, headers=headers, stream=_Stream(rest()))


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part

    async def aclose(self) -> None:
        await self._parts.aclose()


async def agent_rig(
    folder: Path,
    script: Callable[[str], str],
    *,
    max_tokens: int = 3000,
    words: Sequence[str] = (),
    **rollout_server: object,
):
    length = max(max_tokens, 4096)
    model = make_chat_model(folder, with_weights=False, max_length=length, words=words)
    config = agent_config(model, max_tokens=max_tokens, **rollout_server)
    engine = scripted_engine(config, script)
    return AgentRig(engine, await engine.agents.api())
