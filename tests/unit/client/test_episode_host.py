import asyncio
import dataclasses
import re
import sys

import numpy as np
import pytest
from slipstream.client import Environment, Message, ResetResult, StepResult
from slipstream.client.episode_host import EpisodeHost, answer_commands
from slipstream.core.template_values import read_tools
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import trajectory_pb2
from support.fakes.fake_workers import Calculator, Good, Misbehaving, Plain
from support.rigs.waiting import LIMIT_S

QUESTIONS = "slipstream.environments.questions:Questions"
FAKE = "support.fakes.fake_workers"
ENVIRONMENT = trajectory_pb2.FAILURE_KIND_ENVIRONMENT
INFRASTRUCTURE = trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE


class One(Environment):
    """An environment of one task."""

    def tasks(self):
        return [0]

    def reset(self, task):
        return [Message("user", "x")]


async def asked(host: EpisodeHost, **command: object) -> pb.WorkerMessage:
    return await host.answer(pb.WorkerCommand(call_id=1, **command))


async def reset(host, key="a", task_index=0, seed=0):
    return await asked(
        host, reset={"episode_key": key, "task_index": task_index, "seed": seed}
    )


async def step(host, reply, key="a", **more):
    return await asked(host, step={"episode_key": key, "reply": reply, **more})


async def close(host: EpisodeHost, key: str = "a") -> pb.WorkerMessage:
    return await asked(host, close={"episode_key": key})


async def test_an_episode_of_two_turns_is_answered() -> None:
    host = EpisodeHost(Good())
    answer = await reset(host, task_index=4, seed=9)
    assert answer.call_id == 1
    assert [(m.role, m.content) for m in answer.observation.messages] == [
        ("user", "two 9")
    ]
    answer = await step(host, "hello")
    assert (answer.verdict.reward, answer.verdict.done) == (0.25, False)
    assert answer.verdict.messages[0].content == "hello"
    answer = await step(host, "bye", truncated=True)
    assert (answer.verdict.reward, answer.verdict.done) == (0.5, True)
    assert dict(answer.verdict.metrics) == {"turns": 2.0, "truncated": 1.0}
    assert (await close(host)).WhichOneof("message") == "pong"


async def test_a_reward_of_each_token_is_of_the_tokens_that_the_reply_has() -> None:
    class ByToken(One):
        def step(self, reply):
            return StepResult(
                0.5, token_rewards=[token / 4 for token in reply.token_ids]
            )

    host = EpisodeHost(ByToken())
    await reset(host)
    verdict = (await step(host, "b c", token_ids=[1, 2])).verdict
    assert (verdict.reward, list(verdict.token_rewards)) == (0.5, [0.25, 0.5])


async def test_messages_that_end_with_a_reply_are_refused_unless_a_reply_is_given() -> (
    None
):
    reply = {"role": "assistant", "content": "<think>so"}
    talk = [{"role": "user", "content": "x"}, reply]

    class Ends(One):
        def reset(self, task):
            return talk

        def step(self, reply):
            return StepResult(0.0, done=False, messages=talk)

    class Gives(One):
        def reset(self, task):
            return ResetResult(talk, reply="given")

    rule = "ends with a reply, of role 'assistant': the model is to give it"
    failure = (await reset(EpisodeHost(Ends()))).failure
    assert failure.message.startswith(f"reset() {rule}")
    host = EpisodeHost(Ends())
    Ends.reset = One.reset
    await reset(host)
    assert (await step(host, "x")).failure.message.startswith(f"step() {rule}")
    answer = await reset(EpisodeHost(Gives()))
    assert answer.observation.given_reply == "given"


async def test_plain_methods_and_message_values_do_as_well() -> None:
    host = EpisodeHost(Plain())
    assert host.num_tasks == 0
    answer = await reset(host, task_index=5)
    assert [m.content for m in answer.observation.messages] == ["be brief", "15"]
    assert (await step(host, "x")).verdict.reward == 1.0


