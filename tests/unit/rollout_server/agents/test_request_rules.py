"""The run's sampling holds, and the limits of an episode; a request is told what differs."""

import dataclasses

import pytest
from slipstream.rollout_server.agents.conversations import AgentCall, ConversationBranch
from slipstream.rollout_server.agents.request_rules import WAIT, Refusal, room, rule
from slipstream.rollout_server.engine_interface import Sampling

SAMPLING = Sampling(1.0, 0.9, 0, 100, 4, 500)
LIMITS = Sampling(1.0, 1.0, 0, 10, 4, 50, max_total_tokens=80, max_branches=2)
# Fields that vLLM's requests have.
FIELDS = (
    "model",
    "messages",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "tools",
    "tool_choice",
    "text",
    "response_format",
    "logit_bias",
    "min_tokens",
    "thinking",
    "truncation",
    "prompt_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "output_config",
    "reasoning",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "include",
    "system",
    "return_prompt_text",
    "return_token_offsets",
)
# Variables that a chat template reads that knows efforts of reasoning, or whether to reason, or
# neither.
EFFORTS = ("messages", "reasoning_effort", "documents", "persona")
SWITCH = ("messages", "enable_thinking")
NEITHER = ("messages",)


def ruled(body: dict, *, variables=EFFORTS, **others: object):
    return rule(body, SAMPLING, fields=FIELDS, variables=variables, **others)


def test_a_request_that_asks_for_nothing_is_told_nothing() -> None:
    body = {
        "model": "m",
        "messages": [],
        "temperature": 1,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["x"],
    }
    assert ruled(body) == (body, {})


FAILED_RESULT = {
    "type": "tool_result",
    "tool_use_id": "1",
    "content": "a",
    "is_error": True,
}


