"""Chat messages, as chat templates take them and as episodes keep them."""

import json
from typing import Any, NamedTuple, Self

from slipstream.v1 import environment_pb2

PLACEHOLDER = "slipstreamreplyplaceholder"


class ParsedToolCall(NamedTuple):
    """A tool call parsed from a reply; `arguments` is the model's text, perhaps invalid JSON."""

    id: str
    name: str
    arguments: str


class ChatMessage(NamedTuple):
    """One message of a conversation.

    `tool_call_id` names the call that a tool result answers. Only replies have `tool_calls` and
    `reasoning`. A message with images has texts and encoded images in `parts`, and no `content`.
    """

    role: str
    content: str
    tool_call_id: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()
    reasoning: str = ""
    parts: tuple[str | bytes, ...] = ()
    name: str = ""

    @classmethod
    def from_pb(cls, message: environment_pb2.ChatMessage) -> Self:
        """Returns the chat message that an environment sent as `message`."""
        parts = (part.image if part.HasField("image") else part.text for part in message.parts)
        return cls(
            message.role,
            message.content,
            message.tool_call_id,
            tuple(
                ParsedToolCall(call.id, call.name, call.arguments) for call in message.tool_calls
            ),
            message.reasoning,
            tuple(parts),
            message.name,
        )

    @property
    def images(self) -> tuple[bytes, ...]:
        return tuple(part for part in self.parts if isinstance(part, bytes))

    @property
    def num_characters(self) -> int:
        parts = [part for part in self.parts if isinstance(part, str)]
        parts += [text for call in self.tool_calls for text in (call.name, call.arguments)]
        return len(self.content) + len(self.reasoning) + sum(map(len, parts))

    def for_template(self) -> dict[str, Any]:
        """Returns the message in OpenAI's form, without optional fields that are empty.

        A marker stands for each image.
        """
        # Templates without images write a list as Python shows it.
        text = self.content or "".join(part for part in self.parts if isinstance(part, str))
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.images:
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in self.parts
            ]
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


# Stands for a reply whose tokens are known in a history; no template may change its text.
REPLY = ChatMessage("assistant", PLACEHOLDER)
# Stands for the result of a tool, with an id that every template takes.
RESULT = ChatMessage("tool", "slipstreamresultplaceholder", "slpstrm00")


def chat_messages(
    answer: environment_pb2.Observation | environment_pb2.Verdict,
) -> tuple[ChatMessage, ...]:
    """Returns the messages of an environment's answer."""
    return tuple(ChatMessage.from_pb(message) for message in answer.messages)


def teacher_messages(
    answer: environment_pb2.Observation | environment_pb2.Verdict,
) -> tuple[ChatMessage, ...]:
    """Returns the messages that the reference model reads in place of others; () if none."""
    return tuple(ChatMessage.from_pb(message) for message in answer.teacher_messages)


class ParsedReply(NamedTuple):
    """The parts of a reply that the run's parsers found; `content` is the remaining text."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()

    @property
    def message(self) -> ChatMessage:
        """The reply as a message of the conversation."""
        return ChatMessage(
            "assistant", self.content, tool_calls=self.tool_calls, reasoning=self.reasoning
        )


class ReplyEnding(NamedTuple):
    """How a reply ended.

    `by_model` says that the model ended it, with a token. Else a limit cut it, or the text `stop`
    ended it, which the text of the reply lacks.
    """

    by_model: bool = True
    stop: str = ""


# A reply that the model ended is complete.
ENDED_BY_MODEL = ReplyEnding()


class TemplateInputs(NamedTuple):
    """The inputs of a chat template in addition to messages, as JSON texts; "" means no input.

    `tools` is a list of function schemas, `values` an object of values by name.
    """

    tools: str = ""
    values: str = ""


NO_INPUTS = TemplateInputs()


def read_arguments(arguments: str) -> Any:  # noqa: ANN401 - JSON
    """Returns a tool call's arguments parsed from JSON, or the text itself if it is invalid."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
