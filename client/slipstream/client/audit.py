"""Plays an environment with replies whose worth is known, before a model is trained on it.

Consumes: a loaded environment's tasks. Produces: `Played`, what each reply has earned. Waits for:
the environment's methods; a limit of seconds ends it between two plays, after the first task.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from slipstream.client.task_digest import spaced
from slipstream.core.errors import EnvironmentFailed

if TYPE_CHECKING:
    from slipstream.client.episode_host import EpisodeHost
    from slipstream.v1 import environment_pb2 as pb

    # Carries out a command, and returns the answer or a failure.
    Ask = Callable[..., Awaitable[pb.WorkerMessage]]

MAX_TASKS = 100
# Tasks of an iterator that are read.
FIRST_TASKS = 32
# Plays at once, for judges that wait.
AT_ONCE = 8
# Turns of an episode that are played.
MAX_TURNS = 8
# Tasks whose right answer is played again in the same words, or in other forms.
MAX_AGAIN = 8
# The reply that the environment names, and the forms in which its answer is tried: `{}` stands for
# it. A prompt may ask for others.
OWN, PLAIN = "", "{}"
FORMS = (
    *("\\boxed{{}}", "$\\boxed{{}}$", "#### {}", "<answer>{}</answer>", "<answer>\n{}\n</answer>"),
    *("Answer: {}", "ANSWER: {}", "Final answer: {}", "Final Answer: {}", "The answer is {}."),
    *("The final answer is {}.", "**{}**", "[[{}]]", "```\n{}\n```", '{"answer": "{}"}'),
    *('{"answer": {}}', '```json\n{"answer": "{}"}\n```'),
    "<think>\nWell.\n</think>\n\n<answer>{}</answer>",
)
# What a prompt asks for: a tag, a key of JSON, double brackets, or the beginning of a line.
_TAGS = re.compile(r"<([A-Za-z_]\w*)>")
_KEYS = re.compile(r"""\{\s*["'](\w+)["']\s*:""")
_LEADS = re.compile(r"""(?:^|["'`\s])((?:\w+ )?\w+\s?[:=]) ?[\[(<{]?[A-Z_]{3,}\b""", re.MULTILINE)
_MAX_ASKED = 4


class Kind(Enum):
    """The replies that are played, in the words of the report."""

    RIGHT = "the right answer"
    EMPTY = "an empty reply"
    # Where no right answer is known.
    WORD = "the word ok"
    # Where the environment names one.
    WRONG = "a reply that is wrong"
    # A demonstration.
    OWN = "its own reply"
    OTHER = "another task's answer"
    THOUGHT = "the right answer in thoughts alone"
    BEHIND = "the right answer behind thoughts"
    BARE = "the right answer without its mark"
    CUT = "the right answer cut in the middle"
    AGAIN = "the right answer once more"


@dataclass
class Task:
    """One task of the sample."""

    index: int
    opening: pb.Observation
    # The right answer, and a reply that gives it if the environment names one.
    answer: str = ""
    reply: str = ""
    # A reply that is wrong, if the environment names one.
    wrong: str = ""
    # A task with another answer.
    other: Task | None = None

    @property
    def prompt(self) -> str:
        """The text of the last message."""
        return text_of(self.opening)[-1] if self.opening.messages else ""

    @property
    def is_known(self) -> bool:
        """Whether the environment names the right answer."""
        return bool(self.answer or self.reply)


@dataclass
class Played:
    """What was played, and what it earned."""

    num_tasks: int
    # Whether the environment is an agent, which only begins.
    first_call: str = ""
    tasks: list[Task] = field(default_factory=list)
    rewards: dict[Kind, dict[int, float]] = field(default_factory=dict)
    # Causes of failed plays, and the replies that were played, by kind and task.
    failures: dict[Kind, dict[int, str]] = field(default_factory=dict)
    replies: dict[Kind, dict[int, str]] = field(default_factory=dict)
    # Tasks whose two resets differ, with the two texts; those that cannot begin, with the cause.
    unequal: dict[int, tuple[str, str]] = field(default_factory=dict)
    unbegun: dict[int, str] = field(default_factory=dict)
    # Where `tasks()` gives others: "when it is called again", "in another process".
    other_tasks: list[str] = field(default_factory=list)
    # The form in which the right answer earned something.
    form: str = PLAIN
    seconds: float = 0.0
    # What would have been played, had there been time: kinds and tasks, None for an opening.
    left_out: set[tuple[Kind | None, int]] = field(default_factory=set)


class Audit:
    """Plays one environment."""

    def __init__(self, host: EpisodeHost, ask: Ask, *, loaded: pb.Loaded, limit_s: float) -> None:
        """Takes the host that has `loaded` an environment; after `limit_s` no more play begins."""
        self._host, self._ask, self._digest = host, ask, loaded.digest
        self._began_s = time.monotonic()
        self._until_s = self._began_s + limit_s
        self._places = asyncio.Semaphore(AT_ONCE)
        self.played = Played(loaded.num_tasks)

    async def run(self, look: Callable[[int, pb.Observation], None]) -> Played:
        """Plays what there is time for; calls `look` with each opening that it sees."""
        played, number = self.played, self.played.num_tasks
        indices = spaced(number or FIRST_TASKS, MAX_TASKS)
        await self._open(indices[0], look)
        if played.first_call or not played.tasks:
            return self._ended()
        await self._choose_form()
        await self._all(_FIRST)
        await self._each(self._open(index, look) for index in indices[1:])
        played.tasks.sort(key=lambda task: task.index)
        self._pair()
        if len(played.tasks) > 1:
            await self._choose_form()
        for kinds in (_FIRST, tuple(Kind)):
            await self._all(kinds)
        await self._in_other_forms()
        return self._ended()

    def _ended(self) -> Played:
        try:
            if self._host.digest(again=True) != self._digest:
                self.played.other_tasks.append("when it is called again")
        except EnvironmentFailed as error:
            self.played.other_tasks.append(f"when it is called again ({error})")
        self.played.seconds = time.monotonic() - self._began_s
        return self.played

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._until_s

    async def _each(self, plays: Iterable[Awaitable[None]]) -> None:
        async def one(play: Awaitable[None]) -> None:
            async with self._places:
                await play

        await asyncio.gather(*(one(play) for play in plays))

    async def _open(self, index: int, look: Callable[[int, pb.Observation], None]) -> None:
        """Resets a task twice, compares both, and adds it to the sample."""
        played = self.played
        if played.tasks and not self._has_time:
            played.left_out.add((None, index))
            return
        openings: list[pb.Observation] = []
        task = None
        for number in range(2):
            if openings and not self._has_time:
                break
            key = f"reset-{number}-{index}"
            answer = await self._reset(key, index)
            if answer.HasField("failure"):
                played.unbegun[index] = answer.failure.message
            else:
                opening = answer.observation
                openings.append(opening)
                look(index, opening)
                own = self._host.environment_of(key)
                replies = (own.expected_answer, own.right_reply, own.wrong_reply)
                task = Task(index, opening, *replies)
                if opening.is_agent:
                    played.tasks.append(task)
                    played.first_call = await self._first_call(key)
                    return
            await self._ask(close={"episode_key": key})
        if task is None or index in played.unbegun:
            return
        if openings[0] != openings[-1]:
            texts = ["\n".join(text_of(opening)) for opening in openings]
            played.unequal[index] = (texts[0], texts[1])
        played.tasks.append(task)

    async def _first_call(self, key: str) -> str:
        """Returns the agent's first call, which no model answers, or "" if it ends without one."""
        answer = await self._ask(follow_agent={"episode_key": key})
        if answer.HasField("failure"):
            self.played.unbegun[self.played.tasks[0].index] = answer.failure.message
        await self._ask(close={"episode_key": key})
        call = answer.agent_call
        return f"{call.method} {call.path}" if answer.HasField("agent_call") else "none"

    def _pair(self) -> None:
        """Gives each task another one that has another answer."""
        tasks = [task for task in self.played.tasks if task.is_known]
        for place, task in enumerate(tasks):
            others = (*tasks[place + 1 :], *tasks[:place])
            task.other = next((other for other in others if not _alike(other, task)), None)

    async def _choose_form(self) -> None:
        """Finds the form in which the first right answers earn more than an empty reply."""
        played = self.played
        for task in [task for task in played.tasks if task.is_known][:3]:
            await self._in_time(task, Kind.EMPTY)
            if not self._has_time:
                break
            nothing = played.rewards.get(Kind.EMPTY, {}).get(task.index, 0.0)
            for form in self._forms(task):
                played.form = form
                await self._play(task, Kind.RIGHT)
                if played.rewards.get(Kind.RIGHT, {}).get(task.index, 0.0) > nothing:
                    return
                if not self._has_time:
                    break
        played.form = OWN if any(task.reply for task in played.tasks) else PLAIN

    async def _in_other_forms(self) -> None:
        """Plays right answers that earned nothing once more in each other form."""
        played, tried = self.played, 0
        chosen = played.form
        for task in played.tasks:
            if task.index not in poor(played) or not self._has_time or tried >= MAX_AGAIN:
                continue
            tried += 1
            for form in self._forms(task):
                before = {of: dict(getattr(played, of).get(Kind.RIGHT, {})) for of in _BY_TASK}
                played.form = form
                await self._play(task, Kind.RIGHT)
                if task.index not in poor(played):
                    break
                for of, values in before.items():
                    getattr(played, of)[Kind.RIGHT] = values
        played.form = chosen

    def _forms(self, task: Task) -> Sequence[str]:
        """Returns the forms to try: the environment's own, what the prompt asks for, usual ones."""
        own = [OWN] if task.reply else []
        if not task.answer:
            return own
        said = "\n".join(text_of(task.opening))
        asked = [f"<{tag}>{{}}</{tag}>" for tag in _TAGS.findall(said)[:_MAX_ASKED]]
        asked += [f'{{"{key}": "{{}}"}}' for key in _KEYS.findall(said)[:_MAX_ASKED]]
        asked += [f"{lead} {{}}" for lead in _LEADS.findall(said)[:_MAX_ASKED]]
        return list(dict.fromkeys((*own, PLAIN, *asked, *FORMS)))

    async def _all(self, kinds: Sequence[Kind]) -> None:
        """Plays those of `kinds` that were not played yet, kind by kind."""
        for kind in kinds:
            tasks = self.played.tasks
            done = self.played.replies.get(kind, {})
            due = [task for task in tasks if task.index not in done]
            if kind is Kind.AGAIN:
                due = due[:MAX_AGAIN]
            await self._each(self._in_time(task, kind) for task in due)

    async def _in_time(self, task: Task, kind: Kind) -> None:
        # The first play is made in any case.
        if self._has_time or not self.played.replies:
            await self._play(task, kind)
        elif reply_to(task, kind, task.reply, self.played.form) is not None:
            self.played.left_out.add((kind, task.index))

    async def _play(self, task: Task, kind: Kind) -> None:
        """Plays an episode of the task, if the kind applies to it, and notes what it earns."""
        played, key = self.played, f"{kind.name}-{task.index}"
        if reply_to(task, kind, task.reply, played.form) is None:
            return
        answer = await self._reset(key, task.index)
        earned, said, opening = 0.0, "", answer.observation
        given, failure = opening.given_reply, answer.failure.message
        for _ in range(0 if failure else MAX_TURNS):
            own = self._host.environment_of(key)
            step = reply_to(task, kind, own.right_reply, played.form)
            if given:
                step = {"reply": given}
            said = said or str((step or {}).get("reply", ""))
            answer = await self._ask(step={"episode_key": key, **(step or {"reply": ""})})
            failure, verdict = answer.failure.message, answer.verdict
            if failure:
                break
            earned, given = sum(verdict.token_rewards, earned + verdict.reward), verdict.given_reply
            if verdict.done:
                break
        await self._ask(close={"episode_key": key})
        played.replies.setdefault(kind, {})[task.index] = said
        if failure:
            played.failures.setdefault(kind, {})[task.index] = failure
        else:
            played.rewards.setdefault(kind, {})[task.index] = earned

    async def _reset(self, key: str, index: int) -> pb.WorkerMessage:
        command = {"episode_key": key, "task_index": index, "seed": index}
        return await self._ask(reset=command)


# The kinds that are played of all tasks before the others.
_FIRST = (Kind.EMPTY, Kind.RIGHT, Kind.WRONG, Kind.WORD, Kind.OWN)
_BY_TASK = ("rewards", "failures", "replies")


def reply_to(task: Task, kind: Kind, own: str, form: str) -> dict[str, Any] | None:
    """Returns the fields of the step that plays `kind`, or None if it does not apply to `task`.

    `own` is the right reply that the environment names now, "" if it names none.
    """
    if task.opening.given_reply:
        return {"reply": task.opening.given_reply} if kind is Kind.OWN else None
    if kind is Kind.WRONG:
        return {"reply": task.wrong} if task.wrong else None
    if not task.is_known:
        return {Kind.EMPTY: {"reply": ""}, Kind.WORD: {"reply": "ok"}}.get(kind)
    written, other = _written(task, own, form), ""
    if task.other is not None and not task.wrong:
        other = _written(task.other, task.other.reply, form)
    content = written.rpartition("</think>")[2].strip()
    half = written[: len(written) // 2].rstrip()
    match kind:
        case Kind.RIGHT | Kind.AGAIN:
            return {"reply": written}
        case Kind.EMPTY:
            return {"reply": ""}
        case Kind.OTHER:
            return {"reply": other} if other else None
        case Kind.THOUGHT:
            text, parsed = f"<think>\n{content}\n</think>\n", {"reasoning": content}
            return {"reply": text, "parsed": parsed}
        case Kind.BEHIND:
            thought = other or "Well."
            text = f"<think>\n{thought}\n</think>\n\n{content}"
            return {"reply": text, "parsed": {"content": content, "reasoning": thought}}
        case Kind.BARE:
            has_mark = own and task.answer and task.answer != written
            return {"reply": task.answer} if has_mark else None
        case Kind.CUT:
            return {"reply": half, "truncated": True} if half else None
    return None


def _written(task: Task, own: str, form: str) -> str:
    return own if form == OWN else form.replace("{}", task.answer or own)


def poor(played: Played) -> dict[int, float]:
    """Returns what the right answers earned that earned no more than an empty reply, by task."""
    right, empty = (played.rewards.get(kind, {}) for kind in (Kind.RIGHT, Kind.EMPTY))
    return {index: r for index, r in right.items() if index in empty and r <= empty[index]}


def text_of(opening: pb.Observation) -> list[str]:
    """Returns the text of each message of an opening."""
    return [
        message.content or "".join(part.text for part in message.parts)
        for message in opening.messages
    ]


def _alike(one: Task, other: Task) -> bool:
    return (one.answer, one.reply) == (other.answer, other.reply) or (
        one.answer.strip().casefold() == other.answer.strip().casefold() != ""
    )
