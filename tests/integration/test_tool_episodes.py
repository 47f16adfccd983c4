"""Environments with tools from lease to trajectory: real workers and parsers, a scripted engine."""

import contextlib
import json
import re
import runpy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from slipstream.core.types import Branch, FailureKind, Status, Trajectory
from slipstream.rollout_server.chat import TemplateInputs
from slipstream.rollout_server.engine_interface import GenerationFailed
from support.fakes import example_tools
from support.fakes.agent_rig import (
    agent_config,
    agent_services,
    script,
    scripted_engine,
)
from support.fakes.chat_models import CHAT_TEMPLATE, make_chat_model
from support.rigs import episode_server
from support.rigs.episode_server import EpisodeServer, recorded

# Like those of gpt-oss and MiniMax-M2.
DEMANDING = CHAT_TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- set ns = namespace(called=false) %}{%- for message in messages %}"
    "{%- if message.tool_calls %}{%- set ns.called = true %}{%- endif %}"
    "{%- if message.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}"
    "{%- endif %}",
)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    script: Callable[[str], str] = script,
    template: str = CHAT_TEMPLATE,
    **rollout_server: object,
) -> AsyncIterator[EpisodeServer]:
    model = make_chat_model(folder / "model", with_weights=False)
    (model / "chat_template.jinja").write_text(template)
    config = agent_config(model, **rollout_server)
    engine = scripted_engine(config, script)
    async with episode_server.serving(config, engine, folder / "logs") as server:
        yield server


async def run(server: EpisodeServer, environment: str, **lease: Any) -> Trajectory:  # noqa: ANN401
    (trajectory,) = await server.run(
        environment, timeout_s=30.0, **{"max_turns": 10} | lease
    )
    await server.check_ledger()
    return trajectory


def load(server: EpisodeServer, *names: str, try_reset: bool = False) -> None:
    server.load("example_tools", *names, timeout_s=30.0, try_reset=try_reset)


async def test_calls_and_results_of_several_turns_are_one_conversation(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as server:
        load(server, "Adding")
        trajectory = await run(server, "Adding")
        assert (trajectory.status, trajectory.failure) == (Status.COMPLETED, None)
        assert trajectory.reward == 1 + 2 + 5
        assert trajectory.metrics == {"turns": 3.0}
        assert (trajectory.num_turns, trajectory.branches) == (3, ())
        assert recorded(trajectory) == server.samples()
        # The tools stand in the prompt, and each result behind the calls.
        assert '"name": "add"' in trajectory.prompt_text
        assert trajectory.reply_text.count("<tool_call>") == 3
        assert (
            "</tool_call><|im_end|>\n<|im_start|>tool\nok<|im_end|>\n"
            in trajectory.reply_text
        )


async def test_a_served_environment_gets_calls_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.fleet.serve(example_tools.Adding())
        trajectory = await run(server, "served")
        assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 8.0)


