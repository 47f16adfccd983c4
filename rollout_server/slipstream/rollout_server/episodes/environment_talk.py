"""The turns of an episode whose environment judges replies.

Consumes: an opened session, replies of the model. Produces: tokens in the recording, a status.
Waits for: the environment and the model in turn. Unblocked by: their answers, or the task's
cancellation.
"""

import contextlib
import math
from collections.abc import Sequence
from functools import partial

from slipstream.core.models.images import PlacedImage, check_pixels
from slipstream.core.settings.sections import MAX_TURNS
from slipstream.core.types import Purpose, Status
from slipstream.rollout_server.chat import (
    REPLY,
    ChatMessage,
    ReplyEnding,
    TemplateInputs,
    chat_messages,
    teacher_messages,
)
from slipstream.rollout_server.engine_interface import FinishReason
from slipstream.rollout_server.episodes import calls
from slipstream.rollout_server.episodes.play import EpisodeAttempt, PromptTooLong, Reader
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from slipstream.v1 import environment_pb2


class EnvironmentTalk:
    """Alternates between one environment and the model; `run` may be called once."""

    def __init__(self, play: EpisodeAttempt, session: calls.StreamSession) -> None:
        self._play = play
        self._session = session
        self._recording = play.recording
        self._sampling = play.lease.sampling
        self._renderer = play.model.renderer
        self._agents = play.model.agents
        # What the reference model reads in place of the prompt.
        self._teacher = TeacherPrompt(play)
        # Reads replies; None if there is nothing to read in them.
        self._reader: Reader | None = None

    async def run(self, opening: environment_pb2.Observation) -> Status:
        """Plays the turns after `opening`; returns how the episode ended.

        Raises PromptTooLong, RenderingFailed, or what `EpisodeAttempt.ask` and
        `EpisodeAttempt.generate` raise.
        """
        renderer = self._renderer
        recording = self._recording
        sampling = self._sampling
        messages = chat_messages(opening)
        limit = sampling.max_episode_tokens
        if renderer.cannot_fit(messages, limit):
            characters = sum(message.num_characters for message in messages)
            raise PromptTooLong.for_reply(f"{characters} characters", limit)
        inputs = TemplateInputs(opening.tools_json, self._play.lease.template_values)
        await self._offer(inputs)
        history = History(renderer, messages, inputs)
        context = history.prompt()
        num_tokens = len(context)
        if sampling.max_prompt_tokens and num_tokens > sampling.max_prompt_tokens:
            raise PromptTooLong(
                f"a prompt of {num_tokens} tokens is longer than "
                f"sampling.max_prompt_tokens = {sampling.max_prompt_tokens}"
            )
        if num_tokens >= limit:
            raise PromptTooLong.for_reply(f"{num_tokens} tokens", limit)
        self._teacher.take(opening, inputs, after=num_tokens)
        if num_tokens + self._teacher.num_more_tokens >= limit:
            tokens = num_tokens + self._teacher.num_more_tokens
            raise PromptTooLong.for_reply(f"{tokens} tokens for the reference model", limit)
        reply_limit = min(opening.max_reply_tokens or math.inf, sampling.max_reply_tokens)
        given_reply = opening.given_reply
        recording.is_given = bool(given_reply)
        while True:
            room = recording.room(sampling) - len(context) - self._teacher.num_more_tokens
            if room < 1:
                # The environment has judged all replies so far.
                return Status.TRUNCATED
            await self._add_context(context, history.images)
            max_tokens = int(min(room, reply_limit))
            verdict, answer, truncated = await self._turn(history, given_reply, max_tokens)
            if verdict.done:
                return Status.TRUNCATED if truncated else Status.COMPLETED
            messages = chat_messages(verdict)
            if len(recording.sampled) >= (sampling.max_turns or MAX_TURNS):
                return Status.TRUNCATED
            if renderer.cannot_fit(messages, limit):
                return Status.TRUNCATED
            given_reply = verdict.given_reply
            if bool(given_reply) != recording.is_given:
                raise calls.misused("an environment gives all replies of an episode, or none")
            history.add(answer, messages)
            before = history.inputs.tools
            tools = {"": before, "[]": ""}.get(verdict.tools_json, verdict.tools_json)
            if tools == before:
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
            self._teacher.check_branches()

    async def _offer(self, inputs: TemplateInputs) -> None:
        """Sets the parser of replies to prompts that are rendered with `inputs`.

        Raises EnvironmentFailed for tools that this run cannot offer.
        """
        calls.check_tools(inputs.tools, takes_tools=self._agents.takes_tools)
        self._reader = await self._play.ask(self._agents.reader(inputs))

    async def _add_context(self, context: list[int], new: Sequence[PlacedImage]) -> None:
        images = {*self._recording.images, *(image.data for image in new)}
        try:
            self._sampling.check_images(images)
            await check_pixels(new)
        except ValueError as error:
            raise RenderingFailed(str(error)) from error
        self._recording.add_context(context, new)

    async def _turn(
        self, history: "History", given_reply: str, max_tokens: int
    ) -> tuple[environment_pb2.Verdict, ChatMessage, bool]:
        """Records a reply of at most `max_tokens` tokens, given or sampled, and its verdict.

        Returns the verdict, the reply as a message, and whether the reply was cut.
        """
        recording = self._recording
        before = list(recording.conversation)
        stop_text = ""
        if given_reply:
            tokens = history.reply(given_reply)
            reply_tokens = tokens[:max_tokens]
            truncated = len(tokens) > max_tokens
        else:
            generation = await self._play.generate(max_tokens)
            reply_tokens = generation.token_ids.tolist()
            truncated = generation.finish_reason is FinishReason.LENGTH
            stop_text = generation.stop_text
        reply = recording.last_text = self._renderer.decode(reply_tokens)
        # The tokens of a reply have its stop text, too.
        ending = ReplyEnding(by_model=not (truncated or stop_text))
        reader = self._reader
        parsed = (
            None
            if reader is None
            else reader.read(
                before,
                reply_tokens,
                history.inputs,
                ending,
            )
        )
        judged = parsed
        if not self._agents.reads_thoughts:
            # Without a parser of thoughts, which has the last word, the judge goes by their marks.
            judged = self._renderer.told_apart(before, reply_tokens, reply, parsed)
        step = self._session.step(
            reply,
            truncated=truncated,
            parsed=judged,
            token_ids=reply_tokens,
        )
        verdict = await self._play.ask(step)
        if given_reply:
            # The tokens that end the reply depend on what follows it.
            reply_tokens = history.reply(given_reply, chat_messages(verdict))[:max_tokens]
            self._play.give(reply_tokens)
        self._teacher.take(verdict, history.inputs, after=len(recording.token_ids))
        recording.reward += calls.whole_reward(verdict)
        calls.check_sum(recording.reward)
        try:
            recording.earn(-1, verdict.reward, verdict.token_rewards)
        except ValueError as error:
            raise calls.misused(str(error)) from None
        recording.metrics.update(verdict.metrics)
        return verdict, parsed.message if parsed else ChatMessage("assistant", reply), truncated


