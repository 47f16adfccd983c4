"""Compares the plays of a task with each other, where an environment judges groups."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slipstream.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    Ask = Callable[..., Awaitable[pb.WorkerMessage]]

Kind = TypeVar("Kind")


class ComparedPlay(Protocol):
    """What is compared of an episode, and what becomes of it."""

    earned: float
    failure: str
    is_done: bool
    metrics: dict[str, float]
    # The fields of the replies, as `step` got them.
    replies: list[dict[str, Any]]


Play = TypeVar("Play", bound=ComparedPlay)


async def compare_tasks(
    ask: Ask,
    indices: Iterable[int],
    plays: Mapping[Kind, dict[int, Play]],
    *,
    until_s: float,
) -> set[tuple[Kind, int]]:
    """Lets the environment compare the plays of each of its tasks, as if they were one group.

    `plays` are by kind and task. The first task's are compared in any case. Behind the monotonic
    time `until_s` those of a task are taken out, because what they earn is not known; they are
    returned by kind and task.
    """
    left_out: set[tuple[Kind, int]] = set()
    for place, index in enumerate(indices):
        kinds = [kind for kind, by_task in plays.items() if index in by_task]
        if not place or time.monotonic() < until_s:
            await _compare(ask, index, [plays[kind][index] for kind in kinds])
            continue
        for kind in kinds:
            left_out.add((kind, index))
            del plays[kind][index]
    return left_out


async def _compare(ask: Ask, index: int, plays: Iterable[ComparedPlay]) -> None:
    """Lets the environment compare plays of task `index`, and adds what it gives to each.

    Plays that failed are left out. If the environment fails, all of the others fail.
    """
    unfailed = [play for play in plays if not play.failure]
    episodes = []
    for member, play in enumerate(unfailed):
        episode = pb.FinishedEpisode(
            member=member,
            replies=play.replies,
            reward=play.earned,
            metrics=play.metrics,
            truncated=not play.is_done,
        )
        episodes.append(episode.SerializeToString())
    key = f"group-{index}"
    answer = await ask(
        reset={
            "episode_key": key,
            "task_index": index,
            "seed": index,
        }
    )
    if not answer.failure.message:
        answer = await ask(
            judge_group={
                "episode_key": key,
                "episodes": episodes,
            }
        )
    for play in unfailed:
        play.failure = answer.failure.message
    verdicts = answer.group_verdict.verdicts
    for play, verdict in zip(unfailed, verdicts, strict=False):
        play.earned += verdict.reward
        play.metrics.update(verdict.metrics)
    await ask(close={"episode_key": key})
