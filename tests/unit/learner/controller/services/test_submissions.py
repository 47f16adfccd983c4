"""What clients may submit, and what readers see of it."""

import os
from typing import Any

import pytest
from google.protobuf import json_format
from slipstream.core.errors import ProtocolError
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.services import environment_service
from slipstream.learner.controller.services.environment_service import (
    EnvironmentServicer,
)
from slipstream.learner.controller.tasks import EnvironmentBook
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import environment_pb2, fleet_pb2, trajectory_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import joined, run_of

SUSPENDED = environment_pb2.ENVIRONMENT_STATE_SUSPENDED

OWN = {
    "name": "own",
    "reference": "ours:Sums",
    "num_workers": 200,
    "python": "bin/python",
}


def submitted(name: str, **fields: Any) -> environment_pb2.EnvironmentSpec:
    values = {
        "reference": "ours:Sums",
        "weight": 1.0,
        "timeout_s": 1.0,
        "num_workers": 1,
    }
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    return environment_pb2.EnvironmentSpec(
        name=name, purpose=purpose, **values | fields
    )


def orders(session: ServerSession) -> list[fleet_pb2.EnvironmentOrder]:
    found = []
    while (message := session.outbox.pop()) is not None:
        assert isinstance(message, fleet_pb2.ControllerMessage)
        found.append(message.environment)
    return found


def submissions(
    **sections: Any,
) -> tuple[EnvironmentServicer, EnvironmentBook, ControlledRun]:
    run = run_of(environments=[OWN], **sections)
    books = books_of(run)
    return EnvironmentServicer(run, books, None), books.environments, run  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"controller": {"address": "10.0.0.5:7070"}},
        {"security": {"submitted_modules": ["ours"]}},
    ],
    ids=["loopback", "off loopback", "a list"],
)
@pytest.mark.parametrize("field", ["python", "search_path"])
def test_an_allowed_module_is_started_from_the_runs_own_place_alone(
    field, sections
) -> None:
    servicer, book, _ = submissions(**sections)
    own_value = getattr(book.entries["own"].spec, field)
    assert own_value.startswith("/")
    assert servicer._problem(submitted("new", **{field: own_value})) == ""
    assert servicer._problem(submitted("new", **{field: ""})) == ""
    assert servicer._problem(submitted("new", **{field: f"{own_value}/evil"})) == (
        f"{field} must be empty, that of the run or one of security.submitted_paths, "
        f"got '{own_value}/evil'"
    )


def test_an_environment_without_a_teacher_is_refused_where_there_is_no_other_model() -> (
    None
):
    teachers = {"t": {"environments": ["own", "new"], "policy": True}}
    servicer, _, _ = submissions(
        algorithm={"kl": {"coefficient": 0.1}}, reference={"teachers": teachers}
    )
    assert servicer._problem(submitted("new")) == ""
    assert servicer._problem(submitted("other")).startswith(
        "other must be among the environments of a teacher (t)"
    )


def test_a_run_without_environments_has_its_working_directory() -> None:
    run = run_of(controller={"client_loop": True}, learner={"shared_prefix_tokens": 0})
    servicer = EnvironmentServicer(run, books_of(run), None)  # type: ignore[arg-type]
    assert servicer._problem(submitted("new", search_path=os.getcwd())) == ""
    assert "got '/evil'" in servicer._problem(submitted("new", search_path="/evil"))


def test_the_settings_allow_further_places() -> None:
    servicer, _, _ = submissions(
        security={"submitted_paths": ["/theirs", "venvs/b/bin/python"]}
    )
    own_python = f"{os.getcwd()}/venvs/b/bin/python"
    assert (
        servicer._problem(submitted("a", search_path="/theirs", python=own_python))
        == ""
    )
    for path in ("/theirs/below", "theirs", f"{own_python}3"):
        assert "security.submitted_paths" in servicer._problem(
            submitted("a", search_path=path)
        )
        assert "security.submitted_paths" in servicer._problem(
            submitted("a", python=path)
        )


def test_submitted_environments_share_a_number_of_workers() -> None:
    # Environments of the run's settings count for nothing.
    servicer, book, _ = submissions()
    assert servicer._problem(submitted("a", num_workers=256)) == ""
    book.add(submitted("a", num_workers=250))
    assert servicer._problem(submitted("b", num_workers=6)) == ""
    assert servicer._problem(submitted("b", num_workers=7)) == (
        "num_workers must be between 1 and 256 with the 250 of other submitted environments, got 7"
    )
    # A suspended one has none, and may be replaced.
    book.entries["a"].state = SUSPENDED
    for name in ("a", "b"):
        assert servicer._problem(submitted(name, num_workers=256)) == ""


