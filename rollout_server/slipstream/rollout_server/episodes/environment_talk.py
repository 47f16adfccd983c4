"""The turns of an episode whose environment judges replies.

Consumes: an opened session, replies of the model. Produces: tokens in the recording, a status.
Waits for: the environment and the model in turn. Unblocked by: their answers, or the task's
cancellation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial

from slipstream.core.models.vision import PlacedImage, check_pixels
from slipstream.core.settings.sections import MAX_TURNS
from slipstream.core.types import Status
from slipstream.rollout_server.chat import REPLY, ChatMessage, ParsedReply, TemplateInputs
from slipstream.rollout_server.engine_interface import FinishReason
from slipstream.rollout_server.episodes.calls import (
    Judgement,
    Opening,
    StreamSession,
    check_tools,
    misused,
)
from slipstream.rollout_server.episodes.play import Play, Reader
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed


class EnvironmentTalk:
    """Alternates between one environment and the model; `run` may be called once."""

    def __init__(self, play: Play, session: StreamSession) -> None:
        self._play, self._session = play, session
        self._recording, self._sampling = play.recording, play.lease.sampling
        self._renderer, self._agents = play.model.renderer, play.model.agents
        # Reads replies; None if there is nothing to read in them.
        self._reader: Reader | None = None

    async def run(self, opening: Opening) -> Status:
        """Plays the turns after `opening`; returns how the episode ended.

        Raises PromptTooLong, RenderingFailed, or what `Play.ask` and `Play.generate` raise.
        """
        renderer, recording, sampling = self._renderer, self._recording, self._sampling
        inputs = TemplateInputs(opening.tools, self._play.lease.template_values)
        history = await self._begin(opening, inputs)
        context = history.prompt()
        recording.prompt_tokens = len(context)
        self._check_prompt(len(context))
        reply_limit = sampling.max_reply_tokens
        if opening.max_reply_tokens:
            reply_limit = min(reply_limit, opening.max_reply_tokens)
        given = opening.given_reply
        recording.is_given = bool(given)
        while True:
            room = recording.room(sampling) - len(context)
            if room < 1:
                # The environment has judged all replies so far.
                return Status.TRUNCATED
            await self._check_images(history.images)
            recording.add_context(context, history.images)
            most = min(room, reply_limit)
            before = list(recording.conversation)
            said, truncated = await self._reply(history, given, most)
            reply = recording.last_text = renderer.decode(said)
            parsed = self._read(before, said, history.inputs)
            judged = self._judged(before, said, reply, parsed)
            step = self._session.step(reply, truncated=truncated, parsed=judged, token_ids=said)
            verdict = await self._play.ask(step)
            if given:
                # What ends the reply depends on what follows it.
                said = history.reply(given, verdict.messages)[:most]
                end = FinishReason.LENGTH if truncated else FinishReason.STOP
                self._play.give(said, end)
            self._judge(verdict)
            if verdict.done:
                return Status.TRUNCATED if truncated else Status.COMPLETED
            if recording.num_turns >= (sampling.max_turns or MAX_TURNS):
                return Status.TRUNCATED
            if renderer.cannot_fit(verdict.messages, sampling.max_episode_tokens):
                return Status.TRUNCATED
            given = verdict.given_reply
            if bool(given) != recording.is_given:
                raise misused("an environment gives all replies of an episode, or none")
            answer = parsed.message if parsed else ChatMessage("assistant", reply)
            history.add(answer, verdict.messages)
            tools = history.inputs.tools if verdict.tools is None else verdict.tools
            if tools == history.inputs.tools:
                appended = history.continuation(recording.token_ids[-1])
                if appended is not None:
                    context = appended
                    continue
            # The template would write the beginning otherwise: the model reads all of it again.
            history.inputs = history.inputs._replace(tools=tools)
            await self._offer(history.inputs)
            context = history.prompt()
            if recording.room(sampling, is_new=True) <= len(context):
                return Status.TRUNCATED
            recording.begin_branch()

    async def _begin(self, opening: Opening, inputs: TemplateInputs) -> History:
        renderer, most = self._renderer, self._sampling.max_episode_tokens
        if renderer.cannot_fit(opening.messages, most):
            raise PromptTooLong(
                f"a prompt of {sum(message.num_characters for message in opening.messages)} "
                f"characters leaves no room within sampling.max_episode_tokens = {most}"
            )
        await self._offer(inputs)
        return History(renderer, opening.messages, inputs)

    async def _offer(self, inputs: TemplateInputs) -> None:
        """Sets the parser of replies to prompts that are rendered with `inputs`.

        Raises EnvironmentFailed for tools that this run cannot offer.
        """
        check_tools(inputs.tools, takes_tools=self._agents.takes_tools)
        self._reader = await self._play.ask(self._agents.reader(inputs))
        if self._reader is not None and inputs.tools:
            self._reader.check(inputs)

    async def _reply(self, history: History, given: str, most: int) -> tuple[list[int], bool]:
        """Returns a given reply, or one that is sampled and recorded, and whether it was cut."""
        if given:
            tokens = history.reply(given)
            return tokens[:most], len(tokens) > most
        generation = await self._play.generate(most)
        return self._recording.last_reply, generation.finish_reason is FinishReason.LENGTH

    def _read(
        self, before: list[int], said: list[int], inputs: TemplateInputs
    ) -> ParsedReply | None:
        """Returns the reply `said` as parsed by the run's parsers, or None if none is needed."""
        return None if self._reader is None else self._reader.read(before, said, inputs)

    def _judged(
        self, before: list[int], said: list[int], reply: str, parsed: ParsedReply | None
    ) -> ParsedReply | None:
        """Returns what the environment judges: `parsed`, with the thoughts told apart.

        A parser of thoughts has the last word.
        """
        if self._agents.reads_thoughts:
            return parsed
        return self._renderer.told_apart(before, said, reply, parsed)

    def _judge(self, verdict: Judgement) -> None:
        recording = self._recording
        recording.reward += verdict.whole_reward
        if not math.isfinite(recording.reward):
            raise misused(f"the rewards of an episode add up to {recording.reward}")
        try:
            recording.earn(-1, verdict.reward, verdict.token_rewards)
        except ValueError as error:
            raise misused(str(error)) from None
        recording.metrics.update(verdict.metrics)

    async def _check_images(self, new: Sequence[PlacedImage]) -> None:
        images = {*self._recording.images, *(image.data for image in new)}
        try:
            self._sampling.check_images(images)
            await check_pixels(new)
        except ValueError as error:
            raise RenderingFailed(str(error)) from error

    def _check_prompt(self, num_tokens: int) -> None:
        sampling = self._sampling
        limit = sampling.max_prompt_tokens
        if limit and num_tokens > limit:
            raise PromptTooLong(
                f"a prompt of {num_tokens} tokens is longer than "
                f"sampling.max_prompt_tokens = {limit}"
            )
        if num_tokens >= sampling.max_episode_tokens:
            raise PromptTooLong(
                f"a prompt of {num_tokens} tokens leaves no room for a reply within "
                f"sampling.max_episode_tokens = {sampling.max_episode_tokens}"
            )


