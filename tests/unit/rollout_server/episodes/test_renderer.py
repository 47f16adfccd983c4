import json
import resource
from pathlib import Path

import pytest
from slipstream.core.configuration.reply_ends import ReplyEnds
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.rollout_server.chat import (
    REPLY,
    ChatMessage,
    ParsedReply,
    ParsedToolCall,
    TemplateInputs,
)
from slipstream.rollout_server.episodes import renderer
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from support.fakes.chat_models import make_chat_tokenizer

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
NO_REPLIES = (
    "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }} {% endfor %}"
)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def with_template(folder: Path, template: str) -> Renderer:
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder)


def test_a_prompt_is_rendered_by_the_template(renderer) -> None:
    assert renderer.prompt([user("a b")]) == [1, 4, 5, 3]


def test_what_follows_a_reply_is_appended_and_ends_one_that_was_cut_off(
    tmp_path: Path,
) -> None:
    renderer = with_template(tmp_path, CHAT)
    assert renderer.prompt([user("a")]) == [1, 4, 2, 30, 3]
    # </s> was sampled: "0 <s> b </s> 0 <reply>" is left.
    later = [
        renderer.continuation([user("a"), REPLY], [user("b")], last)
        for last in (EOS, 17)
    ]
    assert later == [[30, 1, 5, 2, 30, 3], [2, 30, 1, 5, 2, 30, 3]]


def test_messages_that_the_template_refuses_or_cannot_take_fail(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, STRICT)
    with pytest.raises(RenderingFailed, match="no tools"):
        renderer.prompt([ChatMessage("tool", "a")])
    with pytest.raises(RenderingFailed, match="TypeError: unsupported operand"):
        renderer.prompt([ChatMessage("number", "a")])
    with pytest.raises(RenderingFailed, match="empty conversation"):
        renderer.prompt([])


def test_a_template_that_calls_itself_is_refused_in_one_line(tmp_path: Path) -> None:
    calls = "{% macro a() %}{{ a() }}{% endmacro %}"
    with pytest.raises(
        ConfigError, match="chat template in .* fails: RecursionError: [^\n]*$"
    ):
        with_template(tmp_path, calls + "{{ a() }}")
    later = with_template(
        tmp_path, calls + "{% if messages[0].content == 'b' %}{{ a() }}{% endif %}"
    )
    with pytest.raises(RenderingFailed, match="RecursionError"):
        later.prompt([user("b")])


JOINS = "{% set n = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"


@pytest.mark.parametrize(
    "template", ["{{ ('a' * 2000000000) | length }}", JOINS + "{% endfor %}"]
)
def test_a_template_that_takes_much_memory_is_refused_in_one_line(
    template, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ConfigError, match="chat template in .* fails: MemoryError"):
        with_template(tmp_path, template)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_template_that_does_not_end_is_refused_in_one_line(
    tmp_path: Path, monkeypatch
) -> None:
    # The kernel counts the processor time of the process.
    monkeypatch.setattr(renderer, "PROCESSOR_S", 0.1)
    loop = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match="fails: TemplateTooSlow: it took more than 0.1 s of pro"
    ):
        with_template(tmp_path, loop)


def test_a_template_that_drops_replies_cannot_continue(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, NO_REPLIES)
    with pytest.raises(RenderingFailed, match="leaves out"):
        renderer.continuation([user("a"), REPLY], [user("b")], EOS)


USER = "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
REST = "{% endif %}{% endfor %}{% if add_generation_prompt %}"
# The text that stands for a reply, the generation prompt, and what is trained of a reply "b".
GIVEN = {
    "ChatML": (
        "<|im_start|>assistant\n{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
        "b<|im_end|>",
    ),
    "an empty thought": (
        "<|im_start|>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nb<|im_end|>",
    ),
    "a thought that the prompt opens": (
        "<|im_start|>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
        "\n</think>\n\nb<|im_end|>",
    ),
    "a channel, and an end of its own for the last reply": (
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}",
        "<|start|>assistant",
        "<|channel|>final<|message|>b<|return|>",
    ),
    "a space": (" {{ m.content }}<|im_end|>", "", " b<|im_end|>"),
    "a last reply without an end": (
        "<|im_start|>assistant\n{{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}",
        "<|im_start|>assistant\n",
        "b<|im_end|>",
    ),
    "no end but the next message": (
        "<|reply|>{{ m.content }}",
        "<|reply|>",
        "b<|im_start|>",
    ),
    "no end at all": ("\nA: {{ m.content }}\nQ: ", "\nA:", " b<|im_end|>"),
    "two ends side by side": (
        "<|reply|>{{ m.content }}<|end|><|return|>",
        "<|reply|>",
        "b<|end|><|return|>",
    ),
    "two ends side by side of the last reply": (
        "<|reply|>{{ m.content }}<|end|>{% if loop.last %}<|return|>{% endif %}",
        "<|reply|>",
        "b<|end|>",
    ),
    "several ends": (
        "<|reply|>{{ m.content }}<|end|>\n{% if loop.last %}<|return|>{% endif %}",
        "<|reply|>",
        "b<|end|>",
    ),
}


