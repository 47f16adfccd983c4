"""The classes from which users derive an environment, which gives tasks and judges replies.

An agent is an environment that calls the model itself.
"""

import inspect
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import (
    Any,
    Generic,
    Protocol,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

from slipstream.client import relay_inside
from slipstream.core.models.thoughts import split_thoughts

Task = TypeVar("Task")
TaskItem = TypeVar("TaskItem", covariant=True)
Part = TypeVar("Part")

# Tasks of an iterator that are kept; when an older one is asked for, the iterator starts again.
MAX_CACHED_TASKS = 4096
BRANCH_NAME = re.compile(r"[A-Za-z0-9._:+-]{1,64}")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a reply; `arguments` is a dict, or raw text that is no JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str

    @property
    def text(self) -> str:
        arguments = self.arguments
        return arguments if isinstance(arguments, str) else json.dumps(dict(arguments))


@dataclass(frozen=True)
class Message:
    """One chat message; a dict `{"role": ..., "content": ...}` works as well.

    The result of a tool has the role "tool" and, as `tool_call_id`, the id of the call that it
    answers. `content` is a text, or a list of parts with images: see docs/guides/environments.md.
    Earlier replies, of the role "assistant", may have `tool_calls` and `reasoning`.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]]
    tool_call_id: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def text(self) -> str:
        """Text of the content; the texts of several parts are joined, and images are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part["text"] for part in self.content if part.get("type") == "text")

    def fields(self) -> dict[str, Any]:
        """Returns the message as OpenAI's API takes it, without fields that are empty."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in self.tool_calls
        ]
        values = {"tool_call_id": self.tool_call_id, "name": self.name, "tool_calls": calls}
        values |= {"reasoning_content": self.reasoning}
        present = {name: value for name, value in values.items() if value}
        return {"role": self.role, "content": self.content, **present}


Messages: TypeAlias = Sequence[Message | Mapping[str, Any]]
# OpenAI's function schemas: {"type": "function", "function": {"name": ..., "parameters": ...}}.
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class Reply(str):
    """The whole text of a reply, with the parts that the run's parsers found in it.

    `content` is the text without reasoning and tool calls: what a person calls the answer. Without
    a parser it is what stands behind the marks of thoughts that families of models write.
    `token_ids` are the tokens that were sampled, one for each of `StepResult.token_rewards`.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]

    def __new__(
        cls,
        text: str,
        *,
        content: str | None = None,
        reasoning: str = "",
        tool_calls: Sequence[ToolCall] = (),
        token_ids: Sequence[int] = (),
    ) -> Self:
        """Makes a reply of `text`, whose thoughts are told apart here if `content` is None."""
        for name, value in {"text": text, "content": content or "", "reasoning": reasoning}.items():
            # Python would write None as a text.
            if not isinstance(value, str):
                raise TypeError(f"{name} of a reply must be a text, got {value!r:.60}")
        reply = super().__new__(cls, text)
        if content is None:
            reasoning, content = split_thoughts(text)
        reply.content = content
        reply.reasoning = reasoning
        reply.tool_calls = _several("tool_calls", tool_calls, ToolCall)
        reply.token_ids = _several("token_ids", token_ids, SupportsIndex)
        return reply


def _several(name: str, values: Iterable[Part], kind: type) -> tuple[Part, ...]:
    parts = tuple(values) if isinstance(values, Iterable) else None
    if parts is None or not all(isinstance(part, kind) for part in parts):
        what = "calls" if kind is ToolCall else "whole numbers"
        raise TypeError(f"{name} of a reply must be a list of {what}, got {values!r:.60}")
    return parts


def answer_of(reply: str) -> str:
    """Returns what a person calls the answer: the content of a reply, without thoughts.

    It is "" where thoughts never end. All built-in judges read this text.
    """
    return (reply if isinstance(reply, Reply) else Reply(reply)).content


@dataclass(frozen=True)
class ResetResult:
    """The beginning of an episode: the first messages to the model, and the tools it may call.

    `reply`, if given, takes the place of the model's first reply. The model is trained on this
    demonstration as if it had sampled it. `teacher_messages`, if given, are what the reference
    model reads in place of `messages`, before the same replies: with a solution, say.
    """

    messages: Messages
    tools: Tools = ()
    reply: str | None = None
    teacher_messages: Messages = ()


Opening: TypeAlias = Messages | ResetResult


