from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import make_tokenizer
from slipstream.protocol.errors import ConfigError
from slipstream.rollout_server.chat import REPLY, ChatMessage
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed

EOS = 2
# Like ChatML: something follows the end of a reply ("0" stands for its line break).
CHAT = (
    "{% for m in messages %}{{ '<reply>' if m['role'] == 'assistant' else '<s>' }}"
    " {{ m['content'] }} </s> 0 {% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}"
    "{% if m['role'] == 'number' %}{{ m['content'] / 2 }}{% endif %}{{ m['content'] }}{% endfor %}"
)
NO_REPLIES = "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }} {% endfor %}"


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def with_template(folder: Path, template: str) -> Renderer:
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder)


def test_a_prompt_is_rendered_by_the_template(renderer) -> None:
    assert renderer.prompt([user("a b")]) == [1, 4, 5, 3]


def test_what_follows_a_finished_reply_is_appended_without_its_end(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, CHAT)
    assert renderer.prompt([user("a")]) == [1, 4, 2, 30, 3]
    # </s> was sampled: "0 <s> b </s> 0 <reply>" is left.
    later = renderer.continuation([user("a"), REPLY], [user("b")], EOS)
    assert later == [30, 1, 5, 2, 30, 3]


def test_a_reply_that_was_cut_off_is_ended(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, CHAT)
    later = renderer.continuation([user("a"), REPLY], [user("b")], 17)
    assert later == [2, 30, 1, 5, 2, 30, 3]


def test_every_turn_makes_the_conversation_that_the_template_would(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, CHAT)
    history, tokens = [user("a")], renderer.prompt([user("a")])
    for letter in "bcd":
        tokens += [9, EOS]
        history.append(REPLY)
        tokens += renderer.continuation(history, [user(letter)], EOS)
        history.append(user(letter))
    whole = [ChatMessage("assistant", "f") if m == REPLY else m for m in history]
    assert tokens == renderer.prompt(whole)


def test_replies_are_decoded_without_special_tokens(renderer) -> None:
    assert renderer.decode([4, 5, EOS]) == "a b"


def test_messages_that_the_template_refuses_or_cannot_take_fail(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, STRICT)
    with pytest.raises(RenderingFailed, match="no tools"):
        renderer.prompt([ChatMessage("tool", "a")])
    with pytest.raises(RenderingFailed, match="TypeError: unsupported operand"):
        renderer.prompt([ChatMessage("number", "a")])
    with pytest.raises(RenderingFailed, match="empty conversation"):
        renderer.prompt([])


def test_a_template_that_drops_replies_cannot_continue(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, NO_REPLIES)
    with pytest.raises(RenderingFailed, match="leaves out"):
        renderer.continuation([user("a"), REPLY], [user("b")], EOS)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tmp_path)


def test_a_template_from_a_file_takes_the_place_of_the_tokenizers(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}{% if thinks %} a{% endif %}<reply>")
    plain = Renderer(tmp_path, template=template)
    assert plain.decode_all(plain.prompt([user("b")])) == "b <reply>"
    thinking = Renderer(tmp_path, template=template, values={"thinks": True})
    assert thinking.decode_all(thinking.prompt([user("b")])) == "b a <reply>"
    template.write_text("{% if %}")
    with pytest.raises(ConfigError, match="rollout_server.chat_template: .*mine.jinja fails"):
        Renderer(tmp_path, template=template)


def test_the_members_of_a_group_are_rendered_once_and_get_lists_of_their_own(renderer) -> None:
    rendered = renderer._prompt.cache_info().misses
    first, second = renderer.prompt([user("c d")]), renderer.prompt([user("c d")])
    assert renderer._prompt.cache_info().misses == rendered + 1
    first.append(9)
    assert second == renderer.prompt([user("c d")]) == [1, 6, 7, 3]


def test_a_long_text_between_two_replies_is_not_kept(renderer) -> None:
    history = [user("a"), REPLY]
    renderer.continuation(history, [user("d")], EOS)
    kept = renderer._tokens.cache_info().currsize
    assert len(renderer.continuation(history, [user("d " * 600)], EOS)) > 600
    assert renderer._tokens.cache_info().currsize == kept


def test_a_text_for_readers_has_the_special_tokens(renderer) -> None:
    assert renderer.decode_all(renderer.prompt([user("a b")])) == "<s> a b <reply>"
    assert renderer.decode_all([]) == renderer.decode([]) == ""
