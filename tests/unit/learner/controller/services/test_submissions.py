"""What clients may submit, and what readers see of it."""

from typing import Any

import pytest
from google.protobuf import json_format
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.services.environment_service import (
    EnvironmentServicer,
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
    return EnvironmentServicer(run, books, None), books.environments, run  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sections",
    [{"controller": {"address": "10.0.0.5:7070"}}, {"security": {"submitted_modules": ["ours"]}}],
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


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("math", ""),
        (
            "code",
            "adapter of e must stay 'math', got 'code': its leased groups are sampled with it; "
            "choose another name",
        ),
    ],
)
def test_an_environment_that_was_suspended_keeps_its_adapter(adapter: str, problem: str) -> None:
    lora = {"rank": 2, "publish": "adapters", "adapters": ["code", "math"]}
    run = run_of(lora=lora)
    books = books_of(run)
    entry = books.environments.add(submitted("e", adapter="math"))
    entry.state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
    servicer = EnvironmentServicer(run, books, None)  # type: ignore[arg-type]
    assert servicer._problem(submitted("e", adapter=adapter)) == problem


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("ours:Sums", ""),
        ("ours.below:Sums", ""),
        ("oursalike:Sums", "security.submitted_modules has no oursalike, only ours"),
        ("os:Sums", "security.submitted_modules has no os, only ours"),
    ],
)
def test_clients_submit_only_modules_that_the_run_allows(reference: str, problem: str) -> None:
    servicer, _, _ = submissions(security={"submitted_modules": ["ours"]})
    assert servicer._problem(submitted("e", reference=reference)) == problem


@pytest.mark.parametrize(
    ("address", "reference", "problem"),
    [
        ("127.0.0.1:7070", "os:Sums", ""),
        ("10.0.0.5:7070", "ours.below:Sums", ""),
        (
            "10.0.0.5:7070",
            "os:Sums",
            "security.submitted_modules has no os, only ours (those of the run's environments, "
            "since 10.0.0.5:7070 is not loopback)",
        ),
        (
            "10.0.0.5:7070",
            "slipstream.environments.command:Command",
            "security.submitted_modules has no slipstream.environments.command, only none (unless "
            "it is set: the arguments of an environment may name any program)",
        ),
    ],
)
def test_off_loopback_clients_submit_modules_of_the_runs_own_environments_by_default(
    address: str, reference: str, problem: str
) -> None:
    run = run_of(
        controller={"address": address},
        environments=[
            {"name": "e", "reference": "ours:Sums"},
            {"name": "c", "reference": "slipstream.environments.command:Command"},
        ],
    )
    assert run.config.submission_refusal(reference) == problem
