"""Agents on the real engine: parts of a reply, what is recorded, cancels, stops, new weights."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.rollout_server.engine_interface import (
    FinishReason,
    Generation,
    TextOptions,
    TextPart,
)
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.rollout_server.vllm.agent_services import AgentServices
from support.fakes.agent_rig import SAMPLING, AgentRig, agent_config
from support.fakes.chat_models import make_chat_model
from support.rigs.engine_rig import Reference
from support.rigs.started_engine import started_engine

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

ENDLESS = dataclasses.replace(SAMPLING, ignore_eos=True)
PROMPT = [1, 90, 91, 92]


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process and its children listen."""
    here = psutil.Process()
    names = set()
    for process in (here, *here.children(recursive=True)):
        # A process may end while it is looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    names.add((connection.laddr.ip, connection.laddr.port))
    return names


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = make_chat_model(tmp_path_factory.mktemp("model"))
    config = agent_config(folder)
    async with started_engine(config) as engine:
        await engine.pauses.resume(PolicyVersion(0, 0))
        before = processes(), listening()
        agents = AgentServices(engine.llm, Renderer(folder), config.rollout_server)
        api = await agents.api()
        yield SimpleNamespace(
            engine=engine,
            rig=AgentRig(NotedRequests(engine.requests), api),
            before=before,
            weights=load_file(folder / "model.safetensors"),
            reference=Reference(folder),
        )


class NotedRequests:
    """The real engine's requests, and what it sampled."""

    def __init__(self, requests: Any) -> None:
        self._requests = requests
        self.requests = self
        self.samples: list[SimpleNamespace] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    async def stream(
        self, request_id, prompt, *arguments, **options
    ) -> AsyncIterator[TextPart]:
        async for part in self._requests.stream(
            request_id, prompt, *arguments, **options
        ):
            if (end := part.generation) is not None:
                tokens = end.token_ids.tolist()
                logprobs = end.logprobs.tolist()
                self.samples.append(
                    SimpleNamespace(
                        prompt=list(prompt),
                        tokens=tokens,
                        logprobs=logprobs,
                        cached_tokens=end.cached_tokens,
                    )
                )
            yield part


async def parts_of(engine, name: str, sampling=ENDLESS, **options):
    """All parts of one reply of 70 tokens to PROMPT, and the generation."""
    parts = [
        part
        async for part in engine.requests.stream(
            name, PROMPT, sampling, 70, options=TextOptions(**options)
        )
    ]
    end: Generation = parts[-1].generation
    assert all(part.generation is None for part in parts[:-1])
    assert [
        token for part in parts for token in part.token_ids
    ] == end.token_ids.tolist()
    return parts, end


async def test_the_application_adds_no_process_and_no_port(served) -> None:
    # Requests that other tests have left running may end meanwhile.
    processes_before, listening_before = served.before
    assert processes() <= processes_before
    assert listening() <= listening_before


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_parts_hold_what_generate_returns(served, is_streamed) -> None:
    greedy = dataclasses.replace(ENDLESS, temperature=0.0)
    generation = await served.engine.requests.generate(
        f"whole{is_streamed}", PROMPT, greedy, 70
    )
    parts, end = await parts_of(
        served.engine, f"parts{is_streamed}", greedy, is_streamed=is_streamed
    )
    text = served.engine.llm.get_tokenizer().decode(generation.token_ids.tolist())
    assert "".join(part.text for part in parts) == text
    assert end.token_ids.tolist() == generation.token_ids.tolist()
    assert np.abs(end.logprobs - generation.logprobs).max() < 1e-5
    assert (
        end.version_spans
        == generation.version_spans
        == (VersionSpan(70, PolicyVersion(0, 0)),)
    )
    assert end.finish_reason is FinishReason.LENGTH
    # A reader that is late finds two parts as one.
    assert 2 <= len(parts) <= 3 if is_streamed else len(parts) == 1
    expected = served.reference.logprobs(
        served.weights, PROMPT + end.token_ids.tolist()
    )
    sampled = dataclasses.replace(ENDLESS, temperature=1.0)
    _, end = await parts_of(
        served.engine, f"t1{is_streamed}", sampled, is_streamed=is_streamed
    )
    expected = served.reference.logprobs(
        served.weights, PROMPT + end.token_ids.tolist()
    )
    assert np.abs(expected[len(PROMPT) - 1 :] - end.logprobs).max() < 1e-3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_more_logprobs_change_nothing_that_is_recorded(
    served, is_streamed
) -> None:
    parts, end = await parts_of(
        served.engine,
        f"top{is_streamed}",
        is_streamed=is_streamed,
        num_logprobs=3,
        seed=4,
    )
    _, plain = await parts_of(served.engine, f"none{is_streamed}", seed=4)
    assert end.token_ids.tolist() == plain.token_ids.tolist()
    assert np.abs(end.logprobs - plain.logprobs).max() < 1e-5
    top_logprobs = [
        part.top_logprobs[n] for part in parts for n in range(len(part.token_ids))
    ]
    assert [len(tops) in (3, 4) for tops in top_logprobs] == [True] * 70
    for token, value, tops in zip(
        end.token_ids.tolist(), end.logprobs, top_logprobs, strict=True
    ):
        assert abs(tops[token].logprob - value) < 1e-5


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_text_ends_a_reply_and_the_tokens_add_up(
    served, is_streamed
) -> None:
    greedy = dataclasses.replace(ENDLESS, temperature=0.0)
    _, endless = await parts_of(served.engine, f"endless{is_streamed}", greedy)
    text = served.engine.llm.get_tokenizer().decode(endless.token_ids.tolist())
    stop = next(
        letter for letter in text[5:] if letter.isascii() and letter.isprintable()
    )
    parts, end = await parts_of(
        served.engine,
        f"stop{is_streamed}",
        greedy,
        is_streamed=is_streamed,
        stop=(stop,),
    )
    assert end.finish_reason is FinishReason.STOP
    assert parts[-1].stop_reason == stop
    assert "".join(part.text for part in parts) == text.split(stop)[0]
    assert end.token_ids.tolist() == endless.token_ids.tolist()[: len(end.token_ids)]
    use = served.engine.requests.use()
    assert (use.open_requests, use.generated_tokens) == (0, use.returned_tokens)


