"""Sessions: the commands of one episode to its environment, and the answers.

`CallTable` matches the answers on one stream to its open calls. Most calls get one answer; a call
that follows an agent gets each call of the agent, then its result.
Consumes: commands, answers from the stream. Produces: the answer to each command. Waits for: the
answer. Unblocked by: the answer, the limit of the call, or the end of the stream.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from slipstream.core.errors import EnvironmentFailed, ProtocolError
from slipstream.core.template_values import NEED_PARSER, read_tools
from slipstream.protocol.bounds import check_bounds, largest
from slipstream.rollout_server.chat import ParsedReply
from slipstream.v1 import environment_pb2, trajectory_pb2

Message = TypeVar("Message")
MAX_MESSAGE_CHARACTERS = 500
# The controller blames the server for a trajectory with a larger sum of rewards.
MAX_REWARD = largest(trajectory_pb2.Trajectory, "reward")
# A group that is larger is not judged; a call to a client has room for a little more.
MAX_GROUP_BYTES = 16 << 20
# Messages that may wait for a stream to the controller.
_MAX_OUTGOING = 65_536
# Calls of one agent that may wait to be taken; a worker opens far fewer.
_MAX_WAITING_CALLS = 1024
# The answers to a command, mostly one; a failure is the last of them.
Answers: TypeAlias = "asyncio.Queue[environment_pb2.WorkerMessage | EnvironmentFailed]"


class StreamSession:
    """One episode at its environment, which answers on a stream.

    Numbers in answers are finite: a worker of ours checks what it sends, and the controller what
    comes from clients. `reset`, `step` and `reply_part` raise EnvironmentFailed if the environment
    fails or does not answer in time; `next_call` only raises it if the environment fails.
    """

    def __init__(
        self,
        table: "CallTable",
        episode_key: str,
        timeout_s: float,
        *,
        on_timeout: Callable[[EnvironmentFailed], Awaitable[EnvironmentFailed]] | None = None,
        on_close: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_timeout` gets the error of a call that timed out, and returns the error to raise.

        `on_close` is called with True if the environment answered a step, gave an agent's result or
        failed in an answer; otherwise with False.
        """
        self._table = table
        self._key = episode_key
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._on_close = on_close
        self._was_judged = False
        # The replies on which there was a verdict, as they were sent.
        self.replies: list[environment_pb2.StepCommand] = []
        # The calls and the result of an agent, once they were asked for.
        self._answers: Answers | None = None

    async def reset(self, task_index: int, seed: int) -> environment_pb2.Observation:
        """Starts the task; returns its first messages. An empty list of tools is ""."""
        command = environment_pb2.ResetCommand(
            episode_key=self._key, task_index=task_index, seed=seed
        )
        answer = await self._call(environment_pb2.WorkerCommand(reset=command), "observation")
        answer.observation.tools_json = _offered(answer.observation.tools_json)
        return answer.observation

    async def step(
        self,
        reply: str,
        *,
        truncated: bool,
        parsed: ParsedReply | None = None,
        token_ids: Sequence[int] = (),
    ) -> environment_pb2.Verdict:
        """Returns the verdict on a reply; `truncated` says that the reply ended at a length limit.

        `parsed` is None if no parser has read the reply. `token_ids` are its tokens. An empty list
        of tools is "[]".
        """
        command = environment_pb2.StepCommand(
            episode_key=self._key, reply=reply, truncated=truncated, token_ids=token_ids
        )
        if parsed is not None:
            command.parsed.content = parsed.content
            command.parsed.reasoning = parsed.reasoning
            for call in parsed.tool_calls:
                command.parsed.tool_calls.add(**call._asdict())
        answer = await self._call(environment_pb2.WorkerCommand(step=command), "verdict")
        self._was_judged = True
        self.replies.append(command)
        verdict = answer.verdict
        if verdict.tools_json:
            verdict.tools_json = _offered(verdict.tools_json) or "[]"
        return verdict

    async def judge_group(
        self, episodes: Sequence[environment_pb2.FinishedEpisode]
    ) -> Sequence[environment_pb2.EpisodeVerdict]:
        """Returns the verdict on each of `episodes`; call `reset` with their task first."""
        command = environment_pb2.JudgeGroupCommand(
            episode_key=self._key,
            episodes=[episode.SerializeToString() for episode in episodes],
        )
        size = command.ByteSize()
        try:
            for episode in episodes:
                check_bounds(episode)
            check_bounds(command)
        except ProtocolError as error:
            raise misused(f"judge_group() cannot get its group: {error}") from None
        if size > MAX_GROUP_BYTES:
            # A larger message would end the stream, and with it the calls of all episodes.
            raise misused(
                f"the {len(episodes)} episodes of a group take {size} bytes, and judge_group() "
                f"gets at most {MAX_GROUP_BYTES}: lower group_size or the lengths of replies"
            )
        answer = await self._call(
            environment_pb2.WorkerCommand(judge_group=command), "group_verdict"
        )
        self._was_judged = True
        verdicts = answer.group_verdict.verdicts
        if len(verdicts) != len(episodes):
            raise misused(f"{len(verdicts)} verdicts on a group of {len(episodes)} episodes")
        return verdicts

    async def next_call(self) -> environment_pb2.AgentCall | environment_pb2.AgentResult:
        """Waits without a limit for the next call of an agent or its result, and returns it."""
        if self._answers is None:
            command = environment_pb2.WorkerCommand(follow_agent={"episode_key": self._key})
            self._answers = self._table.follow(command)
        message = await self._answers.get()
        if isinstance(message, EnvironmentFailed):
            raise message
        if message.WhichOneof("message") == "agent_call":
            return message.agent_call
        self._was_judged = True
        return _expected(checked(message), "agent_result").agent_result

    async def reply_part(self, call: int, part: environment_pb2.ReplyPart) -> None:
        """Sends the agent a part of the answer to its call.

        Returns when the agent has taken the part, or at once if it is the last part.
        """
        part.episode_key = self._key
        part.call = call
        message = environment_pb2.WorkerCommand(reply_part=part)
        if part.is_last:
            self._table.notify(message)
        else:
            await self._table.call(message, timeout_s=self._timeout_s)

    @property
    def is_lost(self) -> bool:
        """Whether the worker or client of the episode is gone, and the episode with it."""
        return self._table.failure is not None

    async def examine(self, late: EnvironmentFailed) -> EnvironmentFailed:
        """Returns the error for the timeout `late`, which says where the agent hangs, if known."""
        return late if self._on_timeout is None else await self._on_timeout(late)

    def close(self) -> None:
        """Tells the environment to drop the episode, whether it is over or not; does not wait."""
        command = environment_pb2.CloseCommand(episode_key=self._key)
        self._on_close(self._was_judged)
        try:
            self._table.notify(environment_pb2.WorkerCommand(close=command))
        except EnvironmentFailed:
            # The stream is over and took the episode with it.
            return

    async def _call(
        self, command: environment_pb2.WorkerCommand, expected: str
    ) -> environment_pb2.WorkerMessage:
        try:
            answer = await self._table.call(command, timeout_s=self._timeout_s)
        except EnvironmentFailed as error:
            if error.kind == trajectory_pb2.FAILURE_KIND_BYSTANDER:
                raise
            if error.kind != trajectory_pb2.FAILURE_KIND_TIMEOUT:
                self._was_judged = True
                raise
            raise await self.examine(error) from None
        return _expected(answer, expected)


