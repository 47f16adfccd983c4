"""Comparison of two states of a run, field by field."""

from dataclasses import fields

from slipstream.learner.controller.records.history import RunHistory


def different_field(state: RunHistory, other: RunHistory) -> str:
    """The first field in which two states differ, or "" if they are equal; orders count, too."""
    for name in (field.name for field in fields(RunHistory)):
        value = getattr(state, name)
        expected = getattr(other, name)
        if hasattr(value, "stored"):
            value = value.stored()
            expected = expected.stored()
        is_same = type(value) is type(expected) and value == expected
        if isinstance(value, dict):
            is_same = is_same and [*value] == [*expected]
        if not is_same:
            return name
    return ""