def given_renderer(folder: Path, reply: str, prompt: str) -> Renderer:
    names = ("start", "end", "channel", "message", "return", "reply")
    template = f"{USER}{{% else %}}{reply}{REST}{prompt}{{% endif %}}"
    make_chat_tokenizer(folder, template, words=[f"<|{name}|>" for name in names])
    return Renderer(folder)


@pytest.mark.parametrize("name", list(GIVEN))
def test_a_given_reply_is_what_the_template_writes_behind_its_prompt(name, tmp_path):
    reply, prompt, trained = GIVEN[name]
    renderer = given_renderer(tmp_path, reply, prompt)
    for messages in ([user("a")], [user("a"), REPLY, user("c")]):
        assert renderer.decode_all(renderer.reply("b", messages)) == trained


def test_a_given_reply_is_refused_unless_the_template_continues_its_prompt(
    tmp_path: Path,
) -> None:
    reply, prompt, _ = GIVEN["ChatML"]
    renderer = given_renderer(tmp_path, reply, prompt + "<think>\n")
    with pytest.raises(
        RenderingFailed, match=r"ends with '.*assistant\\n<think>\\n': begin the"
    ):
        renderer.reply("b", [user("a")])
    token_ids = renderer.reply("<think>\nc\n</think>\nb", [user("a")])
    assert renderer.decode_all(token_ids) == "c\n</think>\nb<|im_end|>"


def test_what_the_template_writes_itself_is_refused_in_a_text(tmp_path: Path) -> None:
    make_chat_tokenizer(tmp_path)
    chat = Renderer(tmp_path)
    for text in ("b<|im_end|>", "b<|im_end|>\n<|im_start|>user\nc"):
        with pytest.raises(
            RenderingFailed, match="holds <|im_end|>, which the chat template"
        ):
            chat.reply(text, [user("a")])
    written = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(
        RenderingFailed, match="ends with '<|im_start|>assistant', as a template"
    ):
        chat.prompt([user(written)])
    assert chat.prompt([user("What is <|im_end|>?")])


def test_a_token_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    size = make_chat_tokenizer(tmp_path, words=["<|new|>"])
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert size - 1 in Renderer(tmp_path).prompt([user("<|new|>")])
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size - 1}))
    chat = Renderer(tmp_path)
    message = (
        rf"'<\|new\|>' is token {size - 1} of the tokenizer, and the model has "
        rf"only {size - 1}"
    )
    with pytest.raises(RenderingFailed, match=message):
        chat.prompt([user("<|new|>")])
    assert chat.prompt([user("a")])
    template = tmp_path / "mine.jinja"
    template.write_text("<|new|>{{ messages }}")
    with pytest.raises(
        ConfigError, match=f"chat_template: {template} fails: {message}"
    ):
        Renderer(tmp_path, template=template)


def test_texts_in_parts_are_one_text_and_a_name_is_written_or_refused(
    tmp_path: Path,
) -> None:
    make_chat_tokenizer(tmp_path)
    chat = Renderer(tmp_path)
    parts = ChatMessage("user", "", parts=("a", "b"))
    assert chat.prompt([parts]) == chat.prompt([user("ab")])
    chat_message = ChatMessage("user", "a", name="anna")
    with pytest.raises(
        RenderingFailed, match="leaves out the name 'anna' of a message of role"
    ):
        chat.prompt([chat_message])
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"
    )
    assert chat.decode_all(Renderer(tmp_path).prompt([chat_message])) == "anna: a"


@pytest.mark.parametrize("reply", ["{{ m.content }} [over]", '"{{ m.content }}"'])
def test_a_template_that_writes_words_before_the_end_is_refused(
    tmp_path: Path, reply
) -> None:
    renderer = given_renderer(tmp_path, f"<|reply|>{reply}<|end|>\n", "<|reply|>")
    with pytest.raises(
        RenderingFailed, match="writes .* between a reply and its end: name"
    ):
        renderer.reply("b", [user("a")])


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match="no chat template: name .* rollout_server.chat_template"
    ):
        Renderer(tmp_path)
    template = tmp_path / "mine.jinja"
    template.write_text(CHAT)
    assert Renderer(tmp_path, template=template).prompt([user("a")])


