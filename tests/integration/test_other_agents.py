"""Agents of others, unchanged, each in one episode: gateway, vLLM's application, scripted engine.

They are no dependencies: `make test-tools` installs them, and a test without its agent is skipped.
`SLIPSTREAM_AGENTS` names another folder, with a virtual environment `py` and the packages of npm
below `node`.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from slipstream.client.episode_host import EpisodeHost
from slipstream.environments.command import Command
from slipstream.rollout_server.engine_interface import Sampling
from slipstream.v1 import environment_pb2 as pb
from support.fakes.agent_rig import AgentRig, agent_rig
from support.fakes.scripted_server import Episode, Handler
from support.rigs import tools

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("nothing_survives"),
]

FOLDER = tools.folder("agents")
PYTHON = FOLDER / "py" / "bin" / "python"
NODE = FOLDER / "node" / "node_modules" / ".bin"
LIMIT_S = 400.0
# Coding agents open with a hundred thousand characters, each of them a token here.
MAX_TOKENS = 600_000
CALLED = "<|im_start|>assistant\n"

Script = dict[str, str]


def needs(package: str) -> pytest.MarkDecorator:
    """Skips without a package in the folder's Python."""
    process = False
    if PYTHON.exists():
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        process = subprocess.run([PYTHON, "-c", code], check=False).returncode == 0
    reason = f"no agents in Python here: {tools.HOW}"
    return pytest.mark.skipif(not process, reason=reason)


def needs_program(name: str) -> pytest.MarkDecorator:
    """Skips without a program of npm in the folder."""
    reason = f"no agents of npm here: {tools.HOW}"
    return pytest.mark.skipif(not (NODE / name).exists(), reason=reason)


class Model:
    """What the engine says: `replies` in turn, by the number of the assistant's messages so far."""

    def __init__(self) -> None:
        self.replies: list[str] = []
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        num_calls = prompt.count(CALLED) - 1
        return self.replies[min(num_calls, len(self.replies) - 1)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, model: Model) -> AgentRig:
    return await agent_rig(
        tmp_path_factory.mktemp("model"), model, max_tokens=MAX_TOKENS
    )


def tool(name: str, **arguments: object) -> str:
    """The text with which the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def handler(rig: AgentRig) -> Handler:
    """Answers calls as a rollout server does."""

    async def handle(call: pb.AgentCall) -> AsyncIterator[pb.ReplyPart]:
        async for part in rig.api.answer(rig.recorder, call):
            yield part

    return handle


async def finished(
    rig: AgentRig, model: Model, replies: list[str], agent: Command
) -> Episode:
    """Plays one episode to its end; all that was sampled is recorded, and the reward is 1."""
    model.replies = replies
    model.prompts = []
    rig.begin(Sampling(1.0, 1.0, 0, 4000, 100, MAX_TOKENS, max_branches=50))
    host = EpisodeHost(agent)
    episode = Episode(host, handler(rig))
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await episode.run()
    finally:
        await host.close_all()
    assert answer.agent_result.reward == 1.0, (answer, [c.path for c in episode.calls])
    assert answer.agent_result.metrics["exit_0"] == 1.0
    rig.check()
    return episode


# The programs look at what the model says themselves, which `finished` asks of their exit status.
ONE = ["echo", "1"]
LITELLM = """
import litellm
messages = [{"role": "user", "content": "{task}"}]
reply = litellm.completion(model="openai/any", messages=messages).choices[0].message
assert reply.content == "first", reply
messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
stream = litellm.completion(model="openai/any", messages=messages, stream=True)
said = "".join(part.choices[0].delta.content or "" for part in stream)
assert said == "second", said
asked = [{"role": "user", "content": "{task}"}]
answer = litellm.completion(model="anthropic/any", messages=asked, max_tokens=50)
assert answer.choices[0].message.content == "first", answer
"""


@needs("litellm")
async def test_litellm(rig: AgentRig, model: Model) -> None:
    program = Command(
        [str(PYTHON.absolute()), "-c", LITELLM], ["hello"], score_command=ONE
    )
    episode = await finished(rig, model, ["first", "second"], program)
    assert [call.path for call in episode.calls] == [
        "/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/messages",
    ]
    # The second call continues the first one.
    assert rig.runs() == [2, 1]


OPENAI_AGENTS = """
import agents, openai
agents.set_tracing_disabled(True)
@agents.function_tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
def ask(model):
    clerk = agents.Agent(name="clerk", instructions="Use the tool.", tools=[add], model=model)
    result = agents.Runner.run_sync(clerk, "{task}")
    assert result.final_output == "It is 5.", result
    return clerk, result.last_response_id
