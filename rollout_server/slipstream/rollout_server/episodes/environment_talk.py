"""The turns of an episode whose environment judges replies.

Consumes: an opened session, replies of the model. Produces: tokens in the recording, a status.
Waits for: the environment and the model in turn. Unblocked by: their answers, or the task's
cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.core.models.vision.placed import PlacedImage, check_pixels
from slipstream.core.settings.sections import MAX_TURNS
from slipstream.core.types import REWARDED_TURNS, Status
from slipstream.rollout_server.agents.agent_api import Reader
from slipstream.rollout_server.chat import REPLY, ChatMessage, ParsedReply, TemplateInputs
from slipstream.rollout_server.engine_interface import FinishReason
from slipstream.rollout_server.episodes.calls import (
    Judgement,
    Opening,
    StreamSession,
    check_tools,
    misused,
)
from slipstream.rollout_server.episodes.play import Play
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
            if given:
                tokens = history.reply(given)
                end = FinishReason.LENGTH if len(tokens) > most else FinishReason.STOP
                generation = self._play.give(tokens[:most], end)
            else:
                generation = await self._play.generate(most)
            truncated = generation.finish_reason is FinishReason.LENGTH
            reply = recording.last_text = renderer.decode(recording.last_reply)
            parsed = self._read(history.inputs)
            judged = self._judged(reply, parsed)
            step = self._session.step(reply, truncated=truncated, parsed=judged)
            verdict = await self._play.ask(step)
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
            said = parsed.message if parsed else ChatMessage("assistant", reply)
            history.add(said, verdict.messages)
            tools = history.inputs.tools if verdict.tools is None else verdict.tools
            if tools == history.inputs.tools and history.can_continue:
                context = history.continuation(recording.token_ids[-1])
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

    def _read(self, inputs: TemplateInputs) -> ParsedReply | None:
        """Returns the last reply as parsed by the run's parsers, or None if no parser is needed."""
        if self._reader is None:
            return None
        tokens, reply = self._recording.conversation, self._recording.last_reply
        return self._reader.read(tokens[: len(tokens) - len(reply)], reply, inputs)

    def _judged(self, reply: str, parsed: ParsedReply | None) -> ParsedReply | None:
        """Returns what the environment judges: `parsed`, with the thoughts told apart.

        A parser of thoughts has the last word.
        """
        if self._agents.reads_thoughts:
            return parsed
        tokens, said = self._recording.conversation, self._recording.last_reply
        return self._renderer.told_apart(tokens[: len(tokens) - len(said)], said, reply, parsed)

    def _judge(self, verdict: Judgement) -> None:
        recording = self._recording
        recording.reward += verdict.reward
        if not math.isfinite(recording.reward):
            raise misused(f"the rewards of an episode add up to {recording.reward}")
        recording.num_rewarded += verdict.reward != 0.0
        if recording.num_rewarded > 1:
            recording.metrics[REWARDED_TURNS] = recording.num_rewarded
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
    tokens = history.continuation(last_token)   # between this reply and the next one
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

    @property
    def can_continue(self) -> bool:
        """Whether the messages after the last reply can be appended to its tokens."""
        new = self._messages[self._num_read :]
        has_results = bool(self.inputs.tools) and any(each.role == "tool" for each in new)
        return not has_results or self._renderer.has_place_for_results(self.inputs)

    def reply(self, text: str) -> list[int]:
        """Returns the tokens of a reply with this text, including the token that ends the reply."""
        return self._renderer.reply(text, self._messages, self.inputs)

    def continuation(self, last_token: int) -> list[int]:
        """Returns the tokens between the last reply and the next; call only if `can_continue`.

        `last_token` is the last token of that reply.
        """
        said, new = self._messages[: self._num_read], self._messages[self._num_read :]
        if self.inputs.tools and not self._renderer.has_place_for_results(self.inputs):
            # Earlier results follow their calls.
            said = [*self._whole(said[:-1]), REPLY]
        tokens = self._renderer.continuation(said, new, last_token, self.inputs)
        return self._with_images(tokens, new)

    def _with_images(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        tokens, self.images = self._renderer.with_images(tokens, messages)
        return tokens

    def _whole(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns `messages`, the first of the conversation, with replies in place of `REPLY`."""
        replies = iter(self._replies)
        return [next(replies) if each is REPLY else each for each in messages]