@pytest.mark.parametrize("seed", [0, 3])
def test_an_engine_that_drafts_takes_no_seed(seed: int) -> None:
    request_and_rest = ruled({"model": "m", "seed": seed}, has_drafts=True)
    assert request_and_rest == ({"model": "m"}, {"seed": "none (asked)"})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"temperature": 0.2}, "temperature=1 (asked 0.2)"),
        ({"top_p": 0.5}, "top_p=0.9 (asked 0.5)"),
        ({"top_k": 5}, "top_k=0 (asked 5)"),
        ({"min_p": 0.1}, "min_p=0 (asked 0.1)"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0 (asked 0.5)"),
        ({"presence_penalty": 0.5}, "presence_penalty=0 (asked 0.5)"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1 (asked 1.1)"),
        ({"response_format": {"type": "json_object"}}, "response_format=none (asked)"),
        ({"tool_choice": "required"}, "tool_choice=auto (asked)"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice=auto",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format=none (asked)"),
        ({"min_tokens": 5}, "min_tokens=none (asked)"),
        ({"logit_bias": {"5": -100}}, 'logit_bias=null (asked {"5": -100})'),
        ({"conversation": "conv_x"}, "conversation=none (asked)"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=none (asked)"),
        ({"return_prompt_text": True}, "return_prompt_text=none (asked)"),
        ({"return_token_offsets": True}, "return_token_offsets=none (asked)"),
        (
            {
                "include": [
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                ]
            },
            'include=none (asked ["reasoning.encrypted_content"])',
        ),
        (
            {"modalities": ["text", "audio"], "audio": {"voice": "x"}},
            "modalities=none (asked); au",
        ),
        ({"functions": [{"name": "f"}]}, "functions=none (asked)"),
        ({"web_search_options": {}}, "web_search_options=none (asked)"),
        ({"min_p": 0.1, "frequency_penalty": 0.0}, "min_p=0 (asked 0.1)"),
        ({"max_token": 5}, "max_token=none (asked)"),
        ({"a b\n": 5}, "others=none (asked)"),
        ({"text": {"verbosity": "low"}}, "text.verbosity=none (asked)"),
        (
            {"output_config": {"effort": "low", "a b": 1}},
            "output_config.others=none (asked)",
        ),
        (
            {"tools": [{"function": {"name": "f", "strict": True}}]},
            "tools.strict=none (asked)",
        ),
        (
            {"tools": [{"name": "f", "input_examples": [{}]}]},
            "tools.input_examples=none (asked)",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            'server_tools=none (asked ["web_search"])',
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking.budget_tokens=none",
        ),
        (
            {"messages": [{"role": "assistant", "refusal": "no"}]},
            "messages.refusal=none (asked)",
        ),
        (
            {"messages": [{"function_call": {"name": "f"}}]},
            "messages.function_call=none (asked)",
        ),
        (
            {"messages": [{"content": [FAILED_RESULT]}]},
            "tool_result.is_error=none (asked)",
        ),
        ({"tool_choice": "any"}, "tool_choice=auto (asked)"),
        ({"truncation": "auto"}, 'truncation="disabled" (asked)'),
        ({"temperature": "hot\nhead\u00e9"}, 'temperature=1 (asked "hot'),
    ],
)
def test_what_was_asked_otherwise_is_told(asked, told) -> None:
    _, unmet = ruled(asked)
    header = "; ".join(f"{name}={value}" for name, value in unmet.items())
    assert header.startswith(told)
    assert header.isascii()
    assert "\n" not in header


@pytest.mark.parametrize(
    ("asked", "variables", "told"),
    [
        ({"reasoning_effort": "low"}, EFFORTS, {}),
        ({"reasoning_effort": "low"}, NEITHER, {"reasoning_effort": "none (asked)"}),
        (
            {"reasoning_effort": "low"},
            SWITCH,
            {"reasoning_effort": 'enable_thinking (asked "low")'},
        ),
        ({"reasoning_effort": "none"}, SWITCH, {}),
        ({"reasoning_effort": "none"}, NEITHER, {"reasoning_effort": "none (asked)"}),
        # The request's own switch holds, not the one that its effort would turn.
        (
            {
                "reasoning_effort": "none",
                "chat_template_kwargs": {"enable_thinking": True},
            },
            SWITCH,
            {"reasoning_effort": "none (asked)"},
        ),
        (
            {"reasoning": {"effort": "high"}},
            NEITHER,
            {"reasoning.effort": "none (asked)"},
        ),
        ({"reasoning": {}}, NEITHER, {}),
        (
            {"output_config": {"effort": "high"}},
            NEITHER,
            {"output_config.effort": "none (asked)"},
        ),
        (
            {"thinking": {"type": "disabled"}},
            NEITHER,
            {"thinking.disabled": "none (asked)"},
        ),
        ({"thinking": {"type": "disabled"}}, SWITCH, {}),
        ({"thinking": {"type": "adaptive"}}, NEITHER, {}),
        ({"documents": [{"text": "a"}]}, EFFORTS, {}),
        ({"documents": [{"text": "a"}]}, SWITCH, {"documents": "none (asked)"}),
        ({"documents": []}, SWITCH, {}),
        ({"chat_template_kwargs": {"persona": "x"}}, EFFORTS, {}),
        (
            {
                "chat_template_kwargs": {
                    "persona": "x",
                    "enable_thinkin": False,
                    "a b": 1,
                }
            },
            SWITCH,
            {
                "chat_template_kwargs.others": "none (asked)",
                "chat_template_kwargs.enable_thinkin": "none (asked)",
                "chat_template_kwargs.persona": "none (asked)",
            },
        ),
    ],
)
def test_what_the_chat_template_does_not_read_is_told(asked, variables, told) -> None:
    assert ruled(asked, variables=variables)[1] == told


def test_values_that_servers_set_or_nobody_reads_are_taken_out() -> None:
    values = {"messages": [], "persona": "x", "other": 1}
    body, messages = ruled({"chat_template_kwargs": values})
    assert body == {"chat_template_kwargs": {"persona": "x"}}
    assert [*messages] == [
        "chat_template_kwargs.messages",
        "chat_template_kwargs.other",
    ]


def test_a_system_prompt_that_is_no_text_is_refused() -> None:
    body = {"system": [{"type": "text", "text": "a"}, {"type": "image"}]}
    with pytest.raises(
        Refusal, match=r'system must hold text, got \["text", "image"\]'
    ):
        ruled(body)
    assert ruled({"system": "a"})[1] == ruled({"system": body["system"][:1]})[1]


def test_everything_that_is_ignored_is_named() -> None:
    request = {
        "temperature": 0.3,
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "conversation": {"id": "conv_x"},
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
        "modalities": ["text"],
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "store": True,
        "metadata": {"a": "b"},
        "n": 1,
        "made_up": None,
    }
    body, messages = ruled(request)
    assert [*messages] == [
        "temperature",
        "response_format",
        "conversation",
        "tool_choice",
        "server_tools",
    ]
    assert not {"conversation", "response_format"} & body.keys()


def test_what_would_constrain_the_reply_is_taken_out() -> None:
    request = {
        "response_format": {"type": "json_object"},
        "bad_words": ["x"],
        "kv_transfer_params": {"prompt_token_ids": [1]},
        "text": {"format": {"type": "json_schema"}, "verbosity": "low"},
        "tool_choice": {"type": "any"},
    }
    body, _ = ruled(request)
    assert body == {"text": {}, "tool_choice": {"type": "auto"}}
    assert request["response_format"] == {"type": "json_object"}, (
        "the request itself is unchanged"
    )


def test_a_field_that_only_a_newer_engine_has_is_taken_out_and_named() -> None:
    body = {"model": "m", "messages": [], "next_constraint": {"words": ["x"]}}
    request, unmet = rule(
        body,
        SAMPLING,
        fields=(*FIELDS, "next_constraint"),
        variables=EFFORTS,
    )
    assert request == {"model": "m", "messages": []}
    assert unmet == {"next_constraint": "none (asked)"}


SCHEMA = {
    "type": "json_schema",
    "name": "answer",
    "schema": {},
    "strict": True,
}
NESTED_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {}, "strict": True},
}
FREE_SCHEMA = {
    "type": "json_schema",
    "schema": {},
}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"response_format": NESTED_SCHEMA}, "response_format"),
        ({"text": {"format": SCHEMA}}, "text.format"),
        ({"output_format": FREE_SCHEMA}, "output_format"),
        ({"output_config": {"format": FREE_SCHEMA}}, "output_config.format"),
    ],
)
def test_a_reply_that_must_keep_a_form_is_refused_with_the_reason(
    body: dict, name: str
) -> None:
    with pytest.raises(
        Refusal, match=f"^{name} asks for a reply that keeps a form"
    ) as caught:
        ruled({"model": "m", **body})
    refusal = caught.value
    assert refusal.status == 400
    assert refusal.param == name


