"""Agents with the real SDKs against vLLM's own application; the engine follows a script."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio
from slipstream.core.errors import ConfigError
from slipstream.core.template_values import NEED_PARSER
from slipstream.rollout_server.agents import agent_api
from slipstream.rollout_server.chat import TemplateInputs
from slipstream.rollout_server.engine_interface import RequestRefused
from support.fakes.agent_rig import (
    CALL,
    SAMPLING,
    AgentRig,
    agent_config,
    agent_rig,
    agent_services,
    script,
    scripted_engine,
)
from support.fakes.chat_models import CHAT_TEMPLATE, make_chat_model
from support.fakes.example_agents import TOOLS
from support.rigs.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The same tool for each API.
FUNCTION = TOOLS[0]["function"]
ITEM_TOOLS = [{"type": "function", **FUNCTION}]
SCHEMA_TOOLS = [{"name": "add", "input_schema": FUNCTION["parameters"]}]
QUESTION = {"role": "user", "content": "hi"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AgentRig:
    return await agent_rig(tmp_path_factory.mktemp("model"), script, max_tokens=60_000)


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared: AgentRig) -> AsyncIterator[AgentRig]:
    shared.begin()
    yield shared
    shared.engine.may_end.set()
    shared.engine.fail_with = None
    shared.recorder.cancel()
    async with asyncio.timeout(LIMIT_S):
        await shared.recorder.settled()
        await shared.closed()
    shared.check()


async def chat(
    rig: AgentRig, messages: list, *, stream: bool = False, branch: str = "", **options
):
    """One call; returns the message as the SDK gives it, for `messages`."""
    client = rig.openai(branch)
    request = {"model": "gpt-4o", "messages": messages, **options}
    if not stream:
        answer = await client.chat.completions.create(**request)
        return answer.choices[0].message.model_dump(exclude_none=True)
    async with client.chat.completions.stream(**request) as events:
        final = await events.get_final_completion()
    message = final.choices[0].message.model_dump(exclude_none=True)
    message.pop("parsed", None)
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return message


async def respond(rig: AgentRig, *, stream: bool = False, **asked: Any):
    """One call of the API of responses."""
    responses = rig.openai().responses
    if not stream:
        return await responses.create(model="m", **asked)
    async with responses.stream(model="m", **asked) as events:
        return await events.get_final_response()


async def send(rig: AgentRig, messages: list, *, stream: bool = False, **request: Any):
    """One call of Anthropic's API."""
    request = {"model": "claude", "max_tokens": 20_000, "messages": messages, **request}
    if not stream:
        return await rig.anthropic().messages.create(**request)
    async with rig.anthropic().messages.stream(**request) as events:
        return await events.get_final_message()


async def test_a_chunk_has_a_part_of_the_text_or_of_one_call(tmp_path: Path) -> None:
    # A call is one token, so that a chunk of several tokens has all of the reply.
    rig = await agent_rig(tmp_path, script, words=[CALL % 1, CALL % 2])
    messages = [{"role": "user", "content": "call 1 2"}]
    stream = await rig.openai().chat.completions.create(
        model="m", messages=messages, tools=TOOLS, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    parts = [choice.delta for choice in choices]
    assert all(bool(part.content) + len(part.tool_calls or ()) <= 1 for part in parts)
    assert "".join(part.content or "" for part in parts) == "I call."
    texts = ["", ""]
    for call in [call for part in parts for call in part.tool_calls or ()]:
        texts[call.index] += (call.function.name or "") + (
            call.function.arguments or ""
        )
    assert texts == ['add{"a": 1}', 'add{"a": 2}']
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [
        "tool_calls"
    ]
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("streams", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)])
async def test_tools_in_several_turns_are_one_branch(rig, streams) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "call 1 2"},
    ]
    for stream in streams:
        message = await chat(rig, messages, stream=bool(stream), tools=TOOLS)
        messages.append(message)
        calls = message.get("tool_calls") or []
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"call {n}"}
            for n, call in enumerate(calls)
        ]
    assert [
        len(m.get("tool_calls") or []) for m in messages if m["role"] == "assistant"
    ] == [
        2,
        1,
        1,
    ]
    assert rig.runs() == [3]


@pytest.mark.parametrize("word", ["call", "space"])
@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_messages_with_tools_are_one_branch(rig, stream, word) -> None:
    """White space alone before a call is no text, which Claude Code would not send back."""
    messages = [{"role": "user", "content": f"{word} 4"}]
    for turn in range(3):
        final = await send(rig, messages, stream=stream, tools=SCHEMA_TOOLS)
        blocks = [block.model_dump(exclude_none=True) for block in final.content]
        for block in blocks:
            block.pop("parsed_output", None)
        (use,) = [block for block in blocks if block["type"] == "tool_use"]
        assert use["input"] == {"a": 4 + turn}
        assert (len(blocks), blocks[-1]) == (1 if word == "space" else 2, use)
        result = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": f"{word} {5 + turn}",
        }
        messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
    assert rig.runs() == [3]


@pytest.mark.parametrize("max_tokens", range(30, 60, 10))
async def test_a_call_of_a_tool_that_is_cut_off_does_not_stop_its_agent(
    rig, max_tokens
) -> None:
    """Its arguments are no JSON then."""
    messages = [{"role": "user", "content": "call 12345678"}]
    request = {"model": "claude", "messages": messages, "tools": SCHEMA_TOOLS}
    async with rig.http() as client:
        short = {**request, "max_tokens": max_tokens, "stream": True}
        cut = await client.post("/v1/messages", json=short)
    assert '"stop_reason":"max_tokens"' in cut.text
    answer = await send(rig, messages, tools=SCHEMA_TOOLS)
    assert answer.content[-1].input == {"a": 12345678}
    assert rig.runs() == [1, 1]