class TeacherPrompt:
    """What the reference model reads in place of the prompt, before the same replies."""

    def __init__(self, play: EpisodeAttempt) -> None:
        self._recording = play.recording
        self._renderer = play.model.renderer
        self._has_reference = play.lease.has_reference
        self._is_trained = play.lease.purpose is Purpose.TRAINING
        self._limit = play.lease.sampling.max_episode_tokens
        # How many tokens longer than the policy's prompt it is.
        self.num_more_tokens = 0

    def take(
        self,
        answer: environment_pb2.Observation | environment_pb2.Verdict,
        inputs: TemplateInputs,
        *,
        after: int,
    ) -> None:
        """Takes the messages of an `answer` that came behind so many tokens, if it has any.

        Raises EnvironmentFailed for messages that nothing reads or that have no room, and
        RenderingFailed.
        """
        messages = teacher_messages(answer)
        if not messages or not self._is_trained:
            return
        if not self._has_reference:
            raise calls.misused(
                "teacher_messages are for a reference model, which a run has with "
                "algorithm.kl.coefficient > 0"
            )
        if any(message.images for message in messages):
            raise calls.misused("teacher_messages must be text, got an image")
        recording = self._recording
        recording.teacher_prompt = self._renderer.prompt(messages, inputs)
        self.check_branches()
        num_tokens = len(recording.teacher_prompt)
        if not recording.run_lengths:
            self.num_more_tokens = max(0, num_tokens - after)
            return
        num_read = num_tokens + after - recording.run_lengths[0]
        if num_read > self._limit:
            raise calls.misused(
                f"teacher_messages of {num_tokens} tokens and the episode behind its prompt must "
                f"fit sampling.max_episode_tokens = {self._limit}, got {num_read}"
            )
        self.num_more_tokens = max(0, num_read - after)

    def check_branches(self) -> None:
        """Raises EnvironmentFailed if the episode has several conversations."""
        if self._recording.teacher_prompt and self._recording.ended_branches:
            raise calls.misused(
                "teacher_messages are of an episode with one conversation, which new tools or a "
                "template that writes earlier replies anew have ended"
            )


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
        self.inputs = inputs
        self._renderer = renderer
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
        self._call_ids |= {call.id for message in (reply, *messages) for call in message.tool_calls}
        for message in messages:
            if message.tool_call_id and message.tool_call_id not in self._call_ids:
                raise calls.misused(
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
        earlier = self._messages[: self._num_read]
        new = self._messages[self._num_read :]
        append = partial(self._renderer.continuation, inputs=self.inputs)
        if not any(reply.tool_calls for reply in self._replies):
            return self._with_images(append(earlier, new, last_token), new)
        full_messages = self._whole(self._messages)
        histories = [earlier]
        if not any(message.role == "tool" for message in new):
            # Some templates demand calls before earlier results, others fail with wrong calls.
            histories.insert(0, [*full_messages[: self._num_read - 1], REPLY])
        for history in histories:
            with contextlib.suppress(RenderingFailed):
                tokens = append(history, new, last_token, whole=full_messages)
                return self._with_images(tokens, new)
        return None

    def _with_images(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        tokens, self.images = self._renderer.with_images(tokens, messages)
        return tokens

    def _whole(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns `messages`, the first of the conversation, with replies in place of `REPLY`."""
        replies = iter(self._replies)
        return [next(replies) if message is REPLY else message for message in messages]