class PromptTooLong(Exception):
    """Raised if the first messages exceed their limit or leave no room for a reply."""


class History:
    """The conversation of one episode.

    history = History(renderer, opening.messages, inputs)
    tokens = history.prompt()                   # before the first reply
    history.add(reply, verdict.messages)        # after each reply
    tokens = history.continuation(last_token)   # between this reply and the next; None: read all
    """

    def __init__(
        self, renderer: Renderer, messages: Sequence[ChatMessage], inputs: TemplateInputs
    ) -> None:
        self.inputs, self._renderer = inputs, renderer
        # `REPLY` stands where the model has replied; `_replies` are the replies in order.
        self._messages = list(messages)
        self._replies: list[ChatMessage] = []
        self._num_read = 0
        self._call_ids = {call.id for message in messages for call in message.tool_calls}
        # The images of the newest context, with their offsets in that context.
        self.images: list[PlacedImage] = []

    def add(self, reply: ChatMessage, messages: Sequence[ChatMessage]) -> None:
        """Adds a reply and the messages that follow it.

        Raises EnvironmentFailed for the result of an unknown tool call.
        """
        self._call_ids |= {call.id for each in (reply, *messages) for call in each.tool_calls}
        for message in messages:
            if message.tool_call_id and message.tool_call_id not in self._call_ids:
                raise misused(
                    f"tool_call_id must be the id of a call of the model, got "
                    f"{message.tool_call_id[:60]!r}"
                )
        self._messages.append(REPLY)
        self._replies.append(reply)
        self._num_read = len(self._messages)
        self._messages += messages

    def prompt(self) -> list[int]:
        """Returns the tokens of the whole conversation, replies included, as one prompt."""
        messages = self._whole(self._messages)
        return self._with_images(self._renderer.prompt(messages, self.inputs), messages)

    def reply(self, text: str, following: Sequence[ChatMessage] = ()) -> list[int]:
        """Returns the tokens of a reply with this text, with its end before `following`."""
        messages = self._messages
        return self._renderer.reply(text, messages, self.inputs, following=following)

    def continuation(self, last_token: int) -> list[int] | None:
        """Returns the tokens between the last reply and the next.

        `last_token` is the last token of that reply. Returns None if the template writes what
        follows calls of tools otherwise than behind the sampled tokens.
        """
        said, new = self._messages[: self._num_read], self._messages[self._num_read :]
        append = partial(self._renderer.continuation, inputs=self.inputs)
        if not any(reply.tool_calls for reply in self._replies):
            return self._with_images(append(said, new, last_token), new)
        whole = self._whole(self._messages)
        histories = [said]
        if not any(message.role == "tool" for message in new):
            # Some templates demand calls before earlier results, others fail with wrong calls.
            histories.insert(0, [*whole[: self._num_read - 1], REPLY])
        for history in histories:
            with contextlib.suppress(RenderingFailed):
                tokens = append(history, new, last_token, whole=whole)
                return self._with_images(tokens, new)
        return None

    def _with_images(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        tokens, self.images = self._renderer.with_images(tokens, messages)
        return tokens

    def _whole(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns `messages`, the first of the conversation, with replies in place of `REPLY`."""
        replies = iter(self._replies)
        return [next(replies) if each is REPLY else each for each in messages]