@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder"])
async def test_a_reply_to_a_request_without_tools_keeps_its_whole_text(
    tmp_path, tool_parser
):
    """The parser of calls has no part in it, streamed or not, in any API."""
    call = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
    text = f"I call. <tool_call>\n{call}\n</tool_call>"
    rig = await agent_rig(tmp_path, lambda _: text, tool_parser=tool_parser)
    none: list[dict] = [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": SCHEMA_TOOLS, "tool_choice": {"type": "none"}},
        {"tools": ITEM_TOOLS, "tool_choice": "none"},
    ]
    auto = {"tool_choice": {"type": "auto"}}
    for choice, messages, items in (none, ({}, {}, {}), ({}, auto, {})):
        for stream in (False, True):
            assert (await chat(rig, [QUESTION], stream=stream, **choice))[
                "content"
            ] == text
            (block,) = (await send(rig, [QUESTION], stream=stream, **messages)).content
            assert block.text == text
            answer = await respond(rig, stream=stream, input=[QUESTION], **items)
            assert answer.output_text == text
    rig.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_are_one_branch(rig, stream) -> None:
    items: list = [{"role": "user", "content": "call 4"}]
    for turn in range(3):
        request = {"instructions": "Be short.", "input": items, "tools": ITEM_TOOLS}
        final = await respond(rig, stream=stream, **request)
        (call,) = [item for item in final.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"a": 4 + turn}
        items += [item.model_dump(exclude_none=True) for item in final.output]
        for item in items:
            item.pop("parsed_arguments", None)
        items.append(
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": f"call {5 + turn}",
            }
        )
    assert rig.runs() == [3]


async def test_calls_at_the_same_time_have_branches_of_their_own(rig) -> None:
    first = await chat(rig, [QUESTION])
    rig.engine.may_end.clear()
    calls = [
        asyncio.create_task(
            chat(
                rig,
                [QUESTION, first, {"role": "user", "content": f"w{n}"}],
                stream=n % 2 == 0,
            )
        )
        for n in range(6)
    ]
    await until(lambda: rig.engine.num_open >= 6)
    rig.engine.may_end.set()
    for n, message in enumerate(await asyncio.gather(*calls)):
        assert f"'w{n}'" in message["content"]
    assert sorted(rig.runs()) == [1, 1, 1, 1, 1, 2]
    # All of them begin with the first reply's tokens.
    first_branch = max(
        rig.recorder.conversations.branches, key=lambda b: len(b.run_lengths)
    )
    token_ids = first_branch.token_ids[: sum(first_branch.run_lengths[:2])]
    assert all(
        b.token_ids[: len(token_ids)] == token_ids
        for b in rig.recorder.conversations.branches
    )


async def test_the_runs_sampling_holds_and_the_answer_says_so(rig) -> None:
    answer = await rig.openai().chat.completions.with_raw_response.create(
        model="gpt-4o",
        messages=[QUESTION],
        temperature=0.2,
        presence_penalty=1.0,
        response_format={"type": "json_object"},
        stop=["said"],
        seed=5,
        max_tokens=300,
    )
    header = answer.headers["x-slipstream-sampling"]
    assert header == (
        "presence_penalty=0 (asked 1); temperature=1 (asked 0.2); response_format=none (asked)"
    )
    (sample,) = rig.engine.samples
    assert sample.sampling == SAMPLING
    assert (sample.max_tokens, sample.options.stop, sample.options.seed) == (
        300,
        ("said",),
        5,
    )


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (
            "chat/completions",
            {"functions": [{"name": "f"}], "verbosity": "low"},
            "functions verbosity",
        ),
        (
            "chat/completions",
            {"reasoning_effort": "none", "user": "u", "service_tier": "flex"},
            "",
        ),
        ("chat/completions", {"documents": [{"text": "a"}]}, "documents"),
        ("messages", {"max_tokens": 9, "thinking": {"type": "disabled"}}, ""),
        ("chat/completions", {"return_prompt_text": True}, "return_prompt_text"),
        (
            "chat/completions",
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
        ),
        (
            "responses",
            {"input": "hi", "chat_template_kwargs": {"enable_thinkin": False}},
            "messages chat_template_kwargs.enable_thinkin",
        ),
        ("chat/completions", {"guided_jsn": {"type": "object"}}, "guided_jsn"),
        ("responses", {"input": "hi", "max_tokens": 5}, "messages max_tokens"),
        (
            "messages",
            {"max_tokens": 9, "stop": ["x"], "thread": {"type": "create"}},
            "stop thread",
        ),
        (
            "messages",
            {
                "max_tokens": 2000,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            "thinking.budget_tokens",
        ),
        (
            "messages",
            {
                "max_tokens": 9,
                "messages": [QUESTION, {"role": "assistant", "content": "I"}],
            },
            "prefill",
        ),
        ("chat/completions", {"echo": True}, "echo"),
        (
            "chat/completions",
            {
                "chat_template_kwargs": {
                    "continue_final_message": True,
                    "enable_thinking": False,
                }
            },
            "chat_template_kwargs.continue_final_message",
        ),
    ],
)
async def test_no_field_is_dropped_without_a_word(rig, path, asked, told) -> None:
    answer = await rig.http().post(
        f"/v1/{path}", json={"model": "m", "messages": [QUESTION], **asked}
    )
    assert answer.status_code == 200
    header = answer.headers.get("x-slipstream-sampling", "")
    assert header == "; ".join(f"{name}=none (asked)" for name in told.split())
    assert rig.recorder.ignored == dict.fromkeys(told.split(), 1)