async def test_a_cancelled_stream_returns_what_was_handed_out(served) -> None:
    reading = served.engine.requests.stream(
        "cancelled", PROMPT, ENDLESS, 400, options=TextOptions(is_streamed=True)
    )
    first = await anext(reading)
    await served.engine.requests.cancel("cancelled")
    rest = [part async for part in reading]
    end = rest[-1].generation
    assert end.finish_reason is FinishReason.CANCELLED
    handed_out = [token for part in (first, *rest) for token in part.token_ids]
    assert handed_out == end.token_ids.tolist()
    assert sum(span.length for span in end.version_spans) == len(handed_out)
    use = served.engine.requests.use()
    assert (use.open_requests, use.generated_tokens) == (0, use.returned_tokens)


async def test_versions_in_the_middle_of_a_stream_are_recorded(served) -> None:
    reading = served.engine.requests.stream(
        "versions", PROMPT, ENDLESS, 300, options=TextOptions(is_streamed=True)
    )
    parts = [await anext(reading)]
    await served.engine.pauses.pause()
    await served.engine.pauses.resume(PolicyVersion(0, 1))
    parts += [part async for part in reading]
    end = parts[-1].generation
    assert [span.version.step for span in end.version_spans] == [0, 1]
    assert len(end.token_ids) == 300
    await served.engine.pauses.resume(PolicyVersion(0, 0))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agents_conversation_is_recorded_bit_for_bit(served, stream) -> None:
    rig = served.rig
    rig.begin()
    client = rig.openai()

    async def talk(number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"task {number}"}]
        for _ in range(3):
            request = {"model": "m", "messages": messages, "max_tokens": 40}
            if stream:
                text = ""
                async for chunk in await client.chat.completions.create(
                    **request, stream=True
                ):
                    text += "".join(
                        choice.delta.content or "" for choice in chunk.choices
                    )
            else:
                answer = await client.chat.completions.create(**request)
                text = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "on"},
            ]

    async with asyncio.timeout(120):
        await asyncio.gather(*(talk(number) for number in range(8)))
    await rig.closed()
    rig.check()
    assert rig.runs() == [3] * 8
    for branch in rig.recorder.conversations.branches:
        expected = served.reference.logprobs(served.weights, branch.token_ids)
        flags = np.repeat(
            np.arange(len(branch.run_lengths)) % 2 == 1, branch.run_lengths
        )[1:]
        assert (
            np.abs(
                expected[flags]
                - np.concatenate(
                    [reply["behavior_logprobs"] for reply in branch.sampled]
                )
            ).max()
            < 1e-3
        )


async def test_a_conversation_finds_as_much_in_the_prefix_cache_as_an_environments(
    served,
) -> None:
    rig = served.rig
    rig.begin(ENDLESS)
    messages: list[Any] = [{"role": "user", "content": "question " * 10}]
    for _ in range(5):
        answer = await rig.openai().chat.completions.create(
            model="m", messages=messages, max_tokens=90
        )
        messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
    agents = list(rig.engine.samples)
    await rig.closed()
    # An environment's turns of the same lengths, whose first token is one that no agent's has.
    prompt = [99, *agents[0].prompt[1:]]
    cached = []
    for turn, sample in enumerate(agents):
        reply = await served.engine.requests.generate(
            f"native{turn}", prompt, ENDLESS, len(sample.tokens)
        )
        cached.append(reply.cached_tokens)
        following = (
            agents[turn + 1].prompt[len(sample.prompt) + 90 :] if turn < 4 else []
        )
        prompt += [*reply.token_ids.tolist(), *following]
    assert [sample.cached_tokens for sample in agents] == cached
    assert cached[0] == 0
    assert cached[-1] >= 256


async def test_logprobs_that_a_client_asks_for_are_those_that_are_recorded(
    served,
) -> None:
    rig = served.rig
    rig.begin()
    answer = await rig.openai().chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=20,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = [token.logprob for token in answer.choices[0].logprobs.content]
    (branch,) = rig.recorder.conversations.branches
    assert (
        np.abs(
            np.concatenate([reply["behavior_logprobs"] for reply in branch.sampled])
            - logprobs
        ).max()
        < 1e-5
    )
    assert all(
        len(token.top_logprobs) >= 2 for token in answer.choices[0].logprobs.content
    )
    await rig.closed()
    rig.check()
