"""Replies that end in the middle of a tool call: what agents and environments are handed."""

import json
from typing import Any

import pytest
import pytest_asyncio
from slipstream.rollout_server.chat import ReplyEnding, TemplateInputs
from support.fakes.agent_rig import AgentRig, agent_rig
from support.fakes.example_agents import TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="module")

FUNCTION = TOOLS[0]["function"]
ITEM_TOOLS = [{"type": "function", **FUNCTION}]
SCHEMA_TOOLS = [{"name": "add", "input_schema": FUNCTION["parameters"]}]
QUESTION = {"role": "user", "content": "hi"}
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
TEXTS = {
    "qwen3_coder": f"I call. {CALL % 51}{CALL % 62}",
    "hermes": f"I call. {JSON_CALL % 51}{JSON_CALL % 62}",
}
ALL_CALLS = [51.0, 62.0]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(TEXTS))
async def rig(request, tmp_path_factory) -> AgentRig:
    text = TEXTS[request.param]
    folder = tmp_path_factory.mktemp("model")
    rig = await agent_rig(folder, lambda _: text, tool_parser=request.param, max_tokens=8000)
    rig.text = text
    return rig


def num_tokens(rig: AgentRig) -> int:
    return len(rig.engine.tokenizer.encode(rig.text, add_special_tokens=False))


async def asked_chat(rig: AgentRig, stream: bool, limit: int, **options: Any):
    """Returns the end of a chat completion, the numbers of its calls, and its text."""
    asked = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "max_tokens": limit, **options}
    completions = rig.openai().chat.completions
    if not stream:
        (choice,) = (await completions.create(**asked)).choices
        calls = [call.function.arguments for call in choice.message.tool_calls or ()]
        return choice.finish_reason, calls, choice.message.content or ""
    texts: list[str] = []
    arguments: dict[int, str] = {}
    reason = None
    async for chunk in await completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        texts.append(choice.delta.content or "")
        for call in choice.delta.tool_calls or ():
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return reason, list(arguments.values()), "".join(texts)


async def asked_response(rig: AgentRig, stream: bool, limit: int):
    asked = {"model": "m", "input": "hi", "tools": ITEM_TOOLS, "max_output_tokens": limit}
    if stream:
        async with rig.openai().responses.stream(**asked) as events:
            response = await events.get_final_response()
    else:
        response = await rig.openai().responses.create(**asked)
    calls = [item.arguments for item in response.output if item.type == "function_call"]
    reason = response.incomplete_details and response.incomplete_details.reason
    return (response.status, reason), calls, response.output_text


async def asked_message(rig: AgentRig, stream: bool, limit: int):
    asked = {"model": "m", "messages": [QUESTION], "tools": SCHEMA_TOOLS, "max_tokens": limit}
    if stream:
        async with rig.anthropic().messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await rig.anthropic().messages.create(**asked)
    calls = [json.dumps(block.input) for block in message.content if block.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    return message.stop_reason, calls, text


APIS = {
    asked_chat: ("length", "tool_calls"),
    asked_response: (("incomplete", "max_output_tokens"), ("completed", None)),
    asked_message: ("max_tokens", "tool_use"),
}


@pytest.mark.parametrize("api", APIS)
async def test_a_call_that_a_limit_cut_is_text_of_a_reply_that_ended_at_its_length(rig, api):
    cut_end, whole_end = APIS[api]
    size = num_tokens(rig)
    numbers: list[int] = []
    for limit in range(1, size + 2):
        whole = await api(rig, False, limit)
        assert await api(rig, True, limit) == whole
        end, calls, text = whole
        given = [json.loads(call)["a"] for call in calls]
        assert given == ALL_CALLS[: len(given)]
        assert end == (cut_end if limit <= size else whole_end)
        said = rig.engine.tokenizer.decode(rig.engine.samples[-1].tokens)
        if not given:
            assert text.strip() == said.strip()
        elif said.count("<function=") + said.count('"name"') > len(given):
            unfinished = said.rpartition("</tool_call>")[2]
            assert text.endswith(unfinished)
        numbers.append(len(given))
        rig.begin()
    assert (numbers[0], numbers[-1]) == (0, 2)


async def test_a_call_that_a_stop_text_ends_in_the_middle_is_no_call(rig) -> None:
    """One that the stop text ends where its mark stands is a call."""
    for stop, given in (("add", []), ("</tool_call>", ["51"])):
        texts = []
        for stream in (False, True):
            end, calls, text = await asked_chat(rig, stream, 4000, stop=[stop])
            assert [str(int(json.loads(call)["a"])) for call in calls] == given
            assert end == ("tool_calls" if given else "stop")
            texts.append(text)
            rig.begin()
        assert texts[0] == texts[1]
        if not given:
            assert texts[0].strip() == rig.text.partition(stop)[0].strip()


async def test_an_environment_gets_no_call_that_a_limit_cut(rig) -> None:
    inputs = TemplateInputs(json.dumps(TOOLS))
    reader = await rig.engine.agents.reader(inputs)
    tokens = rig.engine.tokenizer.encode(rig.text, add_special_tokens=False)
    for limit in range(len(tokens)):
        reply = reader.read([], tokens[:limit], inputs, ReplyEnding(by_model=False))
        given = [json.loads(call.arguments)["a"] for call in reply.tool_calls]
        assert given == ALL_CALLS[: len(given)]
        if not given:
            said = rig.engine.tokenizer.decode(tokens[:limit])
            assert reply.content.strip() == said.strip()