class Answer(pydantic.BaseModel):
    """What clients parse a reply to."""

    number: int


async def test_the_clients_ways_to_a_parsed_reply_are_refused_before_anything_is_sampled(
    rig,
) -> None:
    openai_client = rig.openai()
    calls = [
        openai_client.chat.completions.parse(
            model="m", messages=[QUESTION], response_format=Answer
        ),
        openai_client.responses.parse(model="m", input="hi", text_format=Answer),
        rig.anthropic().messages.parse(
            model="m", messages=[QUESTION], max_tokens=9, output_format=Answer
        ),
    ]
    for call in calls:
        with pytest.raises(
            (openai.BadRequestError, anthropic.BadRequestError), match="keeps a form"
        ):
            await call
    with pytest.raises(openai.BadRequestError, match="response_format asks"):
        async with openai_client.chat.completions.stream(
            model="m", messages=[QUESTION], response_format=Answer
        ) as stream:
            await stream.get_final_completion()
    assert not rig.engine.samples


async def test_an_effort_that_the_template_does_not_read_is_told(rig) -> None:
    answer = await rig.openai().chat.completions.with_raw_response.create(
        model="m", messages=[QUESTION], reasoning_effort="low"
    )
    message = 'reasoning_effort=enable_thinking (asked "low")'
    assert answer.headers["x-slipstream-sampling"] == message
    assert rig.recorder.ignored == {"reasoning_effort": 1}


async def test_a_reply_at_a_length_ends_so_and_can_be_continued(rig) -> None:
    answer = await rig.openai().chat.completions.create(
        model="m", messages=[QUESTION], max_tokens=5
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    message = answer.choices[0].message.model_dump(exclude_none=True)
    await chat(rig, [QUESTION, message, {"role": "user", "content": "go on"}])
    (branch,) = rig.recorder.conversations.branches
    text = rig.engine.tokenizer.decode(branch.token_ids)
    assert (
        "You s<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        in text
    )


@pytest.mark.parametrize("streams", [(0, 0, 0), (1, 1, 1), (0, 1, 0)])
async def test_a_previous_response_is_continued_by_its_id(rig, streams) -> None:
    previous: dict[str, str] = {}
    new: Any = "call 4"
    for stream in streams:
        answer = await respond(
            rig, stream=bool(stream), tools=ITEM_TOOLS, input=new, **previous
        )
        previous = {"previous_response_id": answer.id}
        calls = [item for item in answer.output if item.type == "function_call"]
        new = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": f"call {n}",
            }
            for n, call in enumerate(calls)
        ]
    assert rig.runs() == [3]


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_earlier_responses_may_be_named_by_their_ids(
    rig, stream
) -> None:
    """The AI SDK of Vercel does so, unless it is told to store nothing."""
    client = rig.openai()
    request = {"model": "m", "tools": ITEM_TOOLS}
    items: list = [{"role": "user", "content": "call 4"}]
    for turn in range(3):
        if stream:
            events = await client.responses.create(**request, input=items, stream=True)
            all_events = [event async for event in events]
            output = [
                event.item
                for event in all_events
                if event.type == "response.output_item.done"
            ]
        else:
            output = (await client.responses.create(**request, input=items)).output
        items += [{"type": "item_reference", "id": item.id} for item in output]
        (call,) = [item for item in output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id}
        items.append({**result, "output": f"call {5 + turn}"})
    assert rig.runs() == [3]
    with pytest.raises(
        openai.BadRequestError, match="Item with id 'fc_other' not found"
    ) as raised:
        await client.responses.create(
            **request, input=[*items, {"type": "item_reference", "id": "fc_other"}]
        )
    assert raised.value.param == "input"


@pytest.mark.parametrize("tools", [[], ITEM_TOOLS])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_reply_is_a_message_with_an_empty_text(
    rig, stream, tools
) -> None:
    items: list = [{"role": "user", "content": "nothing"}]
    request = {"tools": tools, "input": items}
    if stream:
        async with rig.openai().responses.stream(model="m", **request) as events:
            kinds = [event.type async for event in events]
            first = await events.get_final_response()
        assert kinds.count("response.output_item.done") == 1
        assert kinds.count("response.output_text.delta") == 1
    else:
        first = await respond(rig, **request)
    (message,) = first.output
    assert [part.text for part in message.content] == [first.output_text] == [""]
    more = {"role": "user", "content": "more"}
    fields = message.model_dump(exclude={"content": {0: {"parsed"}}}, exclude_none=True)
    await respond(rig, tools=tools, input=[*items, fields, more])
    await respond(rig, tools=tools, input=[more], previous_response_id=first.id)
    # The second one begins behind the first reply, too.
    assert rig.runs() == [2, 1]