def test_a_template_that_writes_no_tools_is_found(tmp_path: Path) -> None:
    assert not with_template(tmp_path, CHAT).writes_tools
    tools = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    assert with_template(tmp_path, tools + CHAT).writes_tools
    refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    with pytest.raises(RenderingFailed, match="no tools"):
        assert with_template(tmp_path, refuses + CHAT).writes_tools


def test_a_value_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, TOOLS)
    message = (
        "chat_template_kwargs: the chat template does not read 'think'; did "
        "you mean 'thinks'?"
    )
    with pytest.raises(RenderingFailed) as failed:
        renderer.prompt(
            [user("a")], TemplateInputs(values='{"thinks": true, "think": false}')
        )
    assert str(failed.value) == message
    with pytest.raises(ConfigError) as refused:
        Renderer(tmp_path, values={"think": False})
    assert str(refused.value) == f"rollout_server.{message}"
    assert renderer.unread(["enable_x"]).endswith(
        "does not read 'enable_x'; leave it out"
    )
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    assert Renderer(tmp_path).unread(["thinks"]) == ""


def test_a_template_from_a_file_takes_the_place_of_the_tokenizers(
    tmp_path: Path,
) -> None:
    make_tokenizer(tmp_path)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}{% if thinks %} a{% endif %}<reply>")
    plain = Renderer(tmp_path, template=template)
    assert plain.decode_all(plain.prompt([user("b")])) == "b <reply>"
    thinking = Renderer(tmp_path, template=template, values={"thinks": True})
    assert thinking.decode_all(thinking.prompt([user("b")])) == "b a <reply>"
    template.write_text("{% if %}")
    with pytest.raises(
        ConfigError, match="rollout_server.chat_template: .*mine.jinja fails"
    ):
        Renderer(tmp_path, template=template)


def test_the_members_of_a_group_are_rendered_once_and_get_lists_of_their_own(
    renderer,
) -> None:
    rendered = renderer._prompt.cache_info().misses
    first = renderer.prompt([user("c d")])
    second = renderer.prompt([user("c d")])
    assert renderer._prompt.cache_info().misses == rendered + 1
    first.append(9)
    assert second == renderer.prompt([user("c d")]) == [1, 6, 7, 3]


def test_a_long_text_between_two_replies_is_not_kept(renderer) -> None:
    history = [user("a"), REPLY]
    renderer.continuation(history, [user("d")], EOS)
    size = renderer._tokens.cache_info().currsize
    assert len(renderer.continuation(history, [user("d " * 600)], EOS)) > 600
    assert renderer._tokens.cache_info().currsize == size


def test_a_text_for_readers_has_the_special_tokens(renderer) -> None:
    prompt = renderer.prompt([user("a b")])
    assert (renderer.decode_all(prompt), renderer.decode(prompt)) == (
        "<s> a b <reply>",
        "a b",
    )
    assert renderer.decode_all([]) == renderer.decode([]) == ""


# Like Qwen3: tools open the prompt, and the reasoning of earlier turns is left out.
TOOLS = (
    "{% if tools %}<s> {{ tools[0].function.name }} {% endif %}"
    "{% for m in messages %}<s> {% if m.reasoning_content and loop.last %}"
    "{{ m.reasoning_content }} {% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.arguments.x }}{% endfor %}"
    "{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %} </s> {% endfor %}"
    "{% if add_generation_prompt %}<reply>{% if thinks %} 1{% endif %}{% endif %}"
)
ADD = TemplateInputs(tools='[{"type": "function", "function": {"name": "d"}}]')


def test_tools_are_rendered_once_and_results_behind_the_sampled_tokens(
    tmp_path: Path,
) -> None:
    renderer = with_template(tmp_path, TOOLS)
    history = [user("a")]
    # <s> d <s> a </s> <reply>
    assert renderer.prompt(history, ADD) == [1, 7, 1, 4, 2, 3]
    assert renderer.prompt(history) == [1, 4, 2, 3]
    result = ChatMessage("tool", "b", "c")
    later = renderer.continuation([*history, REPLY], [result], EOS, ADD)
    # <s> b c </s> <reply>: the tools are not said again.
    assert later == [1, 5, 6, 2, 3]