async def test_other_tools_begin_a_branch_that_the_model_reads_whole(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as server:
        load(server, "Changing")
        trajectory = await run(server, "Changing")
        assert (trajectory.status, trajectory.failure) == (Status.COMPLETED, None)
        assert trajectory.reward == 1.0
        assert trajectory.branches == (Branch(2), Branch(2), Branch(2))
        samples = server.samples()
        assert recorded(trajectory) == samples
        first, second, third = (
            server.engine.tokenizer.decode(prompt) for prompt, _ in samples
        )
        assert '"add", "description"' in first
        assert '"name": "look", "parameters"' in second
        assert '"add", "description"' not in second
        assert '"parameters"' not in third
        # Earlier replies are messages, with their calls.
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        assert f"I call.{call}" in second
        assert f"I call.{call}" in third
        # A run that allows one branch ends there, with what the environment has given.
        cut = await run(server, "Changing", max_branches=2)
        assert (cut.status, cut.num_turns, len(cut.branches)) == (
            Status.TRUNCATED,
            2,
            2,
        )
        room = sum(map(len, samples[0])) + len(samples[1][0])
        cut = await run(server, "Changing", max_total_tokens=room)
        assert (cut.status, cut.num_turns, cut.branches) == (Status.TRUNCATED, 1, ())


async def test_an_engine_that_fails_in_a_later_branch_fails_the_episode_alone(
    tmp_path: Path,
):
    async with serving(tmp_path) as server:

        def script_and_fail(prompt: str) -> str:
            if '"name": "look"' in prompt:
                raise GenerationFailed("no memory")
            return script(prompt)

        server.engine.script = script_and_fail
        load(server, "Changing")
        trajectory = await run(server, "Changing")
        assert trajectory.failure.kind is FailureKind.ENGINE
        assert trajectory.branches == (Branch(2), Branch(2))
        assert trajectory.num_sampled_tokens == len(server.engine.samples[0].tokens)


async def test_results_that_cannot_follow_a_sampled_reply_begin_a_branch(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, template=DEMANDING) as server:
        load(server, "Adding")
        trajectory = await run(server, "Adding")
        assert (trajectory.status, trajectory.failure) == (Status.COMPLETED, None)
        assert trajectory.reward == 1 + 2 + 5
        assert trajectory.branches == (Branch(2), Branch(2), Branch(2))
        assert recorded(trajectory) == server.samples()


def ask_and_answer(prompt: str) -> str:
    """Asks for both temperatures, with a wrong call among them, and names the warmer town."""
    *_, last = prompt.removesuffix("<|im_start|>assistant\n").split("<|im_start|>")
    if last.startswith("tool"):
        return "Rome"
    all_arguments = ({"town": "Rome"}, {"town": "Oslo"}, {"city": 3})
    calls = [
        json.dumps({"name": "temperature", "arguments": call_arguments})
        for call_arguments in all_arguments
    ]
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


async def test_the_tools_of_the_guide_answer_the_model(tmp_path: Path) -> None:
    page = (
        Path(__file__).parents[2] / "docs" / "guides" / "environments.md"
    ).read_text()
    (text,) = re.findall(r"```python\n([^`]*class WarmerTown[^`]*)```", page)
    (tmp_path / "shown.py").write_text(text)
    shown = runpy.run_path(str(tmp_path / "shown.py"))["WarmerTown"]
    async with serving(tmp_path, script=ask_and_answer) as server:
        server.fleet.serve(shown({"Rome": 21.5, "Oslo": 4.0}))
        trajectory = await run(server, "served")
        assert (trajectory.status, trajectory.failure) == (Status.COMPLETED, None)
        assert (trajectory.reward, trajectory.metrics) == (1.0, {"calls": 3.0})
        results = re.findall(
            r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", trajectory.reply_text
        )
        assert results == ["21.5", "4.0", "unknown town"]


async def test_reasoning_comes_apart_from_the_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, reasoning_parser="deepseek_r1") as server:
        load(server, "Thinking")
        trajectory = await run(server, "Thinking")
        assert (trajectory.failure, trajectory.reward) == (None, 1.0)
        assert "<think>" not in trajectory.prompt_text
        # The same server, for an environment that does not want it.
        off = await run(server, "Thinking", values='{"enable_thinking": false}')
        assert off.prompt_text.endswith(
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


async def test_a_reply_to_an_environment_without_tools_keeps_its_whole_text(
    tmp_path: Path,
) -> None:
    config = agent_config(
        make_chat_model(tmp_path, with_weights=False),
        tool_parser="qwen3_coder",
        reasoning_parser="qwen3",
    )
    engine = scripted_engine(config, script)
    inputs = TemplateInputs("", "")
    reader = await agent_services(engine, config.rollout_server).reader(inputs)
    text = "I call. <tool_call>\n<function=add>\n</function>\n</tool_call>"
    tokenizer = engine.llm.renderer.get_tokenizer()
    read = reader.read([], tokenizer.encode(f"<think>Hm.</think>{text}"), inputs)
    assert (read.reasoning, read.content, read.tool_calls) == ("Hm.", text, ())
    # An answer is none of the thoughts that the template has ended, or that nobody has begun.
    for prompt in "<think>\n\n</think>\n\n", "":
        read = reader.read(tokenizer.encode(prompt), tokenizer.encode(text), inputs)
        assert (read.reasoning, read.content) == ("", text)
    read = reader.read(tokenizer.encode("<think>\n"), tokenizer.encode("Hm."), inputs)
    assert (read.reasoning, read.content) == ("Hm.", "")


async def test_tools_without_a_parser_are_refused_when_they_are_first_named(
    tmp_path: Path,
) -> None:
    cause = (
        "tools need rollout_server.tool_parser, the reader of the model's tool calls"
    )
    async with serving(tmp_path, tool_parser=None) as server:
        load(server, "Adding", try_reset=True)
        report = await server.connection.wait_for("environment")
        assert report.failure.message.startswith(cause)
        server.fleet.serve(example_tools.Adding())
        trajectory = await run(server, "served")
        assert trajectory.failure.kind is FailureKind.ENVIRONMENT
        assert trajectory.failure.message.startswith(cause)
        assert trajectory.num_sampled_tokens == 0