@dataclass(frozen=True)
class StepResult:
    """The verdict on one reply.

    `reward` is a finite number; the rewards of all steps of an episode add up. `messages` are what
    the model reads next: required when the episode continues (`done=False`), refused otherwise.
    After the last given reply they say what follows it, which a chat template may want to know.
    `metrics` are averaged over episodes and reported. `tools`, if given, replace the episode's
    tools from the next reply on. `reply`, if given, takes the place of the model's next reply, as
    in ResetResult. `token_rewards`, if given, has a number for each token of the reply that is
    judged, in addition to `reward`. `teacher_messages`, if given, take the place of those that the
    reference model read so far, as in ResetResult: with what came of the replies, say.
    """

    reward: float = 0.0
    done: bool = True
    messages: Messages = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    tools: Tools | None = None
    reply: str | None = None
    token_rewards: Sequence[float] = ()
    teacher_messages: Messages = ()


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode of a group whose members have all ended, as `judge_group` gets it.

    `replies` are those of the episode in order, as `step` got them; those of an agent are of all
    its conversations. `reward` and `metrics` are what the episode earned by itself. `truncated`
    says that a limit ended it. `member` is its number in the group, from 0.
    """

    task: Any
    replies: tuple[Reply, ...]
    reward: float
    metrics: Mapping[str, float]
    truncated: bool
    member: int

    @property
    def reply(self) -> Reply:
        """The last reply."""
        return self.replies[-1]


@dataclass(frozen=True)
class GroupReward:
    """What `judge_group` gives one episode; `metrics` are as in StepResult."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class TaskSequence(Protocol[TaskItem]):
    """Anything with a length and items by index: a list, a range, a dataset."""

    def __len__(self) -> int:
        """Returns the number of tasks."""

    def __getitem__(self, index: int, /) -> TaskItem:
        """Returns task number `index`."""


class Environment(Generic[Task]):
    """Base class of all environments.

    One instance is loaded in each worker process. Every episode runs on a shallow copy of it
    (`copy.copy`), so an attribute set in `reset` or `step` belongs to the episode. Objects that
    `__init__` made are shared by all episodes: do not change them.

    Methods may be plain or `async`. All episodes of a worker share one thread: an `async` method
    that waits lets the others go on, a plain one does not.
    """

    # The seed of the episode; set before `reset`.
    seed: int = 0
    # Whether the reply ended at a length limit; set before each `step`.
    truncated: bool = False
    # Limit of tokens in each reply of the episode, if it is below the run's. Set it in `reset`.
    max_reply_tokens: int | None = None
    # The right answer as text, for people who read the reply; without it they see `right_reply`.
    # Set it in `reset` if there is one.
    expected_answer: str = ""
    # A reply that earns the most. `slipstream check` plays it, and without it the answer in usual
    # forms. Set it in `reset`, or in `step` for a next turn.
    right_reply: str = ""
    # A reply that is wrong, in a right form, or several, for `slipstream check`: else another
    # task's answer.
    wrong_reply: str | Sequence[str] = ""

    def tasks(self) -> TaskSequence[Task] | Iterable[Task]:
        """Returns a sequence, or an iterator that gives the same tasks at every call.

        If the tasks are random, draw them with a fixed seed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define tasks()")

    def reset(self, task: Task) -> Opening | Awaitable[Opening]:
        """Begins an episode; returns the first messages, or a ResetResult that also has tools."""
        raise NotImplementedError(f"{type(self).__name__} must define reset()")

    def step(self, reply: Reply) -> StepResult | Awaitable[StepResult]:
        """Judges a reply of the model; returns its reward and whether the episode has ended."""
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def judge_group(
        self, episodes: Sequence[FinishedEpisode]
    ) -> Sequence[float | GroupReward] | Awaitable[Sequence[float | GroupReward]]:
        """Compares the episodes of a group; returns what each of them earns in addition.

        An environment that defines it is asked once all members have ended, on a copy for which
        `reset` was called with their task, or that of an agent. Members whose last attempt failed
        are left out; an evaluation asks for one episode at a time. If it fails, all of them fail.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define judge_group()")

    @property
    def judges_group(self) -> bool:
        """Whether the environment compares the episodes of a group."""
        return type(self).judge_group is not Environment.judge_group

    def close(self) -> Awaitable[None] | None:
        """Ends an episode, finished or not; frees what `reset` acquired."""


# An environment with tasks of any type: only the environment itself looks into them.
AnyEnvironment: TypeAlias = Environment[Any]