clerk, previous = ask("any")
more = agents.Runner.run_sync(clerk, "Sure?", previous_response_id=previous)
assert more.final_output == "I am.", more
client = openai.AsyncOpenAI()
ask(agents.OpenAIChatCompletionsModel("any", openai_client=client))
"""


@needs("agents")
async def test_openai_agents(rig: AgentRig, model: Model) -> None:
    program = Command(
        [str(PYTHON.absolute()), "-c", OPENAI_AGENTS], ["2 + 3"], score_command=ONE
    )
    replies = [tool("add", a=2, b=3), "It is 5.", "I am."]
    episode = await finished(rig, model, replies, program)
    paths = [call.path for call in episode.calls]
    assert paths == ["/v1/responses"] * 3 + ["/v1/chat/completions"] * 2
    assert rig.runs() == [3, 2]


AI_SDK = """
import { createRequire } from "module";
const load = createRequire(process.argv[2] + "/x");
const { generateText, streamText, tool, stepCountIs } = load("ai");
const { createOpenAI } = load("@ai-sdk/openai");
const { z } = load("zod");
const inputSchema = z.object({ a: z.number(), b: z.number() });
const tools = { add: tool({ inputSchema, execute: async ({ a, b }) => a + b }) };
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
for (const model of [openai("any"), openai.chat("any")]) {
    const messages = [{ role: "user", content: "{task}" }];
    const first = await generateText({ model, tools, messages, stopWhen: stepCountIs(3) });
    if (first.text !== "It is 5.") throw first.text;
    messages.push(...first.response.messages, { role: "user", content: "Sure?" });
    let said = "";
    for await (const part of streamText({ model, tools, messages }).textStream) said += part;
    if (said !== "I am.") throw said;
}
"""


@pytest.mark.skipif(
    not (NODE.parent / "@ai-sdk" / "openai").exists(),
    reason=f"no agents of npm here: {tools.HOW}",
)
async def test_ai_sdk(rig: AgentRig, model: Model) -> None:
    """By default it names the items of earlier responses by their ids."""
    program = Command(
        ["node", "agent.mjs", str(NODE.parent.absolute())],
        ["2 + 3"],
        files={"agent.mjs": AI_SDK},
        score_command=ONE,
    )
    replies = [tool("add", a=2, b=3), "It is 5.", "I am."]
    episode = await finished(rig, model, replies, program)
    paths = [call.path for call in episode.calls]
    assert paths == ["/v1/responses"] * 3 + ["/v1/chat/completions"] * 3
    assert "item_reference" in episode.calls[2].body.decode()
    assert rig.runs() == [3, 3]


MINI_SWE_AGENT = """
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
agent = DefaultAgent(
    LitellmModel(model_name="openai/any", cost_tracking="ignore_errors"),
    LocalEnvironment(),
    system_template="You fix things with bash.",
    instance_template="{task}",
    cost_limit=0.0,
)
result = agent.run("fix it")
assert result["exit_status"] == "Submitted", result
assert open("answer.txt").read() == "fixed\\n"
"""


@needs("minisweagent")
async def test_mini_swe_agent(rig: AgentRig, model: Model) -> None:
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    replies = [
        tool("bash", command="echo fixed > answer.txt"),
        tool("bash", command=submit),
    ]
    program = Command(
        [str(PYTHON.absolute()), "-c", MINI_SWE_AGENT],
        ["fix it"],
        variables={"MSWEA_SILENT_STARTUP": "1"},
        score_command=ONE,
    )
    await finished(rig, model, replies, program)
    assert rig.runs() == [2]


def confined(*readable: str) -> dict[str, Any]:
    """The settings of the guide for programs of npm in the sandbox."""
    limits = {"sandbox": True, "memory_gib": 4.0, "max_processes": 200}
    return limits | {"readable": [str(FOLDER.resolve() / "node"), *readable]}


@pytest.mark.parametrize(
    "settings", [{}, confined("/proc/self")], ids=["open", "sandbox"]
)
@needs_program("claude")
async def test_claude_code(
    rig: AgentRig, model: Model, settings: dict[str, Any]
) -> None:
    program = Command(
        [str((NODE / "claude").absolute()), "-p", "{task}", "--model", "any",
         "--allowedTools", "Bash"],
        ["Write 42 into answer.txt."],
        variables={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        score_command=["grep", "-c", "^42$", "answer.txt"],
        **settings,
    )  # fmt: skip
    # It drops the white space when it sends the call back.
    call = "\n\n" + tool(
        "Bash", command="echo 42 > answer.txt", description="Writes the answer"
    )
    episode = await finished(rig, model, [call, "Done."], program)
    assert {call.path.partition("?")[0] for call in episode.calls} >= {"/v1/messages"}
    assert max(rig.runs()) == 2


@pytest.mark.parametrize("confining", [{}, confined()], ids=["open", "sandbox"])
@needs_program("codex")
async def test_codex(rig: AgentRig, model: Model, confining: dict[str, Any]) -> None:
    codex = str((NODE / "codex").absolute())
    settings = (
        "model_provider=policy",
        "model_providers.policy.name=policy",
        "model_providers.policy.base_url={OPENAI_BASE_URL}",
        "model_providers.policy.env_key=OPENAI_API_KEY",
        "model_providers.policy.wire_api=responses",
    )
    start = (
        codex,
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
    )
    options = [part for setting in settings for part in ("-c", setting)]
    program = Command(
        [*start, "-m", "any", *options, "{task}"],
        ["Write 42 into answer.txt."],
        score_command=["grep", "-c", "^42$", "answer.txt"],
        **confining,
    )
    call = tool("exec_command", cmd="echo 42 > answer.txt")
    episode = await finished(rig, model, [call, "Done."], program)
    assert {call.path for call in episode.calls} >= {"/v1/responses"}
    assert max(rig.runs()) == 2
