"""Chat templates as their publishers write them: what is read and trained is what they write.

Each template of tests/data/templates is tried with conversations. Every text must be the one that
the template itself writes for the whole conversation, or the conversation is refused in one line.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from slipstream.rollout_server.chat import (
    NO_INPUTS,
    ChatMessage,
    ParsedReply,
    ParsedToolCall,
    TemplateInputs,
)
from slipstream.rollout_server.episodes.environment_talk import History
from slipstream.rollout_server.episodes.renderer import TOOLS, Renderer, RenderingFailed
from support.fakes.chat_models import MARKS, SPECIAL_TOKENS, make_chat_tokenizer

FOLDER = Path(__file__).parents[3] / "data" / "templates"
# How families write special tokens; a tool's or thought's mark in angles alone is plain text.
TOKEN = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<｜[^｜]+｜>|</s>|\[/?[A-Z_]+\]|<seed:[be]os>"
    r"|<(?:beginning|end)_of_\w+>|\]~!?b\[?\]?|\[e~\["
)
EQUAL = "equal"
REFUSED = "refused"
ADDED = "added"
ANEW = "anew"


class Family(NamedTuple):
    """What becomes of a family's conversations, and its EOS.

    These are two turns, replies with thoughts, a call of a tool written as text with its result,
    and a parsed call with its result. Then two system messages at the start, one later, and the
    role `developer`.
    """

    turns: str
    thoughts: str
    text_call: str
    call: str
    two_systems: str
    late_system: str
    developer: str
    end: str


# A row a family; the columns are the fields of `Family`.
TABLE = """
apertus             equal   equal   refused added   refused refused refused <|assistant_end|>
apriel-1.6          refused refused refused added   equal   equal   refused <|end|>
bielik-3            equal   equal   equal   added   refused refused refused <|im_end|>
chatml              equal   equal   equal   added   equal   equal   equal   <|im_end|>
deepseek-r1-distill refused refused refused added   refused equal   refused <｜end▁of▁sentence｜>
deepseek-v3.1       equal   equal   equal   added   equal   equal   refused <｜end▁of▁sentence｜>
deepseek-v3.2       refused refused refused anew    equal   equal   refused <｜end▁of▁sentence｜>
devstral-small      equal   equal   equal   added   equal   equal   refused </s>
gemma-4             refused refused refused anew    equal   equal   equal   <turn|>
gigachat-3          equal   equal   equal   added   equal   equal   equal   <|message_sep|>
glm-4.5             equal   equal   equal   added   equal   equal   refused <|endoftext|>
glm-4.6             equal   equal   equal   added   equal   equal   refused <|endoftext|>
glm-4.7-flash       refused equal   refused added   equal   equal   refused <|endoftext|>
gpt-oss             equal   equal   refused anew    refused refused equal   <|return|>
granite-3.3         equal   equal   equal   added   equal   equal   equal   <|end_of_text|>
granite-4.0         equal   equal   equal   added   equal   equal   refused <|end_of_text|>
ling-3              equal   equal   equal   added   equal   equal   refused <|role_end|>
mimo-vl             equal   equal   equal   added   equal   equal   refused <|im_end|>
minimax-m1          equal   equal   equal   added   refused refused refused <end_of_sentence>
minimax-m2          refused equal   refused anew    refused refused refused [e~[
ministral-3         equal   equal   refused added   refused refused refused </s>
mistral-nemo        equal   equal   refused added   refused refused refused </s>
mistral-small-3.2   equal   equal   refused added   refused refused refused </s>
phi-3.5             equal   equal   refused refused equal   equal   refused <|end|>
phi-4               equal   equal   refused refused refused refused refused <|im_end|>
qwen2.5             equal   equal   equal   added   equal   equal   refused <|im_end|>
qwen3-2507          equal   equal   equal   added   equal   equal   refused <|im_end|>
qwen3-coder         equal   equal   equal   added   equal   equal   equal   <|im_end|>
qwen3-vl            equal   equal   equal   added   refused refused refused <|im_end|>
qwen3.5             equal   equal   equal   added   refused refused refused <|im_end|>
qwen3               equal   equal   equal   added   equal   equal   refused <|im_end|>
qwq                 refused refused refused added   equal   equal   refused <|im_end|>
seed-oss            equal   equal   equal   added   equal   equal   equal   <seed:eos>
smollm3             equal   equal   equal   added   refused refused refused <|im_end|>
smolvlm             refused refused refused refused refused refused refused <end_of_utterance>
step-3.5            equal   equal   equal   added   equal   equal   refused <|im_end|>
"""
FAMILIES = {
    name: Family(*fields)
    for name, *fields in map(str.split, TABLE.strip().splitlines())
}


class Template:
    """One template: through the product, and as transformers writes it."""

    def __init__(self, name: str, end: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        text = (FOLDER / f"{name}.jinja").read_text()
        words = {*TOKEN.findall(text), end, "<s>"} - {*SPECIAL_TOKENS, *MARKS}
        make_chat_tokenizer(folder, text, words=sorted(words), end=end, start="<s>")
        self.renderer = Renderer(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def text(
        self,
        messages: Sequence[ChatMessage],
        inputs: TemplateInputs,
        *,
        is_closed: bool = False,
    ) -> str:
        """Returns what transformers writes."""
        return str(
            self._tokenizer.apply_chat_template(
                [message.for_template() for message in messages],
                add_generation_prompt=not is_closed,
                tokenize=False,
                tools=json.loads(inputs.tools) if inputs.tools else None,
            )
        )

    @staticmethod
    def body(text: str) -> str:
        """Returns `text` without the one special token at its end, with white space before it."""
        return re.sub(rf"\s*(?:{TOKEN.pattern})\Z", "", text)

    def talk(
        self, turns: Sequence[tuple[ChatMessage, str]], last: Sequence[ChatMessage]
    ) -> str:
        """Follows given replies to the messages of `turns`; `last` follows the last reply."""
        history = History(self.renderer, [turns[0][0]], NO_INPUTS)
        messages = [turns[0][0]]
        decode = self.renderer.decode_all
        assert decode(history.prompt()) == self.text(messages, NO_INPUTS)
        for number, (_, reply) in enumerate(turns):
            prompt = self.text(messages, NO_INPUTS)
            following = (
                [turns[number + 1][0]] if number + 1 < len(turns) else list(last)
            )
            tokens = history.reply(reply, following)
            trained = decode(tokens)
            messages.append(ChatMessage("assistant", reply))
            # The trained text is what the template writes for a last reply, with its end there.
            body = self.body(trained)
            closed = self.text(messages, NO_INPUTS, is_closed=True)
            assert closed.startswith(prompt + body), (trained, closed)
            end = trained.removeprefix(body)
            if not closed.startswith(prompt + trained):
                # The reply has no end there: what follows the reply ends it, or a user's message.
                next_to = [*messages, *(following or [ChatMessage("user", "u")])]
                written = self.text(next_to, NO_INPUTS, is_closed=True)
                assert f"{body[-5:]}{end}" in written, (end, written)
            if number + 1 == len(turns):
                break
            history.add(ChatMessage("assistant", reply), following)
            between = history.continuation(tokens[-1])
            assert between is not None
            messages += following
            # The rest is the end of what the template writes, with one end before it.
            text = self.text(messages, NO_INPUTS)
            assert text.endswith(decode(between)), (between, text)
            assert self.body(text.removesuffix(decode(between))).endswith(reply[-5:]), (
                text
            )
        return EQUAL

    def call(self) -> str:
        """Returns how the result of a parsed call follows the sampled tokens."""
        inputs = TemplateInputs(TOOLS)
        call = ParsedToolCall("slpstrm00", "add", '{"a": 5}')
        messages = [
            ChatMessage("user", "q one"),
            ParsedReply("", tool_calls=(call,)).message,
        ]
        messages.append(ChatMessage("tool", "7 degrees", "slpstrm00"))
        history = History(self.renderer, messages[:1], inputs)
        history.add(messages[1], messages[2:])
        appended = history.continuation(0)
        text = self.renderer.decode_all(
            history.prompt() if appended is None else appended
        )
        whole = self.text(messages, inputs)
        assert "7 degrees" in text
        assert whole == text if appended is None else whole.endswith(text)
        return ANEW if appended is None else ADDED

    def prompt(self, *said: tuple[str, str]) -> str:
        """Renders a prompt in which no text may be missing."""
        messages = [ChatMessage(role, text) for role, text in said]
        text = self.renderer.decode_all(self.renderer.prompt(messages))
        assert text == self.text(messages, NO_INPUTS)
        assert all(part in text for _, part in said)
        return EQUAL


def outcome(tried: Callable[[], str]) -> str:
    try:
        return tried()
    except RenderingFailed as error:
        assert "\n" not in str(error)
        return REFUSED


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def family_of(template: Template, end: str) -> Family:
    """Returns what becomes of the conversations."""
    call = "add a is 5"
    result = ChatMessage("tool", "7 degrees")
    thought = "<think>\nhm\n</think>\n\n"
    return Family(
        outcome(
            lambda: template.talk(
                [(user("q one"), "r one"), (user("q two"), "r two")], []
            )
        ),
        outcome(
            lambda: template.talk(
                [
                    (user("q one"), f"{thought}r one"),
                    (user("q two"), f"{thought}r two"),
                ],
                [],
            )
        ),
        outcome(
            lambda: template.talk(
                [(user("q one"), call), (result, "r two!"), (user("q"), call)], [result]
            )
        ),
        outcome(template.call),
        outcome(
            lambda: template.prompt(("system", "s1"), ("system", "s2"), ("user", "q"))
        ),
        outcome(
            lambda: template.prompt(
                ("user", "q"), ("assistant", "r"), ("system", "s2"), ("user", "q2")
            )
        ),
        outcome(lambda: template.prompt(("developer", "s1"), ("user", "q"))),
        end,
    )


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_published_template_writes_what_is_read_and_trained_or_refuses(
    name, tmp_path
):
    expected = FAMILIES[name]
    template = Template(name, expected.end, tmp_path)
    assert family_of(template, expected.end) == expected


def test_every_template_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == FAMILIES.keys()
    assert len(FAMILIES) >= 30