class TaskSource(Generic[Task]):
    """Gives an environment's tasks by number, even if `tasks()` returns an iterator."""

    def __init__(self, environment: Environment[Task]) -> None:
        """Calls `tasks()`; raises ValueError if the result is empty or cannot be iterated."""
        self.environment = environment
        self._cache: OrderedDict[int, Task] = OrderedDict()
        self._next_index = 0
        self._end: int | None = None
        tasks = environment.tasks()
        self._sequence: TaskSequence[Task] | None = None
        if isinstance(tasks, TaskSequence) and not isinstance(tasks, Mapping | str | bytes):
            self._sequence = tasks
            self.num_tasks = len(tasks)
            empty = self.num_tasks == 0
        else:
            self._iterator: Iterator[Task] = _iterate(tasks)
            # The end of an iterator is not known before it is reached.
            self.num_tasks = 0
            empty = not self._advance()
        if empty:
            raise ValueError(f"{type(environment).__name__}.tasks() gives no task")

    @property
    def is_listed(self) -> bool:
        return isinstance(self._sequence, list | tuple)

    def __getitem__(self, index: int) -> Task:
        """Returns task number `index`; the numbers wrap around after the last task."""
        if self._sequence is not None:
            return self._sequence[index % self.num_tasks]
        if self._end is not None:
            if not self._end:
                name = type(self.environment).__name__
                raise ValueError(f"{name}.tasks() must give its tasks at each call, got none")
            index %= self._end
        if index not in self._cache and index < self._next_index:
            self._iterator = _iterate(self.environment.tasks())
            self._cache.clear()
            self._next_index = 0
        while index not in self._cache:
            if not self._advance():
                return self[index]
        return self._cache[index]

    def _advance(self) -> bool:
        try:
            task = next(self._iterator)
        except StopIteration:
            self._end = self._next_index
            return False
        except BaseException:
            # A generator that has raised would seem to end here: it starts again.
            self._next_index = sys.maxsize
            raise
        self._cache[self._next_index] = task
        self._next_index += 1
        if len(self._cache) > MAX_CACHED_TASKS:
            self._cache.popitem(last=False)
        return True


def _iterate(tasks: object) -> Iterator[Task]:
    if isinstance(tasks, Iterable) and not isinstance(tasks, Mapping | str | bytes):
        return iter(tasks)
    if inspect.iscoroutine(tasks):
        tasks.close()
    raise ValueError(f"tasks() must return a sequence or an iterator, got {type(tasks).__name__}")


@dataclass(frozen=True)
class Endpoint:
    """The address at which one episode calls the model, with the API of OpenAI or of Anthropic.

    It serves only this episode: after the episode's end every call is refused (401). Any name of a
    model works.

        openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        anthropic.AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.api_key)

    Where the environment `needs_socket`, the address is that of the relay inside a sandbox, which
    leads to the unix socket `socket_path`; whoever reaches the socket needs no key.
    """

    # The address without `/v1`, as Anthropic's clients want it.
    anthropic_url: str
    # A secret of this episode; any text with a `socket_path`.
    api_key: str = field(repr=False)
    # Absolute path of the episode's unix socket, or "". Its folder is readable to this user alone.
    socket_path: str = ""

    @property
    def base_url(self) -> str:
        """The address with `/v1`, as OpenAI's clients want it."""
        return f"{self.anthropic_url}/v1"

    def branch(self, name: str) -> Self:
        """Returns an endpoint for conversations of the branch `name`; see `AgentOutcome.shares`.

        Raises ValueError unless `name` has 1 to 64 letters, digits and characters of "._:+-".
        """
        if not isinstance(name, str) or BRANCH_NAME.fullmatch(name) is None:
            raise ValueError(f"a branch has 1 to 64 letters, digits and ._:+-, got {name!r}")
        root = self.anthropic_url.partition("/b/")[0]
        return replace(self, anthropic_url=f"{root}/b/{name}")

    def variables(self) -> dict[str, str]:
        """Returns the environment variables by which most programs find the endpoint.

        With a `socket_path` there are three more, which a sandbox needs: the socket, the file of
        the relay inside, and the network namespace in which that relay must not run.
        """
        of_socket = {
            "SLIPSTREAM_SOCKET": self.socket_path,
            "SLIPSTREAM_RELAY": relay_inside.__file__,
            "SLIPSTREAM_NETWORK": relay_inside.network(),
        }
        return (of_socket if self.socket_path else {}) | {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            # A proxy of the machine does not know this address.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@dataclass(frozen=True)
class AgentOutcome:
    """The result of one run of an agent.

    `reward` and `metrics` are as in StepResult. `shares` maps the name of a branch to the part of
    the episode's advantage that the branch gets; every other branch gets 1. `rewards` maps the name
    of a branch to its own reward, which is compared only with rewards of that branch name in the
    episode's group. `reply_rewards` maps the `id` of an answer of the endpoint to the reward of its
    reply, or to one for each of its tokens; they add to the reward of the episode or branch name.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    reply_rewards: Mapping[str, float | Sequence[float]] = field(default_factory=dict)


class AgentEnvironment(Environment[Task]):
    """Base class of agents: `run` takes the place of `reset` and `step`.

    Every episode runs on a shallow copy, as with any environment. An `async def run` shares a
    thread with all other episodes of the worker, so it must await its calls. A plain `def run` has
    a thread of its own and may block.
    """

    # Whether `run` gets a unix socket, for a program in a sandbox without network, in place of an
    # address on loopback.
    needs_socket: bool = False
    # Whether `run` gets an address at which programs beyond this host reach the model, that of
    # `agents.listen`.
    needs_url: bool = False

    def run(
        self, task: Task, endpoint: Endpoint
    ) -> float | AgentOutcome | Awaitable[float | AgentOutcome]:
        """Works on `task` with calls to `endpoint`; returns the reward, or an AgentOutcome."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")
