"""What clients may submit, and what readers see of it."""

import os
from typing import Any

import pytest
from google.protobuf import json_format
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.services.environment_service import (
    EnvironmentServicer,
    environment_specs,
)
from slipstream.learner.controller.tasks import EnvironmentBook
from slipstream.v1 import environment_pb2, trajectory_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of

OWN = {"name": "own", "reference": "ours:Sums", "num_workers": 200, "python": "bin/python"}


def submitted(name: str, **fields: Any) -> environment_pb2.EnvironmentSpec:
    values = {"reference": "ours:Sums", "weight": 1.0, "timeout_s": 1.0, "num_workers": 1}
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    return environment_pb2.EnvironmentSpec(name=name, purpose=purpose, **values | fields)


def submissions(**sections: Any) -> tuple[EnvironmentServicer, EnvironmentBook, Run]:
    run = run_of(environments=[OWN], **sections)
    books = books_of(run)
    for spec in environment_specs(run.config, search_path=os.getcwd()):
        books.environments.add(spec)
    return EnvironmentServicer(run, books, None), books.environments, run  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sections",
    [
        {"controller": {"address": "10.0.0.5:7070"}},
        {"security": {"submitted_modules": ["ours"]}},
    ],
    ids=["off loopback", "a list"],
)
@pytest.mark.parametrize("field", ["python", "search_path"])
def test_an_allowed_module_is_started_from_the_runs_own_place_alone(field, sections) -> None:
    servicer, book, _ = submissions(**sections)
    own = getattr(book.entries["own"].spec, field)
    assert own.startswith("/")
    assert servicer._problem(submitted("new", **{field: own})) == ""
    assert servicer._problem(submitted("new", **{field: ""})) == ""
    assert servicer._problem(submitted("new", **{field: f"{own}/evil"})) == (
        f"{field} must be empty or that of an environment of the run's settings, got '{own}/evil'"
    )


def test_on_loopback_without_a_list_any_place_will_do() -> None:
    servicer, _, _ = submissions()
    assert servicer._problem(submitted("new", python="/any", search_path="/any")) == ""


def test_submitted_environments_share_a_number_of_workers() -> None:
    # Those of the run's settings count for nothing.
    servicer, book, _ = submissions()
    assert servicer._problem(submitted("a", num_workers=256)) == ""
    book.add(submitted("a", num_workers=250))
    assert servicer._problem(submitted("b", num_workers=6)) == ""
    assert servicer._problem(submitted("b", num_workers=7)) == (
        "num_workers must be between 1 and 256 with the 250 of other submitted environments, got 7"
    )
    # A suspended one is replaced.
    book.entries["a"].state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
    assert servicer._problem(submitted("a", num_workers=256)) == ""


def test_what_an_earlier_start_allowed_is_judged_again() -> None:
    servicer, book, run = submissions(security={"submitted_modules": ["ours"]})
    history = RunHistory()
    for spec in (submitted("good"), submitted("bad", search_path="/tmp/evil")):
        history.submitted[spec.name] = json_format.MessageToJson(spec)
    servicer.restore(history)
    assert set(book.entries) == {"own", "good"}
    assert [each.text for each in run.events.kept()] == [
        "environment bad is not submitted again: search_path must be empty or that of an "
        "environment of the run's settings, got '/tmp/evil'"
    ]


def test_readers_do_not_see_the_arguments_of_an_environment() -> None:
    _, book, _ = submissions()
    entry = book.add(submitted("new", args_json='{"api_key": "sk-secret"}'))
    assert "sk-secret" not in str(entry.describe())
    assert entry.describe().spec.reference == "ours:Sums"
    assert "sk-secret" in entry.spec.args_json
