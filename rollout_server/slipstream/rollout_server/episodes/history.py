"""The messages of one episode and its tools, as the chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.errors import EnvironmentFailed
from slipstream.core.models.vision.placed import PlacedImage
from slipstream.rollout_server.chat import REPLY, ChatMessage, TemplateInputs
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.v1 import trajectory_pb2


class History:
    """What was said in one episode.

    history = History(renderer, opening.messages, inputs)
    tokens = history.prompt()                   # before the first reply
    history.add(reply, verdict.messages)        # after each reply
    tokens = history.continuation(last_token)   # between this reply and the next one
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
        self._call_ids: set[str] = set()
        # The images of the newest context, by their places in it.
        self.images: list[PlacedImage] = []

    def add(self, reply: ChatMessage, messages: Sequence[ChatMessage]) -> None:
        """Adds a reply and what follows it; EnvironmentFailed for the result of an unknown call."""
        self._call_ids |= {call.id for call in reply.tool_calls}
        for message in messages:
            if message.tool_call_id and message.tool_call_id not in self._call_ids:
                raise EnvironmentFailed(
                    trajectory_pb2.FAILURE_KIND_ENVIRONMENT,
                    f"tool_call_id must be the id of a call of the model, got "
                    f"{message.tool_call_id[:60]!r}",
                )
        self._messages.append(REPLY)
        self._replies.append(reply)
        self._num_read = len(self._messages)
        self._messages += messages

    def prompt(self) -> list[int]:
        """Returns the tokens of all messages, replies as messages too."""
        messages = self._whole(self._messages)
        return self._with_images(self._renderer.prompt(messages, self.inputs), messages)

    @property
    def can_continue(self) -> bool:
        """Whether what follows the last reply can be appended to its tokens."""
        new = self._messages[self._num_read :]
        has_results = bool(self.inputs.tools) and any(each.role == "tool" for each in new)
        return not has_results or self._renderer.has_place_for_results(self.inputs)

    def reply(self, text: str) -> list[int]:
        """Returns the tokens of a reply with this text, with the token that ends a reply."""
        return self._renderer.reply(text, self._messages, self.inputs)

    def continuation(self, last_token: int) -> list[int]:
        """Returns the tokens between the last reply and the next one, if it `can_continue`."""
        said, new = self._messages[: self._num_read], self._messages[self._num_read :]
        if self.inputs.tools and not self._renderer.has_place_for_results(self.inputs):
            # Earlier results stand behind their calls.
            said = [*self._whole(said[:-1]), REPLY]
        tokens = self._renderer.continuation(said, new, last_token, self.inputs)
        return self._with_images(tokens, new)

    def _with_images(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        tokens, self.images = self._renderer.with_images(tokens, messages)
        return tokens

    def _whole(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns the first messages with the replies in the place of their stand-ins."""
        replies = iter(self._replies)
        return [next(replies) if each is REPLY else each for each in messages]
