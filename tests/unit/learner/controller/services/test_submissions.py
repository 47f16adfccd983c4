"""What a run asks of an environment that a client submits."""

import pytest
from slipstream.learner.controller.services.environment_service import EnvironmentServicer
from slipstream.v1 import environment_pb2, trajectory_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of


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
    run = run_of(lora={"rank": 2, "publish": "adapters", "adapters": ["code", "math"]})
    books = books_of(run)
    spec = environment_pb2.EnvironmentSpec(
        name="e",
        weight=1.0,
        timeout_s=1.0,
        num_workers=1,
        purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
        adapter="math",
    )
    entry = books.environments.add(spec)
    entry.state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
    again = environment_pb2.EnvironmentSpec()
    again.CopyFrom(spec)
    again.adapter = adapter
    assert EnvironmentServicer(run, books, None)._problem(again) == problem  # type: ignore[arg-type]


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
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    run = run_of(security={"submitted_modules": ["ours"]})
    spec = environment_pb2.EnvironmentSpec(
        name="e", reference=reference, weight=1.0, timeout_s=1.0, num_workers=1, purpose=purpose
    )
    servicer = EnvironmentServicer(run, books_of(run), None)  # type: ignore[arg-type]
    assert servicer._problem(spec) == problem


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
    ],
)
def test_off_loopback_clients_submit_modules_of_the_runs_own_environments_by_default(
    address: str, reference: str, problem: str
) -> None:
    run = run_of(
        controller={"address": address}, environments=[{"name": "e", "reference": "ours:Sums"}]
    )
    assert run.config.submission_refusal(reference) == problem