def _expected(
    answer: environment_pb2.WorkerMessage, expected: str
) -> environment_pb2.WorkerMessage:
    got = answer.WhichOneof("message")
    if got != expected:
        raise EnvironmentFailed(
            trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE,
            f"the worker answered {got} where {expected} was due",
        )
    return answer


def whole_reward(judged: environment_pb2.Verdict | environment_pb2.ReplyReward) -> float:
    """Returns the reward of a reply with those of its tokens."""
    return sum(judged.token_rewards, judged.reward)


def check_sum(total: float) -> None:
    """Raises EnvironmentFailed if the rewards of an episode add up to what is out of bounds."""
    if not abs(total) <= MAX_REWARD:
        what = f"the rewards of an episode add up to {total:g}"
        raise misused(f"{what}, which must be between -{MAX_REWARD:g} and {MAX_REWARD:g}")


def check_tools(tools: str, *, takes_tools: bool) -> None:
    """Raises EnvironmentFailed if there are tools but the run has no parser for their calls."""
    if tools and not takes_tools:
        raise misused(NEED_PARSER)


def _offered(tools: str) -> str:
    """Returns the tools in a message, "" if there are none; raises EnvironmentFailed if invalid."""
    try:
        return tools if tools and read_tools(tools) else ""
    except ValueError as error:
        raise misused(str(error)) from None


class OutgoingMessages(asyncio.Queue[Message | None]):
    """A queue of messages to the controller; None ends the stream after the messages before it."""

    def __init__(self) -> None:
        super().__init__(_MAX_OUTGOING)

    async def messages(self) -> AsyncIterator[Message]:
        """Yields the messages in order, until None."""
        while (message := await self.get()) is not None:
            yield message

    def end(self) -> None:
        """Ends `messages`, for which gRPC would wait for ever behind a stream that is over."""
        with contextlib.suppress(asyncio.QueueFull):
            self.put_nowait(None)