def test_replies_as_messages_have_calls_and_the_template_decides_on_reasoning(
    tmp_path,
) -> None:
    renderer = with_template(tmp_path, TOOLS)
    reply = ChatMessage(
        "assistant",
        "e",
        tool_calls=(ParsedToolCall("1", "d", '{"x": "f"}'),),
        reasoning="g",
    )
    prompt = renderer.prompt([user("a"), reply, ChatMessage("tool", "b", "c")])
    assert renderer.decode_all(prompt) == "<s> a </s> <s> e f </s> <s> b c </s> <reply>"
    assert renderer.decode_all(renderer.prompt([reply])) == "<s> g e f </s> <reply>"


def test_values_of_an_environment_come_before_those_of_the_run(tmp_path: Path) -> None:
    with_template(tmp_path, TOOLS)
    renderer = Renderer(tmp_path, values={"thinks": True})
    off = TemplateInputs(values='{"thinks": false}')
    assert renderer.prompt([user("a")]) == [1, 4, 2, 3, 31]
    assert renderer.prompt([user("a")], off) == [1, 4, 2, 3]
    assert renderer.continuation([user("a"), REPLY], [user("b")], EOS, off) == [
        1,
        5,
        2,
        3,
    ]


# Like Qwen's of two generations: the first drops a second system message, all drop other roles.
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') or "
    "m.role == 'system' and loop.first %}<s> {{ m.content }} </s> {% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("said", "left_out"),
    [
        (
            [ChatMessage("system", "a"), ChatMessage("system", "b"), user("c")],
            "'system', 'b'",
        ),
        # The text stands elsewhere too.
        ([user("a b"), REPLY, ChatMessage("system", "b"), user("c")], "'system', 'b'"),
        ([user("a"), ChatMessage("developer", "b"), user("c")], "'developer', 'b'"),
        (
            [
                user("a"),
                ChatMessage(
                    "assistant", "", tool_calls=(ParsedToolCall("1", "f", "{}"),)
                ),
            ],
            "the calls of f in a message of role 'assistant'",
        ),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    said, left_out, tmp_path
) -> None:
    renderer = with_template(tmp_path, FIRST_SYSTEM)
    assert renderer.prompt([ChatMessage("system", "a"), user("b")])
    with pytest.raises(RenderingFailed, match=f"leaves out .*{left_out}"):
        renderer.prompt(said)


def test_a_later_message_that_the_template_leaves_out_is_refused(
    tmp_path: Path,
) -> None:
    renderer = with_template(tmp_path, FIRST_SYSTEM)
    messages = [user("a"), REPLY]
    assert renderer.continuation(messages, [user("a")], EOS)
    with pytest.raises(
        RenderingFailed, match="leaves out a message of role 'system', 'a'"
    ):
        renderer.continuation(messages, [user("b"), ChatMessage("system", "a")], EOS)


def test_a_prompt_gets_what_begins_a_reply_where_the_template_leaves_it_out(
    tmp_path: Path,
) -> None:
    """Such templates know no generation prompt, and end a prompt as they end a reply."""
    template = FIRST_SYSTEM + "{% if add_generation_prompt %}<s> {% endif %}"
    messages = [user("a"), REPLY]
    prompt, asked_again = (
        renderer.decode_all(tokens)
        for renderer in [with_template(tmp_path, template)]
        for tokens in (
            renderer.prompt(messages[:1]),
            renderer.continuation(messages, [user("b")], EOS),
        )
    )
    assert (prompt, asked_again) == ("<s> a </s> <s>", "<s> b </s> <s>")
    renderer = with_template(tmp_path, FIRST_SYSTEM)
    assert renderer.decode_all(renderer.prompt(messages[:1])) == prompt
    assert (
        renderer.decode_all(renderer.continuation(messages, [user("b")], EOS))
        == asked_again
    )
    # Nothing begins a reply in this one, as in DialoGPT's.
    renderer = with_template(
        tmp_path, "{% for m in messages %}{{ m.content }} </s> {% endfor %}"
    )
    assert renderer.decode_all(renderer.prompt(messages[:1])) == "a </s>"
    assert (
        renderer.decode_all(renderer.continuation(messages, [user("b")], EOS))
        == "b </s>"
    )


