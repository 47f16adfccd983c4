"""What an audit plays and keeps: tasks, the replies whose worth is known, what each has earned.

Consumes: the openings of tasks. Produces: the fields of a step for each kind of reply.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from slipstream.client.audit_data import Row

if TYPE_CHECKING:
    from slipstream.v1 import environment_pb2 as pb

# Plays at once, for judges that wait.
AT_ONCE = 8
# The reply that the environment names, and the forms in which its answer is tried: `{}` stands for
# it. A prompt may ask for others.
OWN = ""
PLAIN = "{}"
FORMS = (
    "\\boxed{{}}",
    "$\\boxed{{}}$",
    "#### {}",
    "<answer>{}</answer>",
    "<answer>\n{}\n</answer>",
    "Answer: {}",
    "ANSWER: {}",
    "Final answer: {}",
    "Final Answer: {}",
    "The answer is {}.",
    "The final answer is {}.",
    "**{}**",
    "[[{}]]",
    "```\n{}\n```",
    '{"answer": "{}"}',
    '{"answer": {}}',
    '```json\n{"answer": "{}"}\n```',
    "<think>\nWell.\n</think>\n\n<answer>{}</answer>",
)
# Forms that a prompt asks for: a tag, a key of JSON, double brackets, or the beginning of a line.
_TAGS = re.compile(r"<([A-Za-z_]\w*)>")
_KEYS = re.compile(r"""\{\s*["'](\w+)["']\s*:""")
_LEADS = re.compile(r"""(?:^|["'`\s])((?:\w+ )?\w+\s?[:=]) ?[\[(<{]?[A-Z_]{3,}\b""", re.MULTILINE)
_MAX_ASKED = 4
# Words that say nothing, after a right answer.
_WORDS = "That is all there is to say about it, as far as one can see, " * 8


@dataclass(frozen=True)
class EpisodeLimits:
    """What a run allows an episode, and how it plays; None where that is not known."""

    has_tools: bool = True
    max_images: int | None = None
    max_turns: int | None = None
    max_reply_tokens: int | None = None
    # Episodes that a worker plays at one time, those of all workers, and a worker's of one step.
    at_once: int = AT_ONCE
    in_all: int = AT_ONCE
    num_episodes: int = 64
    # Whether rewards of one task are compared.
    compares: bool = True


# The limits where no run is known.
NO_LIMITS = EpisodeLimits()


class PlayedReply(Enum):
    """The replies that are played, in the words of the report."""

    RIGHT = "the right answer"
    EMPTY = "an empty reply"
    # Played where no right answer is known.
    WORD = "the word ok"
    # Played where the environment names a wrong reply.
    WRONG = "a reply that is wrong"
    # A demonstration.
    OWN = "its own reply"
    OTHER = "another task's answer"
    FORMED = "another task's answer in a form that the prompt names"
    THOUGHT = "the right answer in thoughts alone"
    BEHIND = "the right answer behind thoughts"
    BARE = "the right answer without its mark"
    CUT = "the right answer cut in the middle"
    HEDGED = "the right answer or another one"
    LONGER = "the right answer with more words"
    WORDS = "words that say nothing"
    AGAIN = "the right answer once more"


@dataclass(kw_only=True)
class Task(Row):
    """One task of the sample."""

    opening: pb.Observation
    # Replies that are wrong, if the environment names some.
    wrong: Sequence[str]
    # The limit of a reply, or 0.
    max_reply_tokens: int
    # A task with another answer, and whether this one is named first where both are.
    other: Task | None = None
    is_first: bool = True

    def is_unlike(self, other: Task) -> bool:
        """Whether the other task's right reply is another one, and so is its answer if any."""
        texts = {task.answer.strip().casefold() for task in (self, other)}
        is_same = (other.answer, other.reply) == (self.answer, self.reply)
        return not is_same and (len(texts) > 1 or texts == {""})


@dataclass
class PlayedEpisode:
    """One episode: its first reply, what it earned or why it failed, its turns, if it has ended."""

    said: str = ""
    earned: float = 0.0
    failure: str = ""
    num_turns: int = 0
    is_done: bool = False
    # Metrics, images and calls that the environment gave so far.
    metrics: dict[str, float] = field(default_factory=dict)
    images: set[bytes] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    # The fields of the replies, as `step` got them.
    replies: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Played:
    """What was played, and what it earned."""

    num_tasks: int
    limits: EpisodeLimits = NO_LIMITS
    # The first call of an agent, which only begins, "none" or "" for no agent; how one of two
    # episodes at once failed.
    first_call: str = ""
    beside: str = ""
    tasks: list[Task] = field(default_factory=list)
    # Tasks beyond the sample, which were opened alone.
    further: list[Task] = field(default_factory=list)
    plays: defaultdict[PlayedReply, dict[int, PlayedEpisode]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    # Seconds of each call of `step`; seconds and calls of plays that were made at once.
    calls_s: list[float] = field(default_factory=list)
    timed: list[tuple[float, int]] = field(default_factory=list)
    # Tasks whose two resets differ, with the two texts; those that cannot begin, with the cause.
    unequal: dict[int, tuple[str, str]] = field(default_factory=dict)
    unbegun: dict[int, str] = field(default_factory=dict)
    # How the first call of `close` that failed did so.
    unclosed: str = ""
    # Whether a step gave the first messages again, before others.
    repeats: bool = False
    # Places at which `tasks()` gives others: "when it is called again", "in another process".
    other_tasks: list[str] = field(default_factory=list)
    # The form in which the right answer earned something.
    form: str = PLAIN
    seconds: float = 0.0
    # Plays for which there was no time: kinds and tasks, None for an opening.
    left_out: set[tuple[PlayedReply | None, int]] = field(default_factory=set)

    @property
    def rows(self) -> list[Task]:
        return sorted([*self.tasks, *self.further], key=lambda row: row.index)

    def every(self) -> list[tuple[int, PlayedReply, PlayedEpisode]]:
        """Returns all plays with their tasks and kinds, in the order of the tasks."""
        plays = [
            (index, kind, play) for kind in PlayedReply for index, play in self.plays[kind].items()
        ]
        return sorted(plays, key=lambda numbered: numbered[0])

    def rewards(self, kind: PlayedReply) -> dict[int, float]:
        """Returns what a reply earned where the play did not fail, by task."""
        return {i: play.earned for i, play in self.plays[kind].items() if not play.failure}

    def poor(self) -> dict[int, float]:
        """Returns what the right answers earned that earned no more than an empty reply, by task.

        What an episode earns that has not ended is not known.
        """
        empty = self.rewards(PlayedReply.EMPTY)
        plays = self.plays[PlayedReply.RIGHT]
        return {
            index: reward
            for index, reward in self.rewards(PlayedReply.RIGHT).items()
            if index in empty and reward <= empty[index] and plays[index].is_done
        }


def reply_to(
    task: Task, kind: PlayedReply, own: str, form: str, place: int = 0
) -> dict[str, Any] | None:
    """Returns the fields of the step that plays `kind`, or None if it does not apply to `task`.

    `own` is the right reply that the environment names now, "" if it names none; `place` is that
    of a wrong reply among several.
    """
    if task.opening.given_reply:
        return {"reply": task.opening.given_reply} if kind is PlayedReply.OWN else None
    if kind is PlayedReply.WRONG:
        return {"reply": task.wrong[place]} if task.wrong else None
    if not task.right:
        return {PlayedReply.EMPTY: {"reply": ""}, PlayedReply.WORD: {"reply": "ok"}}.get(kind)
    right_reply = _written(task, own, form)
    other = task.other if not task.wrong else None
    other_reply = _written(other, other.reply, form) if other is not None else ""
    match kind:
        case PlayedReply.RIGHT | PlayedReply.AGAIN:
            return {"reply": right_reply}
        case PlayedReply.EMPTY:
            return {"reply": ""}
        case PlayedReply.OTHER:
            return {"reply": other_reply} if other_reply else None
        case PlayedReply.FORMED:
            return _formed(task, other, form)
        case PlayedReply.THOUGHT:
            content = _content(right_reply)
            return {
                "reply": f"<think>\n{content}\n</think>\n",
                "parsed": {"reasoning": content},
            }
        case PlayedReply.BEHIND:
            return _behind_thoughts(_content(right_reply), other_reply or "Well.")
        case PlayedReply.BARE:
            has_mark = own and task.answer and task.answer != right_reply
            return {"reply": task.answer} if has_mark else None
        case PlayedReply.CUT:
            return _cut(right_reply)
        case PlayedReply.HEDGED:
            return _hedged(task, right_reply)
        case PlayedReply.LONGER:
            return {"reply": f"{right_reply}\n\n{_WORDS}"}
        case PlayedReply.WORDS:
            # Words are an empty reply where code is asked for.
            return {"reply": _WORDS} if task.answer else None
    return None


def _content(reply: str) -> str:
    """Returns what a reply says behind its thoughts."""
    return reply.rpartition("</think>")[2].strip()


def _formed(task: Task, other: Task | None, form: str) -> dict[str, Any] | None:
    """Returns another task's answer in a form that the prompt names, if it names another one."""
    forms = [name for name in named_forms(task) if name != form]
    if not forms or other is None or not other.answer:
        return None
    return {"reply": forms[0].replace("{}", other.answer)}


def _behind_thoughts(content: str, thought: str) -> dict[str, Any]:
    """Returns a reply behind thoughts, as text and as the parts that a parser finds."""
    return {
        "reply": f"<think>\n{thought}\n</think>\n\n{content}",
        "parsed": {"content": content, "reasoning": thought},
    }


def _cut(right_reply: str) -> dict[str, Any] | None:
    """Returns the first half of a reply, unless it holds all numbers of the whole."""
    half = right_reply[: len(right_reply) // 2].rstrip()
    # The number of "5 km" is not cut.
    digits = re.findall(r"\d", right_reply)
    is_whole = digits != [] and re.findall(r"\d", half) == digits
    if not half or is_whole:
        return None
    return {"reply": half, "truncated": True}


def _hedged(task: Task, right_reply: str) -> dict[str, Any] | None:
    """Returns the right reply with its answer and another task's, if it holds its answer."""
    alternative = task.other.answer if task.other is not None else ""
    if not (task.answer and alternative and task.answer in right_reply):
        return None
    start, _, rest = right_reply.rpartition(task.answer)
    # Judges of the first and judges of the last word are found by one play a task.
    both = (task.answer, alternative) if task.is_first else (alternative, task.answer)
    return {"reply": f"{start}{' or '.join(both)}{rest}"}


def named_forms(task: Task) -> list[str]:
    """Returns the forms in which the prompt asks for the answer; `{}` stands for it."""
    prompt = "\n".join(text_of(task.opening))
    forms = [f"<{tag}>{{}}</{tag}>" for tag in _TAGS.findall(prompt)[:_MAX_ASKED]]
    forms += [f'{{"{key}": "{{}}"}}' for key in _KEYS.findall(prompt)[:_MAX_ASKED]]
    forms += [f"{lead} {{}}" for lead in _LEADS.findall(prompt)[:_MAX_ASKED]]
    if "\\boxed" in prompt:
        forms.append("\\boxed{{}}")
    return forms


def _written(task: Task, own: str, form: str) -> str:
    return own if form == OWN else form.replace("{}", task.answer or own)


def text_of(opening: pb.Observation) -> list[str]:
    """Returns the text of each message of an opening."""
    return [
        message.content or "".join(part.text for part in message.parts)
        for message in opening.messages
    ]