async def test_parts_of_messages_that_vllm_would_drop_or_fail_at_are_refused(
    rig,
) -> None:
    text = {"type": "output_text", "text": "yes", "annotations": []}
    message = {
        "type": "message",
        "id": "msg_a",
        "role": "assistant",
        "status": "completed",
    }
    for content in ([], [{"type": "refusal", "refusal": "no"}], [text, text]):
        request = {"model": "m", "input": [{**message, "content": content}, QUESTION]}
        answer = await rig.http().post("/v1/responses", json=request)
        assert answer.status_code == 400
        assert "must have one part of text, got [" in answer.json()["error"]["message"]
    await respond(rig, input=[{**message, "content": [text]}, QUESTION])
    assert "yes" in rig.engine.tokenizer.decode(rig.engine.samples[-1].prompt)


@pytest.mark.parametrize("limit", [1, 46])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_was_cut_off_is_a_previous_response_too(
    rig, stream, limit
) -> None:
    """Behind 46 tokens the arguments of a call are no JSON."""
    request = {"tools": ITEM_TOOLS, "max_output_tokens": limit}
    first = await respond(rig, stream=stream, **request, input="call 12345678")
    assert first.status == "incomplete"
    await respond(rig, **request, input="more", previous_response_id=first.id)
    assert len(rig.engine.samples) == 2
    assert "call 12345678" in rig.engine.tokenizer.decode(rig.engine.samples[1].prompt)


async def test_a_previous_response_is_the_one_of_that_id_among_equal_ones(rig) -> None:
    first, second = [await respond(rig, input=[QUESTION]) for _ in range(2)]
    assert first.output_text == second.output_text
    for answer in (second, first, second):
        await respond(rig, input="more", previous_response_id=answer.id)
    # The last one begins behind the second, which has gone on already.
    assert rig.runs() == [2, 2, 1]
    continued = rig.engine.samples[-3]
    again = rig.engine.samples[-1]
    assert continued.prompt == again.prompt
    branches = rig.recorder.conversations.branches
    assert [
        branch.sampled[0]["behavior_logprobs"].tolist() for branch in branches[:2]
    ] == [pytest.approx(rig.engine.samples[n].logprobs) for n in (0, 1)]
    assert branches[1].sampled[1]["behavior_logprobs"].tolist() == pytest.approx(
        continued.logprobs
    )


async def test_instructions_are_not_carried_over_from_a_previous_response(rig) -> None:
    first = await respond(rig, input="hi", instructions="Be short.")
    for words in ("Be short.", "Be long."):
        await respond(
            rig, input="more", instructions=words, previous_response_id=first.id
        )
    assert rig.runs() == [2, 1]


@pytest.mark.parametrize("kind", ["never", "not stored", "of another episode"])
async def test_a_previous_response_that_is_not_known_is_openais_error(
    rig, kind
) -> None:
    previous = "resp_0"
    if kind != "never":
        answer = await respond(rig, input="hi", store=kind == "of another episode")
        previous = answer.id
    if kind == "of another episode":
        await rig.closed()
        rig.check()
        rig.begin()
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(rig, input="more", previous_response_id=previous)
    assert raised.value.body == {
        "type": "invalid_request_error",
        "message": f"Previous response with id '{previous}' not found.",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }


@pytest.mark.parametrize("kind", ["chat", "anthropic", "responses"])
async def test_a_prompt_beyond_the_limit_is_the_error_that_clients_know(
    rig, kind
) -> None:
    import anthropic

    long = "x" * 4000
    messages = [{"role": "user", "content": long}]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
        if kind == "chat":
            await chat(rig, messages, stream=True)
        elif kind == "anthropic":
            await send(rig, messages, max_tokens=9)
        else:
            await respond(rig, input=long)
    if kind != "anthropic":
        assert caught.value.code == "context_length_exceeded"
    assert "prompt is too long" in str(caught.value)
    assert "sampling.max_episode_tokens = 3000" in str(caught.value)
    assert rig.recorder.is_truncated


@pytest.mark.parametrize("length", [150_000, 5_000_000])
async def test_a_text_far_beyond_the_limit_is_refused_before_it_is_read(
    rig, length
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(rig, [{"role": "user", "content": "x" * length}])
    assert caught.value.code == "context_length_exceeded"
    assert "sampling.max_episode_tokens = 3000" in str(caught.value)
    assert rig.recorder.is_truncated


@pytest.mark.parametrize("limit", ["max_turns", "max_branches"])
async def test_calls_beyond_the_number_of_turns_and_branches_are_refused(
    rig, limit
) -> None:
    rig.begin(dataclasses.replace(SAMPLING, **{limit: 2}))
    for _ in range(2):
        await chat(rig, [QUESTION])
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(rig, [QUESTION])
    assert caught.value.code == f"{limit}_exceeded"


@pytest.mark.parametrize(
    ("failure", "status", "again"),
    [
        ("the engine abandoned it", 503, "1"),
        # A request that the engine refuses is the client's fault.
        (RequestRefused("logprobs must be at most 20, got 21"), 400, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_engine_says_whether_and_when_to_come_again(
    rig, stream, failure, status, again
) -> None:
    rig.engine.fail_with = failure
    body = {"model": "m", "messages": [QUESTION], "stream": stream}
    answer = await rig.http().post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, again)
    assert str(failure) in answer.json()["error"]["message"]
    rig.engine.fail_with = None
    assert (await chat(rig, [QUESTION]))["content"]
    assert rig.runs() == [1]


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    "failure",
    [
        "the engine abandoned it",
        RequestRefused("not that"),
        LookupError("no such block"),
    ],
)
async def test_a_stream_whose_reply_fails_is_an_error_of_its_client(
    rig, kind, failure, caplog
) -> None:
    rig.engine.fail_with = failure
    api = rig.openai()
    anthropics = rig.anthropic()
    request = {"model": "m", "stream": True}
    with pytest.raises((openai.APIError, anthropic.APIError), match=str(failure)):
        if kind == "chat":
            stream = await api.chat.completions.create(messages=[QUESTION], **request)
        elif kind == "responses":
            stream = await api.responses.create(input=[QUESTION], **request)
        else:
            stream = await anthropics.messages.create(
                max_tokens=9, messages=[QUESTION], **request
            )
        async for _ in stream:
            pass
    # Only what nobody expects leaves a traceback, one.
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == isinstance(failure, LookupError)


async def test_a_message_with_a_token_that_the_model_lacks_is_the_agents_fault(
    tmp_path,
) -> None:
    folder = make_chat_model(tmp_path, with_weights=False, words=["<|new|>"])
    table = json.loads((folder / "config.json").read_text())
    lacking = table["vocab_size"] = table["vocab_size"] - 1
    (folder / "config.json").write_text(json.dumps(table))
    engine = scripted_engine(agent_config(folder), script)
    small = AgentRig(engine, await engine.agents.api())
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "<|new|>"}], "stream": stream}
        answer = await small.http().post(
            "/v1/chat/completions", json={"model": "m", **body}
        )
        assert answer.status_code == 400
        assert (
            f"'<|new|>' is token {lacking} of the tokenizer"
            in answer.json()["error"]["message"]
        )
    assert (await chat(small, [QUESTION]))["content"]


