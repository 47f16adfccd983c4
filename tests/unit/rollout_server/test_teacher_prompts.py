"""What an environment lets the reference model read: from its answers to a trajectory."""

import dataclasses

import numpy as np
import pytest
from slipstream.client.environment import Environment, Message, ResetResult, StepResult
from slipstream.core.types import FailureKind, Status
from slipstream.protocol.codec import unpack_tokens
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.v1 import trajectory_pb2

BEGIN = 1
END = 2
REPLY = 3
A = 4
B = 5
C = 6


def asking(text: str) -> list[Message]:
    return [Message("user", text)]


@dataclasses.dataclass
class Taught(Environment[int]):
    """Gives a reply; a teacher reads more than "a" from the start on, or only in the end."""

    at_reset: str = ""
    at_step: str = ""
    reply: str = "b a"

    def tasks(self) -> range:
        return range(1)

    def reset(self, task: int) -> ResetResult:
        teacher_messages = asking(self.at_reset) if self.at_reset else ()
        return ResetResult(
            asking("a"),
            reply=self.reply,
            teacher_messages=teacher_messages,
        )

    def step(self, reply: str) -> StepResult:
        teacher_messages = asking(self.at_step) if self.at_step else ()
        return StepResult(1.0, teacher_messages=teacher_messages)


async def test_a_teacher_reads_its_own_prompt_before_the_same_reply(server) -> None:
    server.fleet.serve(Taught(at_reset="a b c"))
    (trajectory,) = await server.played(has_reference=True)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.token_ids.tolist() == [BEGIN, A, REPLY, B, A, END]
    teacher_prompt = unpack_tokens(trajectory.teacher_prompt)
    assert teacher_prompt.tolist() == [BEGIN, A, B, C, REPLY]


async def test_what_came_of_a_reply_takes_the_place_of_what_a_teacher_read_before(
    server,
) -> None:
    server.fleet.serve(Taught(at_reset="a b c", at_step="c"))
    (trajectory,) = await server.played(has_reference=True)
    teacher_prompt = unpack_tokens(trajectory.teacher_prompt)
    assert teacher_prompt.tolist() == [BEGIN, C, REPLY]


async def test_without_messages_for_it_a_teacher_reads_what_the_policy_reads(
    server,
) -> None:
    server.fleet.serve(Taught())
    (trajectory,) = await server.played(has_reference=True)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.teacher_prompt == b""


async def test_messages_that_no_model_reads_are_refused(server) -> None:
    server.fleet.serve(Taught(at_reset="a b c"))
    (trajectory,) = await server.played(max_attempts=1)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "a run has with algorithm.kl.coefficient > 0" in trajectory.failure.message


async def test_an_evaluation_has_no_teacher(server) -> None:
    server.fleet.serve(Taught(at_reset="a b c"))
    purpose = trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    (trajectory,) = await server.played(purpose=purpose)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.teacher_prompt == b""


async def test_replies_leave_room_for_what_the_teacher_reads(server) -> None:
    # The prompt of 29 tokens leaves room for 3 of the 32 of an episode.
    long_text = "a " * 27
    server.fleet.serve(Taught(at_reset=long_text, reply="b b b b"))
    (trajectory,) = await server.played(has_reference=True)
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.run_lengths == (3, 3)


@pytest.mark.parametrize(
    ("environment", "kind", "cause"),
    [
        (
            Taught(at_reset="a " * 31),
            FailureKind.PROMPT_TOO_LONG,
            "33 tokens for the reference model leaves no room for a reply",
        ),
        (
            Taught(at_step="a " * 28),
            FailureKind.ENVIRONMENT,
            "teacher_messages of 30 tokens .*max_episode_tokens = 32, got 33",
        ),
    ],
)
async def test_messages_without_room_are_refused(
    server, environment: Taught, kind: FailureKind, cause: str
) -> None:
    server.fleet.serve(environment)
    (trajectory,) = await server.played(max_attempts=1, has_reference=True)
    assert trajectory.failure.kind is kind
    with pytest.raises(AssertionError, match=cause):
        raise AssertionError(trajectory.failure.message)


async def test_messages_that_end_with_a_reply_are_refused(server) -> None:
    class Replying(Taught):
        def reset(self, task: int) -> ResetResult:
            given_reply = Message("assistant", "b")
            return ResetResult(
                asking("a"),
                reply="b",
                teacher_messages=[*asking("a"), given_reply],
            )

    server.fleet.serve(Replying())
    (trajectory,) = await server.played(max_attempts=1, has_reference=True)
    assert "teacher_messages of reset() ends with a reply" in trajectory.failure.message


def test_a_server_is_asked_about_the_replies_behind_the_teachers_prompt() -> None:
    recording = Recording()
    first_turn = [BEGIN, A, REPLY, B, END]
    second_turn = [C, REPLY, A, END]
    recording.token_ids = first_turn + second_turn
    recording.run_lengths = [3, 2, 2, 2]
    (sequence,) = recording.reference_sequences()
    assert list(sequence.token_ids) == recording.token_ids
    recording.teacher_prompt = [BEGIN, A, B, C, REPLY]
    (sequence,) = recording.reference_sequences()
    replies = recording.token_ids[3:]
    assert list(sequence.token_ids) == [*recording.teacher_prompt, *replies]
    sampled_places = np.flatnonzero(sequence.is_sampled)
    assert sampled_places.tolist() == [5, 6, 9, 10]