async def test_episodes_do_not_see_each_other() -> None:
    host = EpisodeHost(Good())
    for key in "ab":
        await reset(host, key)
    assert not (await step(host, "x", "a")).verdict.done
    assert not (await step(host, "x", "b")).verdict.done
    assert (await step(host, "x", "a")).verdict.done


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ("raise", "ValueError: first line (fake_workers.py:"),
        (
            "no text",
            "Mute: its text cannot be made: ZeroDivisionError (fake_workers.py:",
        ),
        ("file", "OSError: no file a\\udcff (fake_workers.py:"),
        ("several", "ValueError: first (fake_workers.py:"),
        ("end", "StopIteration (fake_workers.py:"),
        ("panic", "Panic: index out of range (fake_workers.py:"),
        ("exit", "SystemExit: 3 (fake_workers.py:"),
        ("interrupt", "KeyboardInterrupt (fake_workers.py:"),
        (
            "cancel",
            "its own code has cancelled the call: CancelledError (fake_workers.py:",
        ),
        ("nothing", "step() must return a StepResult, got None"),
        ("no messages", "step() must give messages when the episode is not done"),
        ("forgot done", "step() gives messages that nobody will read: done is True"),
        ("not done", "done must be True or False, got [{'role'"),
        ("nan", "the reward must be a finite number, got nan"),
        ("inf", "the reward must be a finite number, got inf"),
        ("none", "the reward must be a finite number, got None"),
        ("text", "the reward must be a finite number, got '1'"),
        ("huge", "the reward must be a finite number, got 1000000"),
        ("long", "the reward must be a finite number, got 'xxxxxx"),
        ("metric", "the metric 'size' must be a finite number, got inf"),
        ("metrics", "metrics must map names to numbers, got [('size', 1)]"),
        ("no name", "metrics must have names that differ, got {'': 1.0}"),
        ("limit", "max_reply_tokens must be set in reset(), not in step()"),
        ("two names", "metrics must have names that differ, got {1: 1.0, '1': 2.0}"),
        ("half a name", "texts must be without surrogates, got 'a\\ud800b'"),
        ("several ends", "done must be True or False, got array([ True, False])"),
        (
            "picture",
            "a message of step(): a message has no field 'picture'; it has role, content",
        ),
        (
            "call of a user",
            "a message of step(): tool_call_id stands in a message of role tool",
        ),
        (
            "number of a call",
            "a message of step(): the tool_call_id of a message must be a text",
        ),
        (
            "tools of a last step",
            "step() names tools that nobody will call: done is True",
        ),
        (
            "tools without a type",
            "tools[0] must be an object with type \"function\", got {'name'",
        ),
    ],
)
async def test_what_goes_wrong_in_a_step_is_a_failure_of_the_environment(reply, cause):
    host = EpisodeHost(Misbehaving())
    await reset(host)
    failure = (await step(host, reply)).failure
    assert failure.kind == ENVIRONMENT
    assert failure.message.startswith(cause)
    assert "\n" not in failure.message
    assert len(failure.message) < 150
    assert (await step(host, "fine")).verdict.reward == 1.0


async def test_an_iterator_that_ends_in_a_plain_step_is_told_with_its_place() -> None:
    class Ends(Plain):
        def step(self, reply: str) -> StepResult:
            return next(iter(()))

    host = EpisodeHost(Ends())
    await reset(host)
    place = f"test_episode_host.py:{Ends.step.__code__.co_firstlineno + 1} in step"
    assert (await step(host, "x")).failure.message == f"StopIteration ({place})"


async def test_the_place_stands_behind_a_long_text_and_the_number_of_errors_behind_a_group() -> (
    None
):
    host = EpisodeHost(Misbehaving())
    await reset(host)
    place = r" \(fake_workers.py:\d+ in (step|fail)\)"
    assert re.fullmatch(
        "ValueError: x{350}" + place, (await step(host, "much")).failure.message
    )
    message = (await step(host, "several")).failure.message
    assert re.fullmatch("ValueError: first" + place + " and 1 more", message)


