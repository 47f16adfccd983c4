"""Messages that are found again in the tokens of prompts, by templates of all families."""

import re
from pathlib import Path

import pytest
from slipstream.extensions.rollouts.messages import (
    MessageReader,
    Unreadable,
    with_reply,
)
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.rollout_server.chat import NO_INPUTS, ChatMessage, TemplateInputs
from slipstream.rollout_server.episodes.renderer import TOOLS, Renderer, RenderingFailed
from support.fakes.chat_models import MARKS, SPECIAL_TOKENS, make_chat_tokenizer

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
# How families write special tokens.
TOKEN = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<｜[^｜]+｜>|</s>|\[/?[A-Z_]+\]|<seed:[be]os>"
    r"|<(?:beginning|end)_of_\w+>|\]~!?b\[?\]?|\[e~\["
)
QUESTION = ChatMessage("user", "How many are two and two?")
SYSTEM = ChatMessage("system", "Answer in\n\none word.")
NEXT = ChatMessage("user", "And three?")
# A template that takes no text alone.
NO_PROMPTS = {"smolvlm"}
# Templates that write a given reply otherwise than behind their generation prompt.
NO_REPLIES = {
    "apriel-1.6",
    "deepseek-r1-distill",
    "deepseek-v3.2",
    "gemma-4",
    "glm-4.7-flash",
    # The template writes the channel of a reply itself.
    "gpt-oss",
    "minimax-m2",
    "qwq",
    "smolvlm",
}
# Marks of thoughts that a template writes into a reply without any.
THOUGHTS = re.compile(r"(?:<think>)?\s*</think>\s*")


def family_renderer(name: str, folder: Path) -> Renderer:
    text = (TEMPLATES / f"{name}.jinja").read_text()
    words = set(TOKEN.findall(text))
    words.add("<s>")
    words.difference_update(SPECIAL_TOKENS, MARKS)
    make_chat_tokenizer(
        folder,
        text,
        words=sorted(words),
        start="<s>",
    )
    return Renderer(folder)


@pytest.fixture
def chat(tmp_path: Path) -> Renderer:
    make_chat_tokenizer(tmp_path)
    return Renderer(tmp_path)


def with_prompt(renderer: Renderer, messages: list[ChatMessage]) -> list[int]:
    """The prompt of messages, or [] if the template refuses them."""
    try:
        return renderer.prompt(messages)
    except RenderingFailed:
        return []


@pytest.mark.parametrize("name", sorted({*FAMILIES} - NO_PROMPTS))
def test_a_prompt_of_a_published_template_gives_its_messages_back(
    name, tmp_path: Path
) -> None:
    renderer = family_renderer(name, tmp_path)
    reader = MessageReader(renderer, NO_INPUTS)
    token_ids = renderer.prompt([QUESTION])
    assert reader.prompt(token_ids) == [QUESTION]
    token_ids = with_prompt(renderer, [SYSTEM, QUESTION])
    if token_ids:
        messages = reader.prompt(token_ids)
        assert renderer.prompt(messages) == token_ids
        assert messages[-1].content.endswith(QUESTION.content)


@pytest.mark.parametrize("name", sorted({*FAMILIES} - NO_REPLIES))
def test_a_second_turn_of_a_published_template_gives_its_messages_back(
    name, tmp_path
) -> None:
    renderer = family_renderer(name, tmp_path)
    reader = MessageReader(renderer, NO_INPUTS)
    question = [QUESTION]
    following = [NEXT]
    token_ids = renderer.reply(
        "Four.",
        question,
        following=following,
    )
    last_token = token_ids[-1]
    history = with_reply(question)
    between = renderer.continuation(history, following, last_token)
    messages = reader.following(history, last_token, between)
    assert messages == following
    content = reader.reply(token_ids, question, following)
    assert THOUGHTS.sub("", content) == "Four."
    again = renderer.reply(
        content,
        question,
        following=following,
    )
    assert again == token_ids


def test_a_tokenizer_of_words_gives_texts_without_its_own_spaces(
    tmp_path: Path,
) -> None:
    make_tokenizer(tmp_path)
    reader = MessageReader(Renderer(tmp_path), NO_INPUTS)
    question = [ChatMessage("user", "a b")]
    assert reader.prompt([1, 4, 5, 3]) == question
    assert reader.reply([6, 7, 2], question, []) == "c d"


def test_white_space_around_a_text_is_kept(chat: Renderer) -> None:
    spaced = ChatMessage("user", "\n  one\n")
    token_ids = chat.prompt([spaced])
    reader = MessageReader(chat, NO_INPUTS)
    assert reader.prompt(token_ids) == [spaced]


def test_earlier_replies_and_results_of_tools_are_messages_of_a_prompt(
    chat: Renderer,
) -> None:
    messages = [
        SYSTEM,
        QUESTION,
        ChatMessage("assistant", "<tool_call>add</tool_call>"),
        ChatMessage("tool", "4"),
        ChatMessage("assistant", "Four."),
        NEXT,
    ]
    token_ids = chat.prompt(messages)
    reader = MessageReader(chat, NO_INPUTS)
    assert reader.prompt(token_ids) == messages


def test_offered_tools_are_read_as_a_message_with_the_same_tokens(
    chat: Renderer,
) -> None:
    token_ids = chat.prompt([QUESTION], TemplateInputs(TOOLS))
    reader = MessageReader(chat, NO_INPUTS)
    messages = reader.prompt(token_ids)
    roles = [message.role for message in messages]
    assert roles == ["system", "user"]
    assert chat.prompt(messages) == token_ids


def test_tokens_that_the_template_writes_for_no_messages_are_unreadable(
    chat: Renderer,
) -> None:
    reader = MessageReader(chat, NO_INPUTS)
    token_ids = chat.prompt([QUESTION])
    last_token = token_ids[-1]
    history = with_reply([QUESTION])
    with pytest.raises(Unreadable, match="writes its prompt for no messages"):
        reader.prompt(token_ids[1:])
    with pytest.raises(Unreadable, match="what follows a reply"):
        reader.following(history, last_token, token_ids[:2])
    with pytest.raises(Unreadable, match="cannot be given again"):
        reader.reply(token_ids[:9], [QUESTION], [])