def test_environments_that_were_suspended_make_room_for_others(monkeypatch) -> None:
    monkeypatch.setattr(environment_service, "MAX_ENVIRONMENTS", 4)
    servicer, book, _ = submissions()
    for name in ("a", "b", "c"):
        servicer._enter(submitted(name))
    assert servicer._problem(submitted("d")) == "a run has at most 4 environments"
    # An environment of the run's settings keeps its place.
    for name in ("own", "b", "c"):
        book.entries[name].state = SUSPENDED
    assert servicer._problem(submitted("d")) == ""
    servicer._enter(submitted("d"))
    assert list(book.entries) == ["own", "a", "c", "d"]
    # An environment that comes back takes its own place.
    servicer._enter(submitted("c"))
    assert list(book.entries) == ["own", "a", "c", "d"]
    assert servicer._problem(submitted("e")) == "a run has at most 4 environments"


def test_a_suspended_environment_has_no_workers_until_it_is_submitted_again() -> None:
    run = run_of(environments=[OWN])
    books = books_of(run)
    intake = Intake(run, books)
    servicer = EnvironmentServicer(run, books, intake)
    books.fleet.listeners = [servicer, intake]
    session = joined(books.fleet, "early")
    entry = books.environments.entries["own"]
    entry.loaded(session.key, 5)
    intake.suspend("own", "its last group failed")
    late = joined(books.fleet, "late")
    assert [order.unload for order in orders(session)] == [False, True]
    assert orders(late) == []
    # The report was under way.
    late_report = fleet_pb2.EnvironmentReport(environment="own", num_tasks=5)
    servicer.environment_reported(session, late_report)
    assert not entry.loaded_on
    again = servicer._enter(entry.spec)
    newest = joined(books.fleet, "newest")
    assert not again.is_suspended
    assert [order.spec.name for order in orders(newest)] == ["own"]


def test_what_an_earlier_start_allowed_is_judged_again() -> None:
    servicer, book, run = submissions(security={"submitted_modules": ["ours"]})
    history = RunHistory()
    for spec in (submitted("good"), submitted("bad", search_path="/tmp/evil")):
        history.submitted[spec.name] = json_format.MessageToJson(spec)
    servicer.restore(history)
    assert set(book.entries) == {"own", "good"}
    assert [event.text for event in run.events.kept()] == [
        "environment bad is not submitted again: search_path must be empty, that of the run or "
        "one of security.submitted_paths, got '/tmp/evil'"
    ]


def test_a_submission_that_another_release_journaled_ends_the_resume_in_one_line() -> (
    None
):
    servicer, _, _ = submissions()
    history = RunHistory()
    history.submitted["late"] = '{"name": "late", "reference": "ours:Sums", "gpus": 2}'
    with pytest.raises(ProtocolError) as caught:
        servicer.restore(history)
    line = str(caught.value)
    assert line.startswith(
        "the submitted environment late is of another release: Message type "
    )
    assert '"gpus"' in line
    assert "\n" not in line


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
def test_an_environment_that_was_suspended_keeps_its_adapter(
    adapter: str, problem: str
) -> None:
    lora = {"rank": 2, "publish": "adapters", "adapters": ["code", "math"]}
    run = run_of(lora=lora)
    books = books_of(run)
    entry = books.environments.add(submitted("e", adapter="math"))
    entry.state = SUSPENDED
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
def test_clients_submit_only_modules_that_the_run_allows(
    reference: str, problem: str
) -> None:
    servicer, _, _ = submissions(security={"submitted_modules": ["ours"]})
    assert servicer._problem(submitted("e", reference=reference)) == problem


@pytest.mark.parametrize(
    ("address", "reference", "problem"),
    [
        ("127.0.0.1:7070", "os:Sums", ""),
        (
            "127.0.0.1:7070",
            "slipstream.environments.command:Command",
            "security.submitted_modules has no slipstream.environments.command, only none (unless "
            "it is set: the arguments of an environment may name any program)",
        ),
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
def test_clients_submit_by_default_what_the_address_allows(
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
