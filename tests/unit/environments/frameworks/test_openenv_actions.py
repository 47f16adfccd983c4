import sys

import pytest
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.openenv import NoAction, action_maker, observation_text


def upper(reply: str) -> dict:
    if not reply:
        raise ValueError("nothing was said")
    return {"text": reply.upper()}


def not_fields(reply: str) -> str:
    return reply


def shown(observation: dict) -> str:
    return f"{len(observation)} fields"


HERE = "functions_of_a_user"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


@pytest.mark.parametrize(
    ("rule", "reply", "action"),
    [
        ({"message": "{reply}"}, "a {b}", {"message": "a {b}"}),
        ({"guess": "{number}"}, "3, no: -4", {"guess": -4}),
        ({"guess": "{number}"}, "007", {"guess": 7}),
        ({"guess": "{number}"}, "-0", {"guess": 0}),
        ({"guess": "{number}"}, "-05", {"guess": -5}),
        ({"guess": "{number}"}, "3 \u0664", {"guess": 3}),
        ({"guess": "{number}"}, "1.50", {"guess": 1.5}),
        ({"at": {"x": "{number}", "on": True}}, "5", {"at": {"x": 5, "on": True}}),
        ({"keys": ["{reply}", "n{number}"]}, "go 2", {"keys": ["go 2", "n2"]}),
        ("json", '{"a": [1]}', {"a": [1]}),
        ("json", 'First.\n```json\n{"a": 1}\n```\nor\n```\n{"a": 2}\n```', {"a": 2}),
        (f"{HERE}:upper", "up", {"text": "UP"}),
    ],
)
def test_a_reply_becomes_an_action(rule: object, reply: str, action: dict) -> None:
    assert action_maker(rule)(reply) == action


@pytest.mark.parametrize(
    ("rule", "reply"),
    [
        ({"guess": "{number}"}, "none"),
        ({"guess": "{number}"}, "9" * 5000),
        ({"guess": "{number}"}, "9" * 400 + ".5"),
        ("json", "not JSON"),
        ("json", "[1]"),
        ("json", '{"a": Infinity}'),
        ("json", '{"a": [1e999]}'),
        ("json", "[" * 100_000),
        (f"{HERE}:upper", ""),
    ],
)
def test_a_reply_may_be_no_action(rule: object, reply: str) -> None:
    with pytest.raises(NoAction):
        action_maker(rule)(reply)


def test_a_function_that_returns_no_fields_is_a_mistake_of_the_user() -> None:
    with pytest.raises(TypeError, match="must return the fields of an action, got 'x'"):
        action_maker(f"{HERE}:not_fields")("x")


@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        (
            {"message": "hello"},
            r"must name {reply} or {number} in a text, got {'message': 'hello'}",
        ),
        ("jsn", "action must be module:function, got 'jsn'"),
        ("no_such_module:f", "action: there is no module 'no_such_module'"),
        (f"{HERE}:f", "has no function 'f'"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(rule: object, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        action_maker(rule)


def test_an_observation_is_read_as_json_as_a_text_or_by_a_function() -> None:
    seen = {"hint": "more", "left": [1, 2], "metadata": {"secret": 1}}
    assert observation_text(None)(seen) == '{"hint": "more", "left": [1, 2]}'
    assert observation_text("{hint}: {left}")(seen) == "more: [1, 2]"
    assert observation_text(f"{HERE}:shown")(seen) == "3 fields"
    with pytest.raises(KeyError, match="no field 'hin'; its fields are hint, left, metadata"):
        observation_text("{hin}")(seen)
    with pytest.raises(ConfigError, match="must name a field of it as {FIELD}, got 'plain'"):
        observation_text("plain")