# A reply is ended by what follows it, as GLM's are.
NEXT_ENDS = (
    "{% for m in messages %}{{ {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': "
    "'<|assistant|>'}[m.role] }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_given_reply_ends_as_what_follows_it_ends_it(tmp_path: Path) -> None:
    words = [f"<|{name}|>" for name in ("user", "observation", "assistant")]
    make_chat_tokenizer(tmp_path, NEXT_ENDS, words=words)
    renderer = Renderer(tmp_path)
    result = ChatMessage("tool", "7")
    for following, end in (
        ([], "user"),
        ([user("c")], "user"),
        ([result], "observation"),
    ):
        reply = renderer.reply("b", [user("a")], following=following)
        assert renderer.decode_all(reply) == f"b<|{end}|>"
    # The end is not said twice.
    between = renderer.continuation([user("a"), REPLY], [result], reply[-1])
    assert renderer.decode_all(between) == "\n7<|assistant|>\n"


@pytest.mark.parametrize(
    ("model_end", "trained_end"),
    [
        ("<|end|>", "<|end|>"),
        ("<|return|>", "<|end|><|return|>"),
        ("<|im_end|>", "<|end|><|return|>"),
    ],
)
def test_a_given_reply_has_no_mark_behind_the_first_at_which_sampling_ends(
    tmp_path: Path, model_end: str, trained_end: str
) -> None:
    reply, prompt, _ = GIVEN["two ends side by side"]
    renderer = given_renderer(tmp_path, reply, prompt)
    token_ids = {text: token_id for token_id, text in renderer.added.items()}
    renderer.ends = ReplyEnds(model=(token_ids[model_end],))
    tokens = renderer.reply("b", [user("a")])
    assert renderer.decode_all(tokens) == f"b{trained_end}"


def test_a_reply_before_a_result_needs_an_end_where_the_template_writes_none(
    tmp_path,
) -> None:
    inline = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make_chat_tokenizer(tmp_path, inline, words=["<|call_end|>"])
    renderer = Renderer(tmp_path)
    result = [ChatMessage("tool", "7")]
    reply = renderer.reply("b<|call_end|>", [user("a")], following=result)
    assert renderer.decode_all(reply) == "b<|call_end|>"
    with pytest.raises(
        RenderingFailed, match="no special token between a reply and the result"
    ):
        renderer.reply("b", [user("a")], following=result)


def parts(
    tmp_path: Path, template: str, words: list[str], reply: str
) -> ParsedReply | None:
    """What is told apart of a reply, whose marks `words` are special tokens."""
    from transformers import AutoTokenizer

    make_chat_tokenizer(tmp_path, template, words=words)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.save_pretrained(tmp_path)
    renderer = Renderer(tmp_path)
    token_ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    return renderer.told_apart(
        renderer.prompt([user("q")]), token_ids, renderer.decode(token_ids), None
    )


PLAIN = "{{ messages[0]['content'] }}<|im_start|>assistant\n"
HARMONY = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]


@pytest.mark.parametrize(
    ("template", "words", "reply", "parsed"),
    [
        (PLAIN, [], "just 7", None),
        (PLAIN, [], "<think>8?</think>7", ParsedReply("7", "8?")),
        # The template begins the thoughts: only it tells a cut reply from an answer.
        (
            PLAIN + "<think>\n",
            [],
            "8?</think>\n\n7<|im_end|>",
            ParsedReply("\n\n7", "8?"),
        ),
        (PLAIN + "<think>\n", [], "It is 7", ParsedReply("", "It is 7")),
        (PLAIN + "<think>\n\n</think>\n\n", [], "It is 7", None),
        # Marks that are special tokens, which no text of a reply has.
        (PLAIN, ["[THINK]", "[/THINK]"], "[THINK]8?[/THINK]7", ParsedReply("7", "8?")),
        (PLAIN, ["[THINK]", "[/THINK]"], "[THINK]7", ParsedReply("", "7")),
        (
            "{{ messages[0]['content'] }}<|start|>assistant",
            HARMONY,
            "<|channel|>analysis<|message|>8?<|end|><|start|>assistant<|channel|>final<|message|>7",
            ParsedReply("7", "analysis8?assistant"),
        ),
    ],
)
def test_thoughts_are_told_apart_by_the_template_and_the_familys_marks(
    template, words, reply, parsed, tmp_path
):
    assert parts(tmp_path, template, words, reply) == parsed


def test_what_a_parser_of_calls_has_left_is_told_apart_too(tmp_path: Path) -> None:
    make_chat_tokenizer(tmp_path)
    renderer = Renderer(tmp_path)
    calls = (ParsedToolCall("c", "add", "{}"),)
    read = ParsedReply("<think>8?</think>7", tool_calls=calls)
    assert renderer.told_apart([], [], "", read) == ParsedReply("7", "8?", calls)
