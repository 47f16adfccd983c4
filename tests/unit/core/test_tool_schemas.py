import json
import math

import pytest
from slipstream.core.tool_schemas import MAX_TOOLS, read_tools, tools_json


def tool(name: object = "look", **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


def test_good_tools_travel_as_they_are() -> None:
    tools = [
        tool(),
        tool("take.it-1", description="Takes \u00e9.", parameters={"type": "object"}, strict=True),
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
        ([tool(), {"type": "function"}], "tools[1].function must be an object, got None"),
        ([tool("a b")], "tools[0].function.name must be 1 to 64 letters, digits and _.-, got"),
        ([tool("")], "tools[0].function.name must be 1 to 64 letters, digits and _.-, got ''"),
        ([tool("x" * 65)], "tools[0].function.name must be 1 to 64 letters"),
        ([tool(3)], "tools[0].function.name must be 1 to 64 letters, digits and _.-, got 3"),
        ([tool(), tool()], "tools[1].function.name must be unique, got 'look' again"),
        ([tool(description=3)], "tools[0].function.description must be a text, got 3"),
        (
            [tool(parameters={"a": "integer"})],
            "tools[0].function.parameters must be a JSON schema with type \"object\", got {'a'",
        ),
        ([tool(parameters=[])], "tools[0].function.parameters must be a JSON schema with type"),
        ([tool(more=object())], "tools must be JSON: Object of type object is not"),
        ([tool(more=math.nan)], "tools must be JSON: Out of range float values"),
    ],
)
def test_a_tool_that_breaks_a_rule_is_named_with_its_place(tools: object, rule: str) -> None:
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