@pytest.mark.parametrize(
    ("task_index", "cause"),
    [
        (1, "KeyError: 'reset' (fake_workers.py:"),
        (2, "reset() must give a list of messages, got []"),
        (3, "a message of reset(): content must be a text or a list of parts, got 3"),
        (4, "reset() must give a list of messages, got 'hello'"),
        (5, "a message of reset(): texts must be without surrogates, got '"),
    ],
)
async def test_what_goes_wrong_in_a_reset_is_a_failure_and_leaves_no_episode(
    task_index, cause
):
    host = EpisodeHost(Misbehaving())
    failure = (await reset(host, task_index=task_index)).failure
    assert failure.kind == ENVIRONMENT
    assert failure.message.startswith(cause)
    assert (await step(host, "fine")).failure.kind == INFRASTRUCTURE


async def test_tools_travel_and_step_gets_what_the_parsers_read() -> None:
    host = EpisodeHost(Calculator())
    opened = (await reset(host)).observation
    assert [tool["function"]["name"] for tool in read_tools(opened.tools_json)] == [
        "add"
    ]
    calls = [
        pb.ToolCall(id="a", name="add", arguments='{"a": 1}'),
        pb.ToolCall(id="b", name="add", arguments="[1]"),
        pb.ToolCall(id="c", name="add", arguments="1 +"),
    ]
    parsed = pb.ParsedReply(content="I add.", reasoning="Hm.", tool_calls=calls)
    answer = await step(host, "whole text", parsed=parsed)
    assert [(m.role, m.content, m.tool_call_id) for m in answer.verdict.messages] == [
        ("user", "whole text|I add.|Hm.", ""),
        ("tool", "{'a': 1}", "a"),
        ("tool", "'[1]'", "b"),
        ("tool", "'1 +'", "c"),
    ]
    assert answer.verdict.tools_json == ""
    # No parser has read this one; the environment takes its tools back.
    verdict = (await step(host, "plain")).verdict
    assert [message.content for message in verdict.messages] == ["plain|plain|"]
    assert verdict.tools_json == "[]"


async def test_an_episode_whose_reset_failed_is_closed_too() -> None:
    closed = []

    class Tidy(Misbehaving):
        async def close(self) -> None:
            closed.append(self.seed)

    host = EpisodeHost(Tidy())
    assert (await reset(host, task_index=1, seed=3)).HasField("failure")
    assert closed == []
    await close(host)
    await close(host)
    assert closed == [3]


async def test_an_environment_that_cannot_be_copied_fails_its_episodes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen(Plain):
        size: int = 3

    failure = (await reset(EpisodeHost(Frozen()))).failure
    assert failure.kind == ENVIRONMENT
    assert failure.message.startswith(
        "it cannot be copied for an episode: FrozenInstanceError: cannot assign to field 'seed'"
    )


async def test_numbers_of_other_libraries_are_rewards() -> None:
    class Numbers(Plain):
        def step(self, reply: str) -> StepResult:
            return StepResult({"bool": np.bool_(True), "float": np.float32(0.5)}[reply])

    host = EpisodeHost(Numbers())
    await reset(host)
    assert (await step(host, "bool")).verdict.reward == 1.0
    assert (await step(host, "float")).verdict.reward == 0.5


async def test_closing_an_episode_cancels_what_runs_and_calls_close() -> None:
    closed = []

    class Slow(Misbehaving):
        async def close(self) -> None:
            closed.append(self.seed)

    host = EpisodeHost(Slow())
    await reset(host, seed=3)
    hanging = asyncio.ensure_future(step(host, "hang"))
    await asyncio.sleep(0)
    assert (await close(host)).WhichOneof("message") == "pong"
    assert (await hanging).failure.message == "the episode was closed"
    assert closed == [3]


@pytest.mark.parametrize("waits", [False, True])
async def test_an_environment_that_cancels_its_own_task_fails_one_call(
    waits: bool,
) -> None:
    class Cancelling(Plain):
        async def step(self, reply: str) -> StepResult:
            if reply:
                asyncio.current_task().cancel()
                await asyncio.sleep(0 if waits else -1)
            return StepResult(1.0)

    host = EpisodeHost(Cancelling())
    await reset(host)
    failure = (await step(host, "x")).failure
    assert failure.kind == ENVIRONMENT
    assert failure.message.startswith(
        "its own code has cancelled the call: CancelledError (test_e"
    )
    assert (await step(host, "")).verdict.reward == 1.0


