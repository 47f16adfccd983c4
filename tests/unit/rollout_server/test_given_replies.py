"""Replies that an environment gives: from its file to a trajectory, without the engine."""

import json
from pathlib import Path

import pytest
from slipstream.client.environment import Environment, Message, ResetResult, StepResult
from slipstream.core.types import FailureKind, PolicyVersion, Status, VersionSpan
from slipstream.environments.demonstrations import Demonstrations

A = 4
B = 5
C = 6
END = 2


def demonstrations(folder: Path, *turns: tuple[str, str]) -> Demonstrations:
    roles = ("user", "assistant")
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(roles, turn, strict=True)
    ]
    path = folder / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return Demonstrations(str(path))


async def test_the_replies_of_a_file_are_taken_as_if_they_had_been_sampled(
    server, tmp_path
):
    server.fleet.serve(demonstrations(tmp_path, ("a b", "b a"), ("c", "c")))
    connection = await server.leased(step=5, members=[0])
    (trajectory,) = await server.fleet.wait_trajectories(1)
    # <s> a b <reply> b a </s> c <reply> c </s>
    assert trajectory.token_ids.tolist() == [1, A, B, 3, B, A, END, C, 3, C, END]
    assert trajectory.run_lengths == (4, 3, 2, 2)
    assert trajectory.behavior_logprobs.tolist() == [0.0] * 5
    assert trajectory.version_spans == (VersionSpan(5, PolicyVersion(0, 5)),)
    assert trajectory.is_given
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0)
    assert not server.engine.samplings
    # The server's counters close: given tokens came into the run, and ended.
    beat = await connection.wait_quiet()
    assert (beat.generated_tokens, beat.ended_tokens) == (5, 5)


async def test_a_given_reply_is_cut_at_the_limit_like_any_other(
    server, tmp_path: Path
) -> None:
    server.fleet.serve(demonstrations(tmp_path, ("a", "a b c a b c")))
    (trajectory,) = await server.played()
    assert trajectory.token_ids.tolist() == [1, A, 3, A, B, C, A]
    assert (trajectory.status, trajectory.max_reply_tokens) == (Status.TRUNCATED, 0)


async def test_a_limit_of_the_environment_goes_with_its_episodes(
    server, tmp_path: Path
) -> None:
    environment = demonstrations(tmp_path, ("a", "a b c"))
    environment.max_reply_tokens = 2
    environment.expected_answer = "a b"
    server.fleet.serve(environment)
    (trajectory,) = await server.played()
    assert trajectory.run_lengths == (3, 2)
    assert (trajectory.status, trajectory.max_reply_tokens) == (Status.TRUNCATED, 2)
    assert trajectory.expected_answer == "a b"


class HalfGiven(Environment[int]):
    """Gives the first reply and wants the second one sampled."""

    def tasks(self) -> range:
        return range(1)

    def reset(self, task: int) -> ResetResult:
        return ResetResult([Message("user", "a")], reply="a")

    def step(self, reply: str) -> StepResult:
        return StepResult(done=False, messages=[Message("user", "b")])


async def test_an_episode_of_given_and_sampled_replies_fails(server) -> None:
    server.fleet.serve(HalfGiven())
    (trajectory,) = await server.played(max_attempts=1)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert (
        trajectory.failure.message
        == "an environment gives all replies of an episode, or none"
    )


@pytest.mark.parametrize(("reply", "shown"), [("", "''"), (3, "3")])
async def test_a_reply_that_is_no_text_is_refused(
    server, reply: object, shown: str
) -> None:
    class Wrong(HalfGiven):
        def reset(self, task: int) -> ResetResult:
            return ResetResult([Message("user", "a")], reply=reply)  # type: ignore[arg-type]

    server.fleet.serve(Wrong())
    (trajectory,) = await server.played(max_attempts=1)
    assert trajectory.failure.message.endswith(
        f"the reply of reset() must be None or a text that is not empty, got {shown}"
    )