async def test_a_client_that_hangs_up_ends_its_reply_and_its_tokens_are_kept(
    rig,
) -> None:
    rig.engine.may_end.clear()
    stream = await rig.openai().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "long " * 100}], stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await rig.recorder.settled()
    (sample,) = rig.engine.samples
    assert 0 < len(sample.tokens) < 500
    assert rig.engine.num_open == 0


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("chat/completions", {"n": 3}, "n must be 1, got 3"),
        ("chat/completions", {"messages": 7}, ""),
        ("chat/completions", {"messages": []}, ""),
        ("chat/completions", {"chat_template": "{{ 1 }}"}, "template"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages of agents must be text, got a part of type image_url",
        ),
        (
            "chat/completions",
            {"logprobs": True, "top_logprobs": -1},
            "at least 0, got -1",
        ),
        ("responses", {"top_logprobs": -1, "input": "hi"}, "at least 0, got -1"),
        ("chat/completions", {"stop": ["\ud800"]}, "the body must be Unicode"),
        (
            "messages",
            {"stop_sequences": ["a\udfff"], "max_tokens": 4},
            "must be Unicode",
        ),
        ("messages/count_tokens", {"system": "\ud800"}, "the body must be Unicode"),
        # A field that nothing serves is left out.
        ("chat/completions", {"prompt": 1, "echo": True}, None),
    ],
)
async def test_a_request_that_cannot_be_served_is_400(rig, path, asked, said) -> None:
    body = json.dumps({"model": "m", "messages": [QUESTION], **asked})
    answer = await rig.http().post(f"/v1/{path}", content=body)
    if said is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert rig.runs() == []


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "auto"}])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_an_empty_list_is_no_tools_and_no_text(rig, path, choice) -> None:
    history = [QUESTION, {"role": "assistant", "content": []}, QUESTION]
    request = {"max_tokens": 9, "messages": history, "tools": [], "tool_choice": choice}
    if path == "responses":
        request = {"input": "hi", "tools": [], "tool_choice": choice}
    answer = await rig.http().post(f"/v1/{path}", json={"model": "m", **request})
    assert answer.status_code == 200, answer.text
    (sample,) = rig.engine.samples
    if path != "responses":
        assert "<|im_start|>assistant\n<|im_end|>" in rig.engine.tokenizer.decode(
            sample.prompt
        )


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_null_is_a_fields_default(rig, path) -> None:
    request = dict.fromkeys(rig.api.fields[f"/v1/{path}"]) | {
        "model": "m",
        "max_tokens": 9,
    }
    request |= {"input": "hi"} if path == "responses" else {"messages": [QUESTION]}
    answer = await rig.http().post(f"/v1/{path}", json=request)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_counts_its_tokens_in_numbers_alone(rig, stream) -> None:
    request = {"model": "m", "input": "hi", "stream": stream}
    answer = await rig.http().post("/v1/responses", json=request)
    body = (
        answer.json()
        if not stream
        else json.loads(answer.text.split("data: ")[-1])["response"]
    )
    for name in ("input_tokens_details", "output_tokens_details"):
        assert {type(value) for value in body["usage"][name].values()} == {int}


