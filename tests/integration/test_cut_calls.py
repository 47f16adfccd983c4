"""Replies that end in the middle of a tool call: what agents and environments are handed."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from slipstream.rollout_server.chat import ReplyEnding, TemplateInputs
from support.fakes.agent_rig import AgentRig, agent_rig
from support.fakes.example_agents import TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="module")

FUNCTION = TOOLS[0]["function"]
ITEM_TOOLS = [
    {
        "type": "function",
        **FUNCTION,
    }
]
SCHEMA_TOOLS = [
    {
        "name": "add",
        "input_schema": FUNCTION["parameters"],
    }
]
QUESTION = {"role": "user", "content": "hi"}
XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
ALL_NUMBERS = [51.0, 62.0]
# A call, and the mark before its name, by the parser.
CALLS = {
    "qwen3_coder": (XML_CALL, "<function="),
    "hermes": (JSON_CALL, '"name"'),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(CALLS))
async def rig(request, tmp_path_factory) -> AgentRig:
    call, name_mark = CALLS[request.param]
    text = "I call. " + "".join(call % number for number in ALL_NUMBERS)
    rig = await agent_rig(
        tmp_path_factory.mktemp("model"),
        lambda _: text,
        tool_parser=request.param,
        max_tokens=8000,
    )
    rig.text = text
    rig.name_mark = name_mark
    return rig


class Answer(NamedTuple):
    """How an answer ends, the first argument of each of its calls, and its text."""

    end: Any
    numbers: list[float]
    text: str


def numbers_in(texts: Iterable[str]) -> list[float]:
    return [json.loads(text)["a"] for text in texts]


async def chat(rig: AgentRig, limit: int, *, stream: bool, **options: Any) -> Answer:
    completions = rig.openai().chat.completions
    fields = {
        "model": "m",
        "messages": [QUESTION],
        "tools": TOOLS,
        "max_tokens": limit,
        **options,
    }
    if not stream:
        completion = await completions.create(**fields)
        (choice,) = completion.choices
        message = choice.message
        calls = message.tool_calls or ()
        numbers = numbers_in(call.function.arguments for call in calls)
        return Answer(
            end=choice.finish_reason,
            numbers=numbers,
            text=message.content or "",
        )
    text = ""
    arguments: dict[int, str] = {}
    end = None
    async for chunk in await completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        end = choice.finish_reason or end
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            part = call.function.arguments or ""
            arguments[call.index] = arguments.get(call.index, "") + part
    numbers = numbers_in(arguments.values())
    return Answer(end, numbers, text)


async def respond(rig: AgentRig, limit: int, *, stream: bool) -> Answer:
    responses = rig.openai().responses
    fields = {
        "model": "m",
        "input": "hi",
        "tools": ITEM_TOOLS,
        "max_output_tokens": limit,
    }
    if stream:
        async with responses.stream(**fields) as events:
            response = await events.get_final_response()
    else:
        response = await responses.create(**fields)
    calls = [item for item in response.output if item.type == "function_call"]
    details = response.incomplete_details
    reason = details and details.reason
    numbers = numbers_in(call.arguments for call in calls)
    return Answer(
        end=(response.status, reason),
        numbers=numbers,
        text=response.output_text,
    )


async def send(rig: AgentRig, limit: int, *, stream: bool) -> Answer:
    messages = rig.anthropic().messages
    fields = {
        "model": "m",
        "messages": [QUESTION],
        "tools": SCHEMA_TOOLS,
        "max_tokens": limit,
    }
    if stream:
        async with messages.stream(**fields) as events:
            message = await events.get_final_message()
    else:
        message = await messages.create(**fields)
    numbers = []
    texts = []
    for block in message.content:
        if block.type == "tool_use":
            numbers.append(block.input["a"])
        elif block.type == "text":
            texts.append(block.text)
    return Answer(
        end=message.stop_reason,
        numbers=numbers,
        text="".join(texts),
    )


# The ends of a cut answer and of a whole one, by the API.
APIS = {
    chat: ("length", "tool_calls"),
    respond: (("incomplete", "max_output_tokens"), ("completed", None)),
    send: ("max_tokens", "tool_use"),
}


@pytest.mark.parametrize("api", APIS)
async def test_a_call_that_a_limit_cut_is_text_of_a_reply_that_ended_at_its_length(
    rig, api
):
    cut_end, whole_end = APIS[api]
    tokenizer = rig.engine.tokenizer
    size = len(tokenizer.encode(rig.text, add_special_tokens=False))
    num_calls: list[int] = []
    for limit in range(1, size + 2):
        answer = await api(rig, limit, stream=False)
        assert await api(rig, limit, stream=True) == answer
        num_handed_out = len(answer.numbers)
        assert answer.numbers == ALL_NUMBERS[:num_handed_out]
        if limit <= size:
            assert answer.end == cut_end
        else:
            assert answer.end == whole_end
        sampled_text = tokenizer.decode(rig.engine.samples[-1].tokens)
        if not answer.numbers:
            assert answer.text.strip() == sampled_text.strip()
        elif sampled_text.count(rig.name_mark) > num_handed_out:
            _, _, unfinished = sampled_text.rpartition("</tool_call>")
            assert answer.text.endswith(unfinished)
        num_calls.append(num_handed_out)
        rig.begin()
    assert num_calls[0] == 0
    assert num_calls[-1] == len(ALL_NUMBERS)


@pytest.mark.parametrize(
    ("stop", "numbers"),
    [
        ("add", []),
        ("</tool_call>", ALL_NUMBERS[:1]),
    ],
)
async def test_a_call_that_a_stop_text_ends_in_the_middle_is_no_call(
    rig, stop, numbers
) -> None:
    """A call that the stop text ends where its mark stands is one."""
    options = {"stop": [stop]}
    answer = await chat(rig, 4000, stream=False, **options)
    assert await chat(rig, 4000, stream=True, **options) == answer
    assert answer.numbers == numbers
    if numbers:
        assert answer.end == "tool_calls"
    else:
        assert answer.end == "stop"
        sampled_text, _, _ = rig.text.partition(stop)
        assert answer.text.strip() == sampled_text.strip()
    rig.begin()


async def test_an_environment_gets_no_call_that_a_limit_cut(rig) -> None:
    inputs = TemplateInputs(json.dumps(TOOLS))
    reader = await rig.engine.agents.reader(inputs)
    tokenizer = rig.engine.tokenizer
    tokens = tokenizer.encode(rig.text, add_special_tokens=False)
    ending = ReplyEnding(by_model=False)
    for limit in range(len(tokens)):
        reply = reader.read([], tokens[:limit], inputs, ending)
        numbers = numbers_in(call.arguments for call in reply.tool_calls)
        assert numbers == ALL_NUMBERS[: len(numbers)]
        if not numbers:
            sampled_text = tokenizer.decode(tokens[:limit])
            assert reply.content.strip() == sampled_text.strip()
