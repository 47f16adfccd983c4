"""The ends of a reply: from the tokenizer, the model's files, the chat template and settings."""

import json
from pathlib import Path

import pytest
from slipstream.core.configuration.reply_ends import (
    ReplyEnds,
    end_of_reply,
    find_reply_ends,
)
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.fakes.chat_models import make_chat_tokenizer
from support.fakes.small_configs import small_config

# Token ids of the tokenizer: `<pad>`, `<|im_start|>`, `<|im_end|>`, then marks, bytes and words.
PAD, START, END = range(3)
WORDS = ("<|eot|>", "<|next|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Nothing ends the last reply; a mark of the next turn follows others.
OPEN = (
    "{% for m in messages %}{% if m.role == 'user' %}<|next|>{% elif m.role == 'tool' %}<pad>"
    "{% else %}<|im_start|>{% endif %}{{ m.content }}{% endfor %}"
)
TWO_MARKS = "{% for m in messages %}{{ m.content }}<|eot|><|next|>{% endfor %}"


def settings(folder: Path, template: str, **tables: dict[str, object]) -> Config:
    make_chat_tokenizer(folder, template, words=WORDS, end="<pad>")
    model_table = {
        "model_type": "llama",
        "eos_token_id": START,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(model_table))
    return config_of(folder, **tables)


def config_of(folder: Path, **tables: dict[str, object]) -> Config:
    model = {
        "path": str(folder),
        "dtype": "float32",
    }
    return small_config(model=model, **tables)


def word(folder: Path, text: str) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    token_ids: dict[str, int] = tokenizer.get_added_vocab()
    return token_ids[text]


def test_ends_come_from_model_template_and_settings(tmp_path: Path) -> None:
    sampling = {
        "stop_token_ids": [7, 8],
        "stop": ["###", "a b"],
    }
    ends = find_reply_ends(settings(tmp_path, CHATML, sampling=sampling))
    assert ends.model == (PAD, START)
    assert ends.template == (END,)
    assert ends.stated == (7, 8)
    assert ends.token_ids == (PAD, START, END, 7, 8)
    assert ends.texts == ("###", "a b")
    assert ends.line == (
        "replies end at <pad> (0) and <|im_start|> (1) of the model, <|im_end|> (2) of the chat "
        "template, 7 and 8 of sampling.stop_token_ids, "
        'the texts "###" and "a b" of sampling.stop: programs that serve the model must pass them '
        "as `stop`"
    )


def test_the_generation_config_takes_the_place_of_the_model_s(tmp_path: Path) -> None:
    config = settings(tmp_path, CHATML)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    ends = find_reply_ends(config)
    # The template's end is among them.
    assert ends.model == (PAD, END, 9)
    assert ends.template == ()


def test_a_template_without_an_end_ends_a_reply_where_the_next_turn_begins(
    tmp_path: Path,
) -> None:
    config = settings(tmp_path, OPEN)
    assert find_reply_ends(config).template == (word(tmp_path, "<|next|>"),)
    # The mark of a tool's result is another one.
    template = OPEN.replace("<pad>", "<|eot|>")
    server = {"tool_parser": "hermes"}
    config = settings(tmp_path, template, rollout_server=server)
    next_mark = word(tmp_path, "<|next|>")
    result_mark = word(tmp_path, "<|eot|>")
    assert find_reply_ends(config).template == (next_mark, result_mark)


def test_the_last_of_several_marks_ends_a_reply(tmp_path: Path) -> None:
    ends = find_reply_ends(settings(tmp_path, TWO_MARKS))
    assert ends.template == (word(tmp_path, "<|next|>"),)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages[0].content }}"]
)
def test_a_template_that_writes_no_reply_has_no_end(
    tmp_path: Path, template: str
) -> None:
    assert find_reply_ends(settings(tmp_path, template)).template == ()


def test_only_stated_ends_hold_where_the_model_s_are_ignored(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        CHATML,
        debug={"ignore_eos": True},
        sampling={"stop_token_ids": [7]},
    )
    assert find_reply_ends(config).token_ids == (7,)
    config = settings(tmp_path, CHATML, debug={"ignore_eos": True})
    assert find_reply_ends(config).line == "replies end at their limits alone"


def test_the_template_has_no_part_in_a_client_s_own_loop(tmp_path: Path) -> None:
    config = settings(tmp_path, CHATML)
    controller = config.controller.model_copy(update={"client_loop": True})
    config = config.model_copy(update={"controller": controller})
    assert find_reply_ends(config).template == ()


def test_a_folder_without_a_tokenizer_has_the_model_s_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    ends = find_reply_ends(config_of(tmp_path))
    assert ends == ReplyEnds(model=(5,))


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = settings(tmp_path, CHATML)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(
        ConfigError, match="model.path: the tokenizer in .* is unreadable"
    ):
        find_reply_ends(config)


def test_several_marks_end_a_reply_only_if_they_do_so_everywhere() -> None:
    def marks(closing: str, before: str) -> list[str]:
        return end_of_reply(closing, lambda: before, ("<a>", "<b>"))

    assert marks("<a><b>", before="<a><b>\nnext") == ["<a>", "<b>"]
    assert marks("<a><b>", before="<a>\nnext") == ["<a>"]
    assert marks(" ", before="\n<b><a>") == ["<b>"]
    assert marks("", before="") == []
