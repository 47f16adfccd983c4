"""The functions at which the timeline of a client's step looks."""

import functools
import importlib

import pytest

from benchmarks.controller.timeline import CALLS, MAINS, PARTS


@pytest.mark.parametrize("role", MAINS)
def test_the_functions_that_are_watched_exist(role: str) -> None:
    importlib.import_module(MAINS[role])
    for module, path, _ in CALLS[role]:
        names = path.split(".")
        watched = functools.reduce(getattr, names, importlib.import_module(module))
        assert callable(watched), f"{module}.{path}"


def test_each_part_ends_at_a_moment_that_is_noted() -> None:
    watched = {name for calls in CALLS.values() for _, _, name in calls}
    # The client itself notes the last one.
    assert {moment.partition(".")[0] for moment, _, _ in PARTS[:-1]} <= watched
