"""Values and tools that a chat template takes."""

import json
import math

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.template_values import (
    MAX_TOOLS,
    read_template,
    read_tools,
    read_values,
    tools_json,
    values_json,
)


def test_values_travel_as_they_are() -> None:
    values = {"enable_thinking": False, "words": ["a", 1.5, None]}
    assert read_values(values_json(values)) == values
    assert values_json({}) == ""
    assert read_values("") == {}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"tools": []}, "chat_template_kwargs must not set 'tools', which servers set"),
        (
            {"chat_template": "{{ 1 }}"},
            "chat_template_kwargs must not set 'chat_template'",
        ),
        (
            {"a": object()},
            "chat_template_kwargs must be a JSON object: <object object at",
        ),
        ({"a": math.inf}, "chat_template_kwargs must be a JSON object: Out of range"),
    ],
)
def test_values_that_no_template_may_get_are_refused(values, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values_json(values)
    assert str(caught.value).startswith(rule)


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000, '{"messages": []}'])
def test_a_text_that_holds_no_values_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs must"):
        read_values(text)


def tool(name: object = "look", **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


def test_good_tools_travel_as_they_are() -> None:
    tools = [
        tool(),
        tool(
            "take.it-1",
            description="Takes \u00e9.",
            parameters={"type": "object"},
            strict=True,
        ),
    ]
    assert read_tools(tools_json(tools)) == tools
    assert tools_json(()) == "[]"


@pytest.mark.parametrize(
    ("tools", "rule"),
    [
        ("look", "tools must be a list of function schemas, got 'look'"),
        ({"look": 1}, "tools must be a list of function schemas, got {'look': 1}"),
        ([tool()] * (MAX_TOOLS + 1), "tools must be at most 128, got 129"),
        (["look"], "tools[0] must be an object with type \"function\", got 'look'"),
        ([{"name": "look"}], 'tools[0] must be an object with type "function", got {'),
        (
            [tool(), {"type": "function"}],
            "tools[1].function must be an object, got None",
        ),
        (
            [tool("a b")],
            "tools[0].function.name must be 1 to 64 letters, digits and _.-, got",
        ),
        (
            [tool("")],
            "tools[0].function.name must be 1 to 64 letters, digits and _.-, got ''",
        ),
        ([tool("x" * 65)], "tools[0].function.name must be 1 to 64 letters"),
        (
            [tool(3)],
            "tools[0].function.name must be 1 to 64 letters, digits and _.-, got 3",
        ),
        ([tool(), tool()], "tools[1].function.name must be unique, got 'look' again"),
        ([tool(description=3)], "tools[0].function.description must be a text, got 3"),
        (
            [tool(parameters={"a": "integer"})],
            "tools[0].function.parameters must be a JSON schema with type \"object\", got {'a'",
        ),
        (
            [tool(parameters=[])],
            "tools[0].function.parameters must be a JSON schema with type",
        ),
        ([tool(more=object())], "tools must be JSON: Object of type object is not"),
        ([tool(more=math.nan)], "tools must be JSON: Out of range float values"),
    ],
)
def test_a_tool_that_breaks_a_rule_is_named_with_its_place(
    tools: object, rule: str
) -> None:
    with pytest.raises(ValueError) as caught:
        tools_json(tools)
    assert str(caught.value).startswith(rule)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "tools must be JSON: "),
        ("[" * 100_000, "tools must be JSON: "),
        ('"look"', "tools must be a list"),
        (json.dumps([tool("a b")]), "tools[0].function.name must be"),
    ],
)
def test_tools_of_another_program_are_checked_too(text: str, rule: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_tools(text)
    assert str(caught.value).startswith(rule)


@pytest.mark.parametrize(
    ("data", "fault"),
    [(b" \n", " is empty"), (b"\xff", ": 'utf-8' codec"), (None, ": .* No such")],
)
def test_a_template_that_is_empty_or_cannot_be_read_is_named(
    data, fault, tmp_path
) -> None:
    path = tmp_path / "mine.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(
        ConfigError, match=f"^rollout_server.chat_template: {path}{fault}"
    ):
        read_template(path)
    path.write_text("{{ messages }}\n\n")
    assert read_template(path) == "{{ messages }}\n\n"