class CallTable:
    """The open calls of one stream, until `end`; afterwards every call fails."""

    def __init__(
        self,
        send: Callable[[environment_pb2.WorkerCommand], None],
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`send` puts a command on the stream without waiting; `numbers` yields the ids of calls.

        Several tables that use one stream share `numbers`.
        """
        self._send = send
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._open: dict[int, Answers] = {}
        # The episode of each open call, "" for none.
        self._keys: dict[int, str] = {}
        # Why the stream has ended; None while it is open.
        self.failure: EnvironmentFailed | None = None

    async def call(
        self, command: environment_pb2.WorkerCommand, *, timeout_s: float
    ) -> environment_pb2.WorkerMessage:
        """Sends `command`, and returns its answer.

        Raises EnvironmentFailed if no answer comes within `timeout_s`, the answer reports a
        failure, or the stream has ended.
        """
        answers = self.follow(command)
        try:
            async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
                return checked(await answers.get())
        except TimeoutError:
            what = command.WhichOneof("command")
            is_ruled = what in ("reset", "step", "judge_group")
            rule = ", the environment's timeout_s" if is_ruled else ""
            raise EnvironmentFailed(
                trajectory_pb2.FAILURE_KIND_TIMEOUT,
                f"no answer to {what} within {timeout_s:g} s{rule}",
            ) from None
        finally:
            self._forget(command.call_id)

    def follow(self, command: environment_pb2.WorkerCommand) -> Answers:
        """Sends a command; returns the queue of its answer, or of an agent's calls and its result.

        The queue has 1024 places. A call that would take the last place is replaced by a failure,
        and later calls are dropped.
        """
        answers: Answers = asyncio.Queue(_MAX_WAITING_CALLS)
        call_id = self.notify(command)
        self._open[call_id] = answers
        self._keys[call_id] = _episode_key(command)
        return answers

    def notify(self, command: environment_pb2.WorkerCommand) -> int:
        """Sends `command` without waiting for its answer; returns the id of the call.

        Raises EnvironmentFailed if the stream has ended.
        """
        if self.failure is not None:
            raise EnvironmentFailed(self.failure.kind, str(self.failure))
        command.call_id = next(self._numbers)
        self._send(command)
        return command.call_id

    def answered(self, message: environment_pb2.WorkerMessage) -> None:
        """Passes an answer from the stream to its caller, or drops it if no caller waits."""
        if (answers := self._open.get(message.call_id)) is not None:
            if not message.HasField("agent_call"):
                self._forget(message.call_id)
            _put(answers, message)

    def fail_beside(self, episode_key: str, failure: EnvironmentFailed) -> None:
        """Fails the open calls of all other episodes; the stream stays, and later calls pass."""
        others = [call for call, key in self._keys.items() if key and key != episode_key]
        for call_id in others:
            _put(self._open[call_id], EnvironmentFailed(failure.kind, str(failure)))
            self._forget(call_id)

    def _forget(self, call_id: int) -> None:
        self._open.pop(call_id, None)
        self._keys.pop(call_id, None)

    def end(self, kind: trajectory_pb2.FailureKind, message: str) -> None:
        """Fails every open and every later call, because the stream has ended."""
        if self.failure is not None:
            return
        self.failure = EnvironmentFailed(kind, message)
        for answers in self._open.values():
            _put(answers, EnvironmentFailed(kind, message))


def _episode_key(command: environment_pb2.WorkerCommand) -> str:
    """Returns the episode that a command is of; "" for a ping, which looks at the worker."""
    name = command.WhichOneof("command")
    if name is None or name == "ping":
        return ""
    return getattr(getattr(command, name), "episode_key", "")


def checked(
    message: environment_pb2.WorkerMessage | EnvironmentFailed,
) -> environment_pb2.WorkerMessage:
    """Returns `message`; raises EnvironmentFailed if it is one or reports a failure."""
    if isinstance(message, EnvironmentFailed):
        raise message
    if message.WhichOneof("message") == "failure":
        failure = message.failure
        # Without a kind, or with one that only a newer peer knows, the environment is at fault.
        is_known = failure.kind and failure.kind in trajectory_pb2.FailureKind.values()
        kind = failure.kind if is_known else trajectory_pb2.FAILURE_KIND_ENVIRONMENT
        raise EnvironmentFailed(kind, failure.message[:MAX_MESSAGE_CHARACTERS])
    return message


def misused(cause: str) -> EnvironmentFailed:
    """Returns an EnvironmentFailed of kind ENVIRONMENT: the environment is at fault."""
    return EnvironmentFailed(
        trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause[:MAX_MESSAGE_CHARACTERS]
    )


def _put(answers: Answers, answer: environment_pb2.WorkerMessage | EnvironmentFailed) -> None:
    """Queues `answer`, or drops it if the queue is full; the last place gets a failure instead."""
    if answers.full():
        return
    if answers.qsize() == answers.maxsize - 1 and not isinstance(answer, EnvironmentFailed):
        answer = misused(f"{answers.maxsize} calls of an agent wait, it makes too many")
    answers.put_nowait(answer)