async def test_who_is_cancelled_while_its_episode_is_closed_is_cancelled() -> None:
    has_begun = asyncio.Event()

    class Waiting(Plain):
        async def step(self, reply: str) -> StepResult:
            has_begun.set()
            await asyncio.Event().wait()
            return StepResult(1.0)

    host = EpisodeHost(Waiting())
    await reset(host)
    asking = asyncio.ensure_future(step(host, "x"))
    await has_begun.wait()
    closing = asyncio.ensure_future(close(host))
    # The host has cancelled the call, whose end is not known yet.
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await closing


@pytest.mark.parametrize("name", ["a", "a" * 26])
async def test_a_cause_is_the_same_for_each_object_that_it_shows(name: str) -> None:
    class Showing(Plain):
        def step(self, reply: str) -> object:
            return type(name, (), {"__module__": "m", "__slots__": ()})()

    host = EpisodeHost(Showing())
    await reset(host)
    causes = {(await step(host, "x")).failure.message for _ in range(9)}
    assert len(causes) == 1
    assert causes.pop().startswith(
        f"step() must return a StepResult, got <m.{name} object"
    )


async def test_calls_that_no_server_should_make_are_refused() -> None:
    host = EpisodeHost()
    assert (await reset(host)).failure.message == "no environment is loaded"
    host = EpisodeHost(Misbehaving())
    assert (await step(host, "x")).failure.message == "episode a is not open"
    await reset(host)
    assert (await reset(host)).failure.message == "episode a is open already"
    hanging = asyncio.ensure_future(step(host, "hang"))
    await asyncio.sleep(0)
    answer = await step(host, "x")
    assert answer.failure.message == "episode a has not answered its last call"
    assert answer.failure.kind == INFRASTRUCTURE
    await host.close_all()
    assert (await hanging).failure.message == "the episode was closed"


async def test_a_loaded_environment_answers() -> None:
    host = EpisodeHost()
    spec = {
        "reference": "slipstream.environments.echo:Echo",
        "args_json": '{"num_symbols": 3}',
    }
    answer = await asked(host, load={"spec": spec})
    assert answer.loaded.num_tasks == 5
    prompt = (await reset(host)).observation.messages[0].content
    assert (await step(host, f"{prompt} {prompt}")).verdict.reward == 1.0


@pytest.mark.parametrize(
    ("reference", "args", "cause"),
    [
        ("fake_workers", "", "a reference is package.module:Class, got 'fake_workers'"),
        ("no_such.module:X", "", "there is no module 'no_such' in Python's path"),
        (
            "no_such.py:X",
            "",
            "there is no module 'no_such' in Python's path; without .py: no_such",
        ),
        (f"{FAKE}:Missing", "", f"module {FAKE} has no class Missing"),
        (f"{FAKE}:NoEnvironment", "", f"{FAKE}:NoEnvironment is no subclass of"),
        (
            f"{FAKE}:Good",
            '{"sides": 3}',
            "Good(...): got an unexpected keyword argument 'sides'; it takes words",
        ),
        (f"{FAKE}:Good", "[3]", "the arguments must be a JSON object, got [3]"),
        (f"{FAKE}:Good", "{", "the arguments are not JSON: "),
        (f"{FAKE}:Empty", "", "ValueError: Empty.tasks() gives no task"),
        (
            QUESTIONS,
            '{"path": "none.jsonl", "judge": "exact"}',
            "none.jsonl does not exist; the w",
        ),
    ],
)
async def test_what_cannot_be_loaded_is_a_failure_with_the_cause(
    reference, args, cause
):
    spec = {"reference": reference, "args_json": args}
    answer = await asked(EpisodeHost(), load={"spec": spec})
    assert answer.failure.kind == ENVIRONMENT
    assert answer.failure.message.startswith(cause)


async def test_a_search_path_that_is_no_folder_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder, place in (
        (tmp_path / "none", ", which is no folder here,"),
        (tmp_path, ""),
    ):
        spec = {"reference": "no_such:X", "search_path": str(folder)}
        answer = await asked(EpisodeHost(), load={"spec": spec})
        cause = f"there is no module 'no_such' in {folder}{place} or Python's path"
        assert answer.failure.message == cause