async def test_the_server_fetches_nothing_that_a_request_names(rig) -> None:
    fetched = asyncio.Event()
    server = await asyncio.start_server(lambda *_: fetched.set(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/picture.png"
    picture = {"type": "image", "source": {"type": "url", "url": url}}
    messages = [{"role": "user", "content": [picture]}]
    async with rig.http() as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"model": "m", "max_tokens": 5, "messages": messages}
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert "messages of agents must be text" in answer.text
        items = [
            {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        ]
        answer = await client.post("/v1/responses", json={"input": items})
        assert answer.status_code == 400
    server.close()
    assert not fetched.is_set()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions/batch"),
        ("POST", "/v1/load_lora_adapter"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/metrics"),
        ("POST", "/tokenize"),
    ],
)
async def test_other_paths_do_not_exist(rig, method, path) -> None:
    async with rig.http() as client:
        answer = await client.request(method, path, json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "body", ["{", "[1]", "[" * 50_000, '{"messages": ' + '{"a":' * 985]
)
async def test_a_body_that_is_no_object_is_refused(rig, path, body) -> None:
    """It comes from an agent, whose mistakes must not end the server."""
    async with rig.http() as client:
        answer = await client.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body must be ")


async def test_models_and_the_count_of_tokens_are_answered_and_not_recorded(
    rig,
) -> None:
    models = await rig.openai().models.list()
    assert [model.id for model in models.data] == ["policy"]
    for client in (rig.openai(), rig.anthropic()):
        for name in ("policy", "model-4:free"):
            assert (await client.models.retrieve(name)).id == name
    for body in (
        {"messages": [QUESTION]},
        {"messages": [QUESTION], "tools": SCHEMA_TOOLS},
    ):
        counted = await rig.anthropic().messages.count_tokens(model="claude", **body)
        await send(rig, **body, max_tokens=9)
        assert counted.input_tokens == len(rig.engine.samples[-1].prompt)
    assert rig.runs() == [1, 1]


async def test_what_is_no_path_is_refused_by_the_paths_that_there_are(rig) -> None:
    async with rig.http() as client:
        for method, path in (
            ("HEAD", "/"),
            ("GET", "/v1"),
            ("GET", "/v1/chat/completions"),
            ("POST", "/v1/models"),
            ("POST", "/v1/models/policy"),
            ("POST", "/v1/embeddings"),
            ("GET", "/v1/messages/count_tokens"),
            ("GET", "/v1/files/v1/models/policy"),
        ):
            answer = await client.request(method, path)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 404
            assert message.startswith(
                f"{method} {path.rstrip('/')} is no path of agents; there are "
            )
            assert "POST /v1/chat/completions, " in message
            assert message.endswith(", GET /v1/models")
        for method, path in (
            ("GET", "/v1/models/"),
            ("POST", "/v1/messages/count_tokens/"),
        ):
            request = {"messages": [QUESTION]} if method == "POST" else None
            assert (await client.request(method, path, json=request)).status_code == 200


async def test_no_call_is_served_after_the_end_of_the_episode(rig) -> None:
    rig.recorder.cancel()
    with pytest.raises(openai.APIStatusError):
        await chat(rig, [QUESTION])
    assert rig.runs() == []


async def test_a_parser_that_does_not_fit_the_model_is_named(shared) -> None:
    settings = agent_config(
        Path("models/any"), tool_parser="deepseek_v3"
    ).rollout_server
    with pytest.raises(ConfigError, match="rollout_server.tool_parser = 'deepseek_v3'"):
        await agent_services(shared.engine, settings).api()


# Like Gemma 4: a result stands inside the message with its call.
NESTED = """\
{%- for message in messages %}{% if message.role != 'tool' %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- if message.tool_calls %}<result>{{ messages[loop.index].content }}</result>{% endif %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def test_a_result_that_a_template_writes_into_the_reply_is_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "nested.jinja").write_text(NESTED)
    template = str(tmp_path / "nested.jinja")
    rig = await agent_rig(tmp_path / "model", script, chat_template=template)
    messages = [{"role": "user", "content": "call 4"}]
    message = await chat(rig, messages, tools=TOOLS)
    (call,) = message["tool_calls"]
    messages += [
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": "It is 7."},
    ]
    await chat(rig, messages, tools=TOOLS)
    _, second = (
        rig.engine.tokenizer.decode(sample.prompt) for sample in rig.engine.samples
    )
    assert "<result>It is 7.</result>" in second
    assert rig.runs() == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_without_a_generation_prompt_begins_replies_too(
    tmp_path, stream
) -> None:
    folder = make_chat_model(tmp_path, with_weights=False)
    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE.partition("{%- if add_generation_prompt")[0])
    engine = scripted_engine(
        agent_config(folder, chat_template=str(template)), lambda _: "Yes."
    )
    rig = AgentRig(engine, await engine.agents.api())
    messages: list = []
    for _ in range(2):
        messages.append(QUESTION)
        messages.append(await chat(rig, messages, stream=stream))
    text = engine.tokenizer.decode(engine.samples[-1].prompt)
    begins = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{begins}Yes.<|im_end|>\n{begins}"
    await rig.closed()
    assert rig.runs() == [2]
    # A client may still say how its prompt ends.
    await chat(rig, [QUESTION], extra_body={"add_generation_prompt": False})
    assert (
        engine.tokenizer.decode(engine.samples[-1].prompt)
        == "<|im_start|>user\nhi<|im_end|>\n"
    )


async def test_values_of_the_environment_come_before_the_runs_and_behind_the_requests(
    shared,
):
    settings = agent_config(
        Path("models/any"), chat_template_kwargs={"enable_thinking": True}
    )
    api = await agent_services(shared.engine, settings.rollout_server).api()
    rig = AgentRig(shared.engine, api)
    rig.begin(template_values={"enable_thinking": False})
    await chat(rig, [QUESTION])
    await chat(
        rig, [QUESTION], extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    await send(rig, [QUESTION])
    texts = [
        rig.engine.tokenizer.decode(sample.prompt) for sample in rig.engine.samples
    ]
    assert ["<think>" in text for text in texts] == [True, False, True]
    counted = await rig.anthropic().messages.count_tokens(
        model="claude", messages=[QUESTION]
    )
    assert counted.input_tokens == len(rig.engine.samples[-1].prompt)
    rig.begin()
    await chat(rig, [QUESTION])
    (sample,) = rig.engine.samples
    assert "<think>" not in rig.engine.tokenizer.decode(sample.prompt)


async def test_tools_without_a_parser_are_refused_by_its_name(shared) -> None:
    settings = agent_config(Path("models/any"), tool_parser=None).rollout_server
    rig = AgentRig(shared.engine, await agent_services(shared.engine, settings).api())
    with pytest.raises(
        openai.BadRequestError, match=r"tools need rollout_server\.tool_parser"
    ):
        await chat(rig, [QUESTION], tools=TOOLS)
    counted = {"messages": [QUESTION], "tools": TOOLS}
    answer = await rig.http().post("/v1/messages/count_tokens", json=counted)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, NEED_PARSER)
    assert (await chat(rig, [QUESTION], tools=TOOLS, tool_choice="none"))["content"]


async def test_reasoning_comes_apart_and_may_be_left_out_when_it_is_sent_back(
    shared,
) -> None:
    settings = agent_config(Path("models/any"), reasoning_parser="qwen3").rollout_server
    rig = AgentRig(shared.engine, await agent_services(shared.engine, settings).api())
    messages = [{"role": "user", "content": "think"}]
    for with_reasoning in (True, False):
        message = await chat(rig, messages)
        assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
        if not with_reasoning:
            del message["reasoning"]
        messages += [message, {"role": "user", "content": "think"}]
    await chat(rig, messages)
    await rig.closed()
    assert rig.runs() == [3]
    rig.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template_values", [{}, {"enable_thinking": False}])
async def test_thoughts_are_told_apart_in_every_turn(
    shared, template_values, stream
) -> None:
    """Neither the thoughts of an earlier reply nor those that a template has ended are the next's.

    In a stream vLLM takes new thoughts for text behind the end of earlier ones; elsewhere it takes
    an answer for thoughts where the template has ended them.
    """
    settings = agent_config(
        Path("models/any"), reasoning_parser="deepseek_r1"
    ).rollout_server
    rig = AgentRig(shared.engine, await agent_services(shared.engine, settings).api())
    rig.begin(template_values=template_values)
    question = "hi" if template_values else "think"
    messages: list = []
    for _ in range(3):
        messages.append({"role": "user", "content": question})
        message = await chat(rig, messages, stream=stream)
        reasoning = message.get("reasoning")
        content = message["content"]
        if template_values:
            assert (reasoning, content[:8]) == (None, "You said")
        else:
            assert (reasoning, content) == ("Hm.", "Yes.")
        messages.append(message)
    await rig.closed()
    assert rig.runs() == [3]
    rig.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_marks_of_thoughts_may_be_special_tokens(tmp_path: Path, stream) -> None:
    folder = make_chat_model(tmp_path, with_weights=False)
    path = folder / "tokenizer.json"
    saved = json.loads(path.read_text())
    for token in saved["added_tokens"]:
        token["special"] = token["special"] or "think" in token["content"]
    path.write_text(json.dumps(saved))
    engine = scripted_engine(
        agent_config(folder, reasoning_parser="deepseek_r1"), script
    )
    rig = AgentRig(engine, await engine.agents.api())
    message = await chat(rig, [{"role": "user", "content": "think"}], stream=stream)
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


_STEP = [f"<\uff5ctool_{name}\uff5c>" for name in ("calls_begin", "call_begin", "sep")]
_STEP += [f"<\uff5ctool_{name}\uff5c>" for name in ("call_end", "calls_end")]
_ACTION = ["<|action_start|>", "<|plugin|>", "<|action_end|>"]
CALLED: dict[str, Any] = {"a": 1234567890, "b": "two words"}
OF_CALLS = [
    {"name": "add", "arguments": CALLED},
    {"name": "add", "arguments": {"a": 5}},
]


@pytest.mark.parametrize(
    ("tool_parser", "words", "text"),
    [
        (
            "llama3_json",
            ["<|python_tag|>"],
            json.dumps({"name": "add", "parameters": {}}),
        ),
        ("xlam", [], json.dumps(OF_CALLS)),
        ("phi4_mini_json", [], f"functools{json.dumps(OF_CALLS)}"),
        ("hunyuan_a13b", [], f"Now.<tool_calls>{json.dumps(OF_CALLS)}</tool_calls>"),
        (
            "jamba",
            ["<tool_calls>", "</tool_calls>"],
            f"<tool_calls>{json.dumps(OF_CALLS)}</tool_calls>",
        ),
        (
            "step3",
            _STEP,
            f"Now.{_STEP[0]}{_STEP[1]}function{_STEP[2]}"
            '<steptml:invoke name="add"><steptml:parameter name="a">5</steptml:parameter>'
            f"</steptml:invoke>{_STEP[3]}{_STEP[4]}",
        ),
        (
            "internlm",
            _ACTION,
            f'Now.{_ACTION[0]}{_ACTION[1]}{{"name": "add", "parameters": {{"a": 5}}}}{_ACTION[2]}',
        ),
        (
            "minicpm5",
            ["<function", "</function>", "<param", "</param>"],
            '<function name="add"><param name="a">5</param></function>',
        ),
    ],
)
async def test_a_stream_has_the_calls_that_the_whole_reply_has(
    tmp_path, tool_parser, words, text
):
    """These parsers of vLLM read other calls in a reply in parts, or none, or lose the text.

    Some of them failed at tools of responses.
    """
    rig = await agent_rig(
        tmp_path, lambda _: text, words=words, tool_parser=tool_parser
    )
    found = []
    for stream in (False, True):
        message = await chat(rig, [QUESTION], stream=stream, tools=TOOLS)
        calls = [call["function"] for call in message["tool_calls"]]
        read = [(call["name"], json.loads(call["arguments"])) for call in calls]
        found.append((message.get("content") or None, read))
        final = await send(rig, [QUESTION], stream=stream, tools=SCHEMA_TOOLS)
        uses = [block for block in final.content if block.type == "tool_use"]
        assert [(use.name, use.input) for use in uses] == read
        assert [block.text for block in final.content if block.type == "text"] == (
            [message["content"]] if message.get("content") else []
        )
        answer = await respond(rig, stream=stream, input=[QUESTION], tools=ITEM_TOOLS)
        items = [item for item in answer.output if item.type == "function_call"]
        assert [(item.name, json.loads(item.arguments)) for item in items] == read
    assert found[0] == found[1]
    assert found[0][1][0][0] == "add"


@pytest.mark.parametrize(
    ("tool_parser", "words", "text"),
    [
        ("internlm", _ACTION, 'Now.<|action_start|><|plugin|>{"name": "add", "param'),
        ("internlm", _ACTION, '<|action_start|><|plugin|>{"name": 7}<|action_end|>'),
        ("phi4_mini_json", [], 'functools[{"name": "add", "arguments": {"b": [1]}}]'),
    ],
)
async def test_a_call_that_a_parser_cannot_read_is_text(
    tmp_path, tool_parser, words, text
) -> None:
    """Parsers of vLLM raised, so that episodes failed, or gave neither a text nor a call."""
    rig = await agent_rig(
        tmp_path, lambda _: text, words=words, tool_parser=tool_parser
    )
    for stream in (False, True):
        message = await chat(rig, [QUESTION], stream=stream, tools=TOOLS)
        assert (message["content"], message.get("tool_calls")) == (text, None)
    inputs = TemplateInputs(json.dumps(TOOLS))
    reader = await rig.engine.agents.reader(inputs)
    read = reader.read([], rig.engine.tokenizer.encode(text), inputs)
    assert (read.content, read.tool_calls) == (text, ())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['"two"', "[5]", "7"])
async def test_a_call_without_an_object_of_arguments_is_text_where_no_other_fits(
    tmp_path, arguments, stream
) -> None:
    """Anthropic's API has no place for it: an agent got an error 400 for a fault of the model."""
    words = ["<|python_tag|>"]
    text = f'{{"name": "add", "arguments": {arguments}}}'
    rig = await agent_rig(
        tmp_path, lambda _: text, words=words, tool_parser="llama4_json"
    )
    final = await send(rig, [QUESTION], stream=stream, tools=SCHEMA_TOOLS)
    assert [(block.type, block.text) for block in final.content] == [("text", text)]
    message = await chat(rig, [QUESTION], stream=stream, tools=TOOLS)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        arguments
    ]
    # The reply that the client saw is continued.
    history = [QUESTION, {"role": "assistant", "content": final.content}, QUESTION]
    await send(rig, history, tools=SCHEMA_TOOLS)
    assert sorted(rig.runs()) == [1, 2]
    await rig.closed()
    rig.check()


