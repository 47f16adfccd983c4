"""What is told and counted of the data that a run is fed."""

from dataclasses import replace

import numpy as np
from slipstream.core.types import Purpose, Status, Trajectory
from slipstream.learner.controller.trajectories.feed import LOOKED_AT, Feed
from slipstream.v1 import environment_pb2
from support.fakes.fake_trajectories import make_trajectory
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of


class Scene:
    """A feed of one environment."""

    def __init__(self) -> None:
        self.run = run_of(environments=[{"name": "e", "reference": "ours:Sums"}])
        books = books_of(self.run)
        books.environments.add(environment_pb2.EnvironmentSpec(name="e", weight=1.0))
        self.feed = Feed(self.run, books)
        self.entry = books.environments.entries["e"]

    def note(self, status: Status = Status.COMPLETED, **metrics: float) -> None:
        self.feed.note(replace(episode(), status=status, metrics=metrics))

    @property
    def told(self) -> list[str]:
        return [event.text for event in self.run.events.kept()]


def episode() -> Trajectory:
    return replace(make_trajectory(4, 3), environment="e")


def test_a_judge_that_fails_is_told_once_and_counted() -> None:
    scene = Scene()
    for metrics in (
        {"judge_timeout": 0.0},
        *2 * [{"judge_timeout": 1.0}],
        {"right": 0.0},
    ):
        scene.note(**metrics)
    assert scene.told == [
        "environment e: the judge took too long for a reply, which then earned 0; summary.json "
        "counts such cases"
    ]
    assert scene.feed.summary() == {"e": {"episodes": 4, "judge_timeouts": 2}}


def test_many_unread_replies_are_told_with_how_many_were_cut() -> None:
    scene = Scene()
    for number in range(LOOKED_AT):
        assert not scene.told
        status = Status.TRUNCATED if number < LOOKED_AT // 4 else Status.COMPLETED
        scene.note(status, readable=float(number >= LOOKED_AT * 3 // 4))
    assert scene.told[0].startswith(
        f"environment e: 75% of the last {LOOKED_AT} replies hold no answer that the judge can "
        "read, and 25% were cut at a length limit"
    )
    numbers = {
        "truncated_episodes": LOOKED_AT // 4,
        "unreadable_replies": LOOKED_AT * 3 // 4,
    }
    assert scene.feed.summary() == {"e": {"episodes": LOOKED_AT, **numbers}}


def test_half_of_the_replies_unread_is_no_event() -> None:
    scene = Scene()
    for number in range(2 * LOOKED_AT):
        scene.note(well_formed=float(number % 2))
    assert not scene.told


def test_replies_of_an_evaluation_are_not_looked_at() -> None:
    scene = Scene()
    for _ in range(2 * LOOKED_AT):
        unread = replace(
            episode(), purpose=Purpose.EVALUATION, metrics={"readable": 0.0}
        )
        scene.feed.note(unread)
    assert not scene.told


def test_metrics_that_are_left_out_are_told_with_their_number() -> None:
    scene = Scene()
    for _ in range(2):
        scene.note(dropped_metrics=3.0)
    assert [text.partition(";")[0] for text in scene.told] == [
        "environment e: 3 metrics of an episode are left out: 16 are kept, each by the first 40 "
        "characters of its name"
    ]
    assert scene.feed.summary() == {"e": {"episodes": 2, "dropped_metrics": 6}}


def test_replies_that_stopped_at_no_end_are_told_once_with_their_number() -> None:
    scene = Scene()
    for _ in range(2):
        scene.note(replies_without_end=3.0)
    (message,) = scene.told
    assert message.startswith(
        "environment e: 3 replies of an episode stopped at none of the ends"
    )
    assert scene.feed.summary() == {"e": {"episodes": 2, "replies_without_end": 6}}


def test_a_program_that_took_another_course_is_told_once_and_counted() -> None:
    scene = Scene()
    for _ in range(2):
        scene.note(unasked_calls=3.0, recovered_calls=2.0)
    (message,) = scene.told
    assert "did not ask for 3 of its recorded calls" in message
    assert scene.feed.summary() == {"e": {"episodes": 2, "unasked_calls": 6}}


def test_tasks_of_an_environment_that_never_began_an_episode_are_counted() -> None:
    scene = Scene()
    assert scene.feed.summary() == {}
    scene.entry.tasks_skipped = 1000
    assert scene.feed.summary() == {"e": {"skipped_tasks": 1000}}


def test_members_that_read_different_prompts_are_told_and_counted() -> None:
    scene = Scene()
    member = episode()
    scene.feed.complete([member, replace(member, member=1)])
    tokens = member.token_ids.copy()
    tokens[5] += 1
    # Only what was sampled differs.
    scene.feed.complete([member, replace(member, token_ids=tokens)])
    assert not scene.told
    tokens = np.concatenate([member.token_ids[:1], member.token_ids])
    other = replace(member, token_ids=tokens, run_lengths=(5, 3))
    for _ in range(2):
        scene.feed.complete([member, member, other])
    assert scene.told == [
        "environment e: the 3 members of group g000123 read 2 different prompts, so their rewards "
        "cannot be compared; summary.json counts such cases"
    ]
    assert scene.feed.summary() == {"e": {"groups_with_unequal_prompts": 2}}
