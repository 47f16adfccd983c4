"""Plays an environment with replies whose worth is known, before a model is trained on it.

Consumes: a loaded environment's tasks. Produces: `Played`, what each reply has earned. Waits for:
the environment's methods; a limit of seconds ends it between two plays, after the first task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.client.audit_groups import compare_tasks
from slipstream.client.audit_plays import (
    AT_ONCE,
    FORMS,
    NO_LIMITS,
    OWN,
    PLAIN,
    EpisodeLimits,
    Played,
    PlayedEpisode,
    PlayedReply,
    Task,
    named_forms,
    reply_to,
    text_of,
)
from slipstream.client.episode_host import MAX_LISTED, spaced
from slipstream.client.terminal import counted
from slipstream.core.errors import EnvironmentFailed
from slipstream.core.template_values import NEED_PARSER

if TYPE_CHECKING:
    from slipstream.client.episode_host import EpisodeHost
    from slipstream.v1 import environment_pb2 as pb

    # Carries out a command, and returns the answer or a failure.
    Ask = Callable[..., Awaitable[pb.WorkerMessage]]

MAX_TASKS = 100
# Tasks of an iterator that are read.
FIRST_TASKS = 32
# Turns of an episode that are played, and of one that shows whether it ever ends.
MAX_TURNS = 8
MOST_TURNS = 1000
# Tasks that are played for what depends on the judge alone, or in other forms.
MAX_AGAIN = 8


class Audit:
    """Plays one environment."""

    def __init__(
        self,
        host: EpisodeHost,
        ask: Ask,
        *,
        loaded: pb.Loaded,
        limit_s: float,
        limits: EpisodeLimits = NO_LIMITS,
    ) -> None:
        """Takes the host that has `loaded` an environment; after `limit_s` no more play begins."""
        self._host = host
        self._ask = ask
        self._digest = loaded.digest
        self._began_s = time.monotonic()
        self._until_s = self._began_s + limit_s
        self._limits, self._places = limits, asyncio.Semaphore(min(AT_ONCE, limits.at_once))
        self.played = Played(loaded.num_tasks, limits)

    async def run(self) -> Played:
        """Plays what there is time for."""
        played = self.played
        number = self.played.num_tasks
        indices = spaced(number or FIRST_TASKS, MAX_TASKS)
        await self._open(indices[0], played.tasks)
        if played.first_call or not played.tasks:
            return self._ended()
        await self._choose_form()
        await self._all(_FIRST)
        await self._each(self._open(index, played.tasks) for index in indices[1:])
        played.tasks.sort(key=lambda task: task.index)
        solved = [task for task in played.tasks if task.right]
        for place, task in enumerate(solved):
            task.is_first = place % 2 == 0
            task.other = next(filter(task.is_unlike, (*solved[place + 1 :], *solved[:place])), None)
        if len(played.tasks) > 1:
            await self._choose_form()
        for kinds in (_FIRST, tuple(PlayedReply)):
            await self._all(kinds)
        # Right answers that earned nothing are played once more in each other form.
        poor = played.poor()
        form = played.form
        for task in [task for task in played.tasks if task.index in poor][:MAX_AGAIN]:
            await self._find_form(task)
            played.form = form
        compared = [task.index for task in played.tasks if task.opening.judges_group]
        until_s = self._until_s
        left_out = await compare_tasks(self._ask, compared, played.plays, until_s=until_s)
        played.left_out.update(left_out)
        rest = [] if played.tasks[0].has_images else spaced(number, MAX_LISTED)
        rest = [index for index in rest if index not in {*indices}]
        await self._each(self._open(index, played.further) for index in rest)
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
        async def play_in_turn(play: Awaitable[None]) -> None:
            async with self._places:
                await play

        await asyncio.gather(*(play_in_turn(play) for play in plays))

    async def _open(self, index: int, into: list[Task]) -> None:
        """Resets a task and adds it to a list; resets one of the sample twice, and compares."""
        played = self.played
        is_further = into is self.played.further
        if played.tasks and not self._has_time:
            if not is_further:
                played.left_out.add((None, index))
            return
        openings: list[pb.Observation] = []
        task = None
        for number in range(1 if is_further else 2):
            if openings and not self._has_time:
                break
            key = f"reset-{number}-{index}"
            answer = await self._ask(reset={"episode_key": key, "task_index": index, "seed": index})
            opening = answer.observation
            if cause := answer.failure.message or self._refusal(PlayedEpisode(), opening):
                played.unbegun[index] = cause
            else:
                environment = self._host.environment_of(key)
                wrong = environment.wrong_reply
                messages = opening.messages
                roles = [message.role for message in messages]
                task = Task(
                    index=index,
                    said=[*zip(roles, text_of(opening), strict=True)],
                    answer=environment.expected_answer,
                    reply=environment.right_reply,
                    has_images=any(part.image for message in messages for part in message.parts),
                    opening=opening,
                    wrong=[wrong] * bool(wrong) if isinstance(wrong, str) else wrong,
                    max_reply_tokens=opening.max_reply_tokens,
                )
                if opening.is_agent:
                    played.tasks.append(task)
                    await self._begin_two(key, index)
                    return
                # An environment may draw each episode's limit.
                opening.ClearField("max_reply_tokens")
                openings.append(opening)
            await self._close(key)
        if task is None or index in played.unbegun:
            return
        if openings[0] != openings[-1]:
            texts = ["\n".join(text_of(opening)) for opening in openings]
            played.unequal[index] = (texts[0], texts[1])
        into.append(task)

    async def _begin_two(self, key: str, index: int) -> None:
        """Lets the agent of the open episode `key`, and one beside it, go on to their first calls.

        No model answers these. A run may end without any.
        """

        async def begin(episode: dict[str, Any]) -> pb.WorkerMessage:
            if episode["episode_key"] != key:
                answer = await self._ask(reset=episode | {"task_index": index, "seed": index})
                if answer.HasField("failure"):
                    return answer
            return await self._ask(follow_agent=episode)

        keys = (key, f"{key}-beside")[: self._limits.in_all]
        answers = await asyncio.gather(*(begin({"episode_key": key}) for key in keys))
        failures = [answer.failure.message for answer in answers if answer.HasField("failure")]
        calls = [answer.agent_call for answer in answers if answer.HasField("agent_call")]
        self.played.first_call = f"{calls[0].method} {calls[0].path}" if calls else "none"
        if len(failures) == len(keys):
            self.played.unbegun[index] = failures[0]
        elif failures:
            self.played.beside = failures[0]
        for episode_key in keys:
            await self._close(episode_key)

    async def _choose_form(self) -> None:
        """Finds the form in which the first right answers earn more than an empty reply."""
        self.played.form = OWN if any(task.reply for task in self.played.tasks) else PLAIN
        for task in [task for task in self.played.tasks if task.right][:3]:
            await self._in_time(task, PlayedReply.EMPTY)
            if await self._find_form(task):
                return

    async def _find_form(self, task: Task) -> bool:
        """Plays the right answer in each form until it earns more than an empty reply."""
        played = self.played
        earlier_form = self.played.form
        before = played.plays[PlayedReply.RIGHT].get(task.index)
        nothing = played.rewards(PlayedReply.EMPTY).get(task.index, 0.0)
        # The environment's own, what the prompt asks for, usual ones.
        forms = [OWN] if task.reply else []
        if task.answer:
            forms += [PLAIN, *named_forms(task), *FORMS]
        for form in dict.fromkeys(forms):
            if not self._has_time and played.plays[PlayedReply.RIGHT]:
                break
            played.form = form
            await self._play(task, PlayedReply.RIGHT)
            if played.rewards(PlayedReply.RIGHT).get(task.index, nothing) > nothing:
                return True
        played.form = earlier_form
        if before is not None:
            played.plays[PlayedReply.RIGHT][task.index] = before
        elif self._has_time:
            await self._play(task, PlayedReply.RIGHT)
        return False

    async def _all(self, kinds: Sequence[PlayedReply]) -> None:
        """Plays those of `kinds` that were not played yet, kind by kind."""
        for kind in kinds:
            due = [task for task in self.played.tasks if task.index not in self.played.plays[kind]]
            due = due[:MAX_AGAIN] if kind in _OF_JUDGES else due
            began_s = time.monotonic()
            before = len(self.played.calls_s)
            await self._each(self._in_time(task, kind) for task in due)
            number = len(self.played.calls_s) - before
            self.played.timed.append((time.monotonic() - began_s, number))

    async def _in_time(self, task: Task, kind: PlayedReply) -> None:
        # The first play is made in any case.
        if self._has_time or not any(self.played.plays.values()):
            await self._play(task, kind)
        elif reply_to(task, kind, task.reply, self.played.form) is not None:
            self.played.left_out.add((kind, task.index))

    async def _play(self, task: Task, kind: PlayedReply) -> None:
        """Plays episodes of the task, if the kind applies to it, and notes what the best earns."""
        plays = self.played.plays[kind]
        for place in range(len(task.wrong) if kind is PlayedReply.WRONG else 1):
            applies = reply_to(task, kind, task.reply, self.played.form, place) is not None
            if not applies or (place and not self._has_time):
                return
            play = await self._episode(task, kind, place)
            if not place or play.failure or play.earned > plays[task.index].earned:
                plays[task.index] = play
            if play.failure:
                return

    async def _episode(self, task: Task, kind: PlayedReply, place: int) -> PlayedEpisode:
        """Plays an episode, with the first task to its end if it comes in time."""
        play = PlayedEpisode()
        key = f"{kind.name}-{task.index}"
        max_turns = MOST_TURNS if task is self.played.tasks[0] else MAX_TURNS
        command = {"episode_key": key, "task_index": task.index, "seed": task.index}
        answer = await self._ask(reset=command)
        opening = answer.observation
        play.failure = answer.failure.message or self._refusal(play, opening)
        given_reply = opening.given_reply
        while not (play.failure or play.is_done or play.num_turns >= max_turns):
            if play.num_turns > MAX_TURNS and not self._has_time:
                break
            environment = self._host.environment_of(key)
            step = reply_to(task, kind, environment.right_reply, self.played.form, place)
            if kind is PlayedReply.AGAIN:
                # Other episodes begin and go on before this one does, as in a run.
                await asyncio.sleep(0)
            if given_reply:
                step = {"reply": given_reply}
            play.said = play.said or str((step or {}).get("reply", ""))
            step = step or {"reply": ""}
            # A token for each word, and the token that ends the reply.
            tokens = [0] * (len(step["reply"].split()) + 1)
            began_s = time.monotonic()
            fields = {"episode_key": key, "token_ids": tokens, **step}
            answer = await self._ask(step=fields)
            play.replies.append(fields)
            self.played.calls_s.append(time.monotonic() - began_s)
            verdict = answer.verdict
            numbers = len(answer.verdict.token_rewards)
            play.failure = answer.failure.message
            if numbers not in (0, len(tokens)):
                needs = "token_rewards needs a number for each token of its reply"
                play.failure = f"{needs}: {len(tokens)}, got {numbers}"
            elif not (verdict.done or play.failure):
                play.failure = self._refusal(play, verdict, gives=bool(opening.given_reply))
            play.metrics.update(verdict.metrics)
            opened = task.opening.messages
            if len(verdict.messages) > len(opened) and verdict.messages[: len(opened)] == opened:
                self.played.repeats = True
            play.earned = sum(verdict.token_rewards, play.earned + verdict.reward)
            given_reply = verdict.given_reply
            play.is_done = verdict.done
            play.num_turns += 1
        await self._close(key)
        return play

    async def _close(self, key: str) -> None:
        answer = await self._ask(close={"episode_key": key})
        self.played.unclosed = self.played.unclosed or answer.failure.message

    def _refusal(
        self, play: PlayedEpisode, answer: pb.Observation | pb.Verdict, *, gives: bool | None = None
    ) -> str:
        """Notes what an episode gets; returns why a run would refuse it, or "".

        `gives` says for a verdict whether the environment gave the reply before it.
        """
        max_images = self._limits.max_images
        if answer.tools_json not in ("", "[]") and not self._limits.has_tools:
            return NEED_PARSER
        for message in answer.messages:
            play.images |= {part.image for part in message.parts if part.image}
            play.calls |= {call.id for call in message.tool_calls}
            # The replies that are played call no tool.
            if gives is not None and message.tool_call_id not in {"", *play.calls}:
                what = "tool_call_id must be the id of a call of the model"
                return f"{what}, got {message.tool_call_id[:60]!r}"
        if max_images is not None and len(play.images) > max_images:
            shown = counted(len(play.images), "image")
            return f"it shows {shown}, more than sampling.max_images = {max_images}"
        if gives not in (None, bool(answer.given_reply)):
            return "an environment gives all replies of an episode, or none"
        return ""


# The kinds that are played of all tasks before the others.
_FIRST = (
    PlayedReply.EMPTY,
    PlayedReply.RIGHT,
    PlayedReply.WRONG,
    PlayedReply.WORD,
    PlayedReply.OWN,
)
_OF_JUDGES = (
    PlayedReply.FORMED,
    PlayedReply.THOUGHT,
    PlayedReply.BEHIND,
    PlayedReply.CUT,
    PlayedReply.HEDGED,
    PlayedReply.LONGER,
    PlayedReply.WORDS,
    PlayedReply.AGAIN,
)