FORMS = {
    "structured_outputs": {"choice": ["yes", "no"]},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": "root ::= a",
    "structural_tag": {"structures": []},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": "root ::= a",
    "grammar": "root ::= a",
}


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_engines_are_refused_by_their_names(name: str) -> None:
    with pytest.raises(Refusal, match=f"^{name} asks for a reply that keeps a form"):
        ruled({"model": "m", name: FORMS[name]})


@pytest.mark.parametrize("kind", ["structural_tag", "regex", "grammar"])
def test_formats_of_engines_are_refused(kind: str) -> None:
    reply_format = {"type": kind}
    with pytest.raises(Refusal, match="^response_format asks"):
        ruled({"model": "m", "response_format": reply_format})
    with pytest.raises(Refusal, match="^text.format asks"):
        ruled({"model": "m", "text": {"format": reply_format}})


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_asks_for_nothing_is_served(name: str) -> None:
    body, ignored = ruled({"model": "m", name: None})
    assert body == {"model": "m"}
    assert not ignored


def test_a_schema_that_is_not_strict_is_told() -> None:
    _, ignored = ruled({"model": "m", "text": {"format": FREE_SCHEMA}})
    assert ignored == {"text.format": "none (asked)"}


def test_a_choice_that_is_not_forced_keeps_what_else_it_says() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body, _ = ruled({"tool_choice": choice})
    assert body == {"tool_choice": {**choice, "type": "auto"}}


def test_a_budget_of_thoughts_need_not_be_below_the_runs_limit_of_a_reply() -> None:
    body, _ = ruled(
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 3000}
    )
    assert body == {"thinking": {"type": "adaptive"}, "max_tokens": 100}


def test_a_result_of_a_tool_that_would_be_dropped_is_refused() -> None:
    result = {
        "type": "tool_result",
        "content": [{"type": "text", "text": "a"}],
        "is_error": False,
    }
    message = {"role": "user", "content": [result], "refusal": None}
    assert ruled({"messages": [message]}) == ({"messages": [message]}, {})
    result["content"] = [{"type": "document", "source": {"data": "b"}}]
    with pytest.raises(Refusal, match=r'hold text or images, got \["document"\]'):
        ruled({"messages": [message]})


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "max_output_tokens"]
)
def test_a_length_holds_below_the_runs(name: str) -> None:
    assert ruled({name: 7})[0] == {name: 7}
    assert ruled({name: 32_000})[0] == {name: 100}


@pytest.mark.parametrize(
    "asked", [{"n": 2}, {"best_of": 3}, {"use_beam_search": True}, {"background": True}]
)
def test_several_replies_and_those_in_the_background_are_refused(asked) -> None:
    with pytest.raises(Refusal, match=next(iter(asked))):
        ruled(asked)


def ask(
    *,
    prompt: int = 20,
    context: int = 20,
    is_new: bool = True,
    total: int = 80,
    **amounts: int,
):
    call = AgentCall(
        ConversationBranch(""), [0] * prompt, [0] * context, is_append=not is_new
    )
    amounts = (
        dict.fromkeys(("tokens", "reserved_tokens", "turns", "branches"), 0) | amounts
    )
    return room(dataclasses.replace(LIMITS, max_total_tokens=total), call, **amounts)


def test_a_reply_has_the_room_that_its_branch_and_all_branches_leave() -> None:
    assert ask() == 10
    assert ask(prompt=45, context=5, is_new=False) == 5
    assert ask(tokens=55) == 5
    # A branch that goes on is no new one.
    assert isinstance(ask(branches=2, is_new=False), int)


@pytest.mark.parametrize(
    ("asked", "code", "named"),
    [
        ({"prompt": 50}, "context_length_exceeded", "sampling.max_episode_tokens = 50"),
        ({"tokens": 60}, "context_length_exceeded", "sampling.max_total_tokens = 80"),
        (
            {"tokens": 40, "total": 0},
            "context_length_exceeded",
            "sampling.max_episode_tokens = 50",
        ),
        ({"turns": 4}, "max_turns_exceeded", "sampling.max_turns = 4"),
        ({"branches": 2}, "max_branches_exceeded", "sampling.max_branches = 2"),
    ],
)
def test_a_call_beyond_a_limit_is_refused_with_its_name(asked, code, named) -> None:
    refusal = ask(**asked)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (400, code)
    assert named in refusal.message


def test_a_call_waits_for_others_that_may_leave_room() -> None:
    assert ask(tokens=10, reserved_tokens=45) is WAIT
    assert ask(tokens=10, reserved_tokens=40) == 10
    assert ask(tokens=65, reserved_tokens=15) is not WAIT