async def test_commands_are_answered_side_by_side_and_given_up_at_the_end() -> None:
    closed = asyncio.Event()
    answers: list[int] = []
    answered = asyncio.Event()

    class Waiting(Environment[int]):
        def tasks(self) -> range:
            return range(2)

        async def reset(self, task: int) -> list[Message]:
            if task == 0:
                await asyncio.Event().wait()
            return [Message("user", "hi")]

        def close(self) -> None:
            closed.set()

    async def commands() -> object:
        for index in range(2):
            command = pb.ResetCommand(episode_key=str(index), task_index=index)
            yield pb.WorkerCommand(call_id=index, reset=command)
        await answered.wait()

    async def send(message: pb.WorkerMessage) -> None:
        answers.append(message.call_id)
        answered.set()

    await asyncio.wait_for(
        answer_commands(EpisodeHost(Waiting()), commands(), send), LIMIT_S
    )
    assert answers == [1]
    assert closed.is_set()


async def test_an_environment_may_shorten_the_replies_of_an_episode():
    class Short(One):
        def tasks(self):
            return [3, np.int64(4), 0, True, 2**40]

        def reset(self, task):
            self.max_reply_tokens = task
            return super().reset(task)

    host = EpisodeHost(Short())
    assert (await reset(host)).observation.max_reply_tokens == 3
    assert (await reset(host, "b", task_index=1)).observation.max_reply_tokens == 4
    rules = (
        "at least 1, got 0",
        "a whole number, got True",
        "at most 2147483647, got 1099511627776",
    )
    for place, rule in enumerate(rules, start=2):
        message = (await reset(host, f"c{place}", task_index=place)).failure.message
        assert message == f"max_reply_tokens must be {rule}"


@pytest.mark.parametrize(
    ("answer", "told"),
    [("42", "42"), ("é" * 3000, "é" * 2048), ("\ud800x", "?x"), (42, None)],
)
async def test_the_expected_answer_goes_with_the_observation(answer, told):
    class Asking(One):
        expected_answer = answer

    answered = await reset(EpisodeHost(Asking()))
    if told is not None:
        assert answered.observation.expected_answer == told
    else:
        assert "expected_answer must be a text, got 42" in answered.failure.message


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("right_reply", ["a"], "right_reply must be a text, got ['a']"),
        ("wrong_reply", 3, "wrong_reply must be a text, got 3"),
        ("wrong_reply", ["a", 3], "wrong_reply must be a text, got 3"),
    ],
)
async def test_replies_that_a_check_plays_are_texts(name, value, told):
    asking = type("Asking", (One,), {name: value})
    assert told in (await reset(EpisodeHost(asking()))).failure.message


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (
            StepResult(1e7),
            "Verdict.reward must be between -1e+06 and 1e+06, got 10000000.0",
        ),
        (
            StepResult(token_rewards=[0.0, float("nan")]),
            "number 2 of token_rewards must be a finite number, got nan",
        ),
        (
            StepResult(token_rewards="good"),  # type: ignore[arg-type]
            "token_rewards must be a list of numbers, got 'good'",
        ),
        (
            StepResult(1.0, reply="no"),
            "step() gives a reply that nobody will read: done is True",
        ),
        (
            StepResult(done=False, messages=[Message("user", "x")], reply=""),
            "the reply of step() must be None or a text that is not empty, got ''",
        ),
        (
            StepResult(done=False, messages=[{"role": "", "content": "x"}]),
            "a message of step(): the role of a message must be a text, got ''",
        ),
        (
            StepResult(0.5, metrics={"a\nb": 1.0}),
            "Verdict.metrics['a\\nb'] must hold one line without control characters, got 'a\\nb'",
        ),
    ],
)
async def test_what_could_not_be_trained_is_a_failure_of_the_environment(result, cause):
    class Large(Plain):
        def step(self, reply: str) -> StepResult:
            return result

    host = EpisodeHost(Large())
    await reset(host)
    failure = (await step(host, "x")).failure
    assert (failure.kind, failure.message) == (ENVIRONMENT, cause)