async def test_a_parser_that_reads_no_reply_is_named_before_the_first_one(
    shared,
) -> None:
    settings = agent_config(
        Path("models/any"), reasoning_parser="openai_gptoss"
    ).rollout_server
    with pytest.raises(
        ConfigError, match="reasoning_parser = 'openai_gptoss': NotImplemented"
    ):
        await agent_services(shared.engine, settings).api()


async def test_a_call_that_a_model_wrote_wrongly_leaves_no_traceback(
    tmp_path, caplog
) -> None:
    rig = await agent_rig(tmp_path, lambda _: '<tool_call>{"name": </tool_call>')
    parsers = logging.getLogger("vllm.tool_parsers.hermes_tool_parser")
    parsers.addHandler(caplog.handler)
    try:
        await chat(rig, [QUESTION], tools=TOOLS)
    finally:
        parsers.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name == parsers.name]


async def test_a_reply_is_streamed_in_parts_where_no_parser_reads_it(rig) -> None:
    for tools in (TOOLS, None):
        await chat(rig, [QUESTION], stream=True, **({"tools": tools} if tools else {}))
    assert [sample.options.is_streamed for sample in rig.engine.samples[-2:]] == [
        False,
        True,
    ]


async def test_a_stream_that_is_silent_has_comments(
    rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients such as Codex give up a stream that sends nothing for minutes."""
    monkeypatch.setattr(agent_api, "QUIET_S", 0.001)
    rig.engine.may_end.clear()
    request = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "stream": True}
    async with rig.http() as client:
        call = client.stream("POST", "/v1/chat/completions", json=request)
        async with call as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(":")
            rig.engine.may_end.set()
            rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]
    # The SDKs do not show them.
    rig.engine.may_end.clear()
    calling = asyncio.ensure_future(chat(rig, [QUESTION], stream=True, tools=TOOLS))
    await until(
        lambda: [c for c in rig.recorder.open_calls.values() if c.body[:1] == b":"]
    )
    rig.engine.may_end.set()
    assert (await calling)["content"].startswith("You said")
