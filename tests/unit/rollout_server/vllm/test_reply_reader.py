"""Ids of calls in whole replies, as a parser of vLLM gives them."""

import pytest
from slipstream.rollout_server.vllm.reply_reader import WholeReply
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser


class Scripted(Parser):
    """A parser that finds one call, with an id that the model wrote."""

    found_id: str | None = None

    def parse(self, *_: object, **__: object) -> tuple[None, str, list[FunctionCall]]:
        return None, "", [FunctionCall(id=self.found_id, name="add", arguments="{}")]


@pytest.mark.parametrize(
    ("found_id", "stays"),
    [("é" * 512, True), ("é" * 513, False), ("", False), (None, False)],
)
def test_an_id_that_does_not_fit_into_a_message_is_replaced(
    found_id: str | None, stays: bool
) -> None:
    names = {"found_id": found_id, "__init__": lambda _: None}
    kind = type("Kind", (WholeReply, Scripted), names)
    kind.__abstractmethods__ = frozenset()
    _, _, (call,) = kind().parse("", ChatCompletionRequest(messages=[]))
    assert (call.id == found_id) is stays
    assert 0 < len(call.id.encode()) <= 1024
    assert (call.name, call.arguments) == ("add", "{}")
