import math

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.template_values import read_values, values_json


def test_values_travel_as_they_are() -> None:
    values = {"enable_thinking": False, "words": ["a", 1.5, None]}
    assert read_values(values_json(values)) == values
    assert values_json({}) == ""
    assert read_values("") == {}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"tools": []}, "chat_template_kwargs must not set 'tools', which servers set"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs must not set 'chat_template'"),
        ({"a": object()}, "chat_template_kwargs must be a JSON object: Object of type"),
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
