"""Lines of output as JSON objects."""

import json
import logging
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from slipstream.core import logs
from slipstream.extensions.logs.lines import (
    MAX_TRACEBACK_LINES,
    JsonFormatter,
    as_objects,
    utc_time,
)

# 2026-01-31, noon, and a quarter of a second.
NOON_S = 1769860800.25
NOON = "2026-01-31T12:00:00.250Z"


def objects(lines: Iterable[str]) -> list[dict[str, Any]]:
    written = list(as_objects(lines, "server-0", "first", lambda: NOON_S))
    assert all("\n" not in line for line in written)
    return [json.loads(line) for line in written]


def record(message: str, **fields: object) -> logging.LogRecord:
    usual = {
        "name": "a.b",
        "levelno": logging.WARNING,
        "levelname": "WARNING",
        "created": NOON_S,
    }
    return logging.makeLogRecord(usual | {"msg": message} | fields)


def test_times_are_of_utc_with_milliseconds() -> None:
    assert utc_time(NOON_S) == NOON


def test_a_record_is_one_object_with_what_is_known() -> None:
    line = JsonFormatter("controller", "first", lambda: None).format(
        record("two\nlines \ud800")
    )
    assert "\n" not in line and line.isascii()
    assert json.loads(line) == {
        "time": NOON,
        "level": "WARNING",
        "process": "controller",
        "run": "first",
        "logger": "a.b",
        "message": "two\nlines \ud800",
    }


@pytest.mark.parametrize(
    ("own", "of_process", "step"),
    [
        (7, 3, 7),
        (None, 3, 3),
        (None, 0, 0),
    ],
)
def test_the_step_of_a_record_comes_before_that_of_its_process(
    own, of_process, step
) -> None:
    formatter = JsonFormatter("controller", "first", lambda: of_process)
    line = formatter.format(record("x", step=own))
    assert json.loads(line)["step"] == step


def test_an_exception_is_in_the_object_of_its_record() -> None:
    try:
        raise ValueError("five")
    except ValueError:
        caught = sys.exc_info()
    formatter = JsonFormatter("controller", "first", lambda: None)
    line = formatter.format(record("x", exc_info=caught))
    assert json.loads(line)["exception"].endswith("ValueError: five")


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("INFO 12-01 05:00:00 [core.py:1] loaded", "INFO"),
        ("(EngineCore_0 pid=7) WARNING 12-01 05:00:00 [core.py:1] slow", "WARNING"),
        ("2026-12-01 05:00:00,123 ERROR a.b: broken", "ERROR"),
        ("2026-12-01 05:00:00,123 rank 3 WARNING a.b: slow", "WARNING"),
        ("slipstream: no such file", "ERROR"),
        ("a print of INFO and ERROR ", "INFO"),
        ("INFORMATION", "INFO"),
    ],
)
def test_other_lines_keep_their_text_and_get_their_level(line: str, level: str) -> None:
    assert objects([line + "\n"]) == [
        {
            "time": NOON,
            "level": level,
            "process": "server-0",
            "run": "first",
            "message": line,
        }
    ]


def test_objects_of_a_formatter_keep_their_fields() -> None:
    line = JsonFormatter("rank", "other", lambda: 4).format(record("x"))
    assert objects([line]) == [json.loads(line)]


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1}',
        "{broken",
        '["time"]',
        '{"time": "", "level": "", "message": "", "x": 1}',
    ],
)
def test_json_that_no_formatter_made_is_text(line: str) -> None:
    assert [entry["message"] for entry in objects([line])] == [line]


def test_a_printed_traceback_is_one_object() -> None:
    traceback = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "",
        "ValueError: 5",
    ]
    entries = objects(["before", *traceback, "after"])
    assert [entry["message"] for entry in entries] == [
        "before",
        "\n".join(traceback),
        "after",
    ]
    assert [entry["level"] for entry in entries] == ["INFO", "ERROR", "INFO"]


def test_a_traceback_without_its_end_is_not_lost() -> None:
    begin = ["Traceback (most recent call last):", "  File"]
    assert [entry["message"] for entry in objects(begin)] == ["\n".join(begin)]
    endless = [begin[0], *["  again"] * MAX_TRACEBACK_LINES]
    messages = [entry["message"] for entry in objects(endless)]
    assert "\n".join(messages).count("again") == MAX_TRACEBACK_LINES


def test_no_line_is_empty() -> None:
    assert objects(["", "\r\n", "x"])[0]["message"] == "x"


def test_a_log_of_objects_reads_as_its_text() -> None:
    line = JsonFormatter("controller", "first", lambda: None).format(record("slow"))
    assert logs.as_text(line) == f"{NOON} WARNING a.b: slow"
    (other,) = as_objects(["slipstream: no"], "p", "r", lambda: NOON_S)
    assert logs.as_text(other) == "slipstream: no"
    for text in ("plain", "{broken", "{}", '{"message": 1'):
        assert logs.as_text(text) == text
