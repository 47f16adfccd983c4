"""Tasks that end workers, and episodes that share these, by a script and on a virtual clock."""

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable

import pytest
from simulation.virtual_loop import VirtualLoop, virtual_time
from slipstream.core.errors import EnvironmentFailed
from slipstream.core.types import MAX_EXCUSED_ATTEMPTS
from slipstream.rollout_server.episodes.workers import (
    MAX_LOST_WORKERS,
    MAX_SUSPECTED,
    SET_ASIDE_S,
    Suspects,
)
from slipstream.v1 import trajectory_pb2
from support.fakes.scripted_workers import CAUSE, REPLY_S, ScriptedEnvironment

LIMIT_S = 60.0
MAX_ATTEMPTS = 3
BYSTANDER = trajectory_pb2.FAILURE_KIND_BYSTANDER


@dataclasses.dataclass
class Played:
    """What became of episodes: tasks of those that passed, causes of those that failed for good."""

    passed: Counter[int] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)


async def play(hosted: ScriptedEnvironment, tasks: Iterable[int]) -> Played:
    """Runs an episode for each of `tasks` at one time, with as many attempts as a lease gives."""
    played = Played()

    async def run(number: int, task: int) -> None:
        limit = MAX_ATTEMPTS
        for attempt in itertools.count():
            try:
                session = await hosted.open(f"{number}.{attempt}", task, LIMIT_S)
            except EnvironmentFailed as error:
                played.failures.append(str(error))
                return
            try:
                await session.reset(task, 0)
                await asyncio.sleep(REPLY_S)
                await session.step("x", truncated=False)
                played.passed[task] += 1
                return
            except EnvironmentFailed as error:
                limit += error.kind == BYSTANDER
                if attempt + 1 >= min(limit, MAX_ATTEMPTS + MAX_EXCUSED_ATTEMPTS):
                    played.failures.append(str(error))
                    return
            finally:
                session.close()

    await asyncio.gather(*(run(number, task) for number, task in enumerate(tasks)))
    return played


def played(
    hosted: ScriptedEnvironment, *rounds: Iterable[int]
) -> tuple[list[Played], float]:
    """Plays rounds of episodes, one after the other; returns the seconds that all took."""
    loop = VirtualLoop(0)
    began_s = loop.time()

    async def main() -> list[Played]:
        running = asyncio.create_task(hosted.run())
        plays = [await play(hosted, tasks) for tasks in rounds]
        running.cancel()
        await asyncio.wait([running])
        return plays

    with virtual_time(loop, 0):
        return loop.run_until_complete(main()), loop.time() - began_s


@pytest.mark.parametrize("tells", [True, False])
def test_one_end_in_25_steps_leaves_episodes_that_share_a_worker(tells: bool) -> None:
    hosted = ScriptedEnvironment(lambda step, _: step % 25 == 0, tells=tells)
    rounds, seconds = played(hosted, *[range(256)] * 3)
    # An episode may meet the end of a worker three times.
    assert all(round_played.passed.total() >= 250 for round_played in rounds)
    # One after the other, the episodes would take 768 s.
    assert seconds < 768.0 / 3


@pytest.mark.parametrize("tells", [True, False])
def test_a_task_that_always_ends_its_worker_fails_with_its_cause_and_no_other(
    tells: bool,
) -> None:
    hosted = ScriptedEnvironment(lambda _, task: task == 3, tells=tells)
    (first,), _ = played(hosted, [number // 2 for number in range(200)])
    assert first.passed == {task: 2 for task in range(100) if task != 3}
    assert len(first.failures) == 2
    assert all(failure.startswith(CAUSE) for failure in first.failures)


@pytest.mark.parametrize("tells", [True, False])
def test_a_suspect_is_set_aside_after_one_end_of_a_worker_of_its_own(
    tells: bool,
) -> None:
    killers = {3, 30, 60, 90}
    hosted = ScriptedEnvironment(lambda _, task: task in killers, tells=tells)
    # Eight members of each task, with three attempts each.
    (first,), seconds = played(hosted, [number // 8 for number in range(800)])
    assert first.passed == {task: 8 for task in range(100) if task not in killers}
    alone = f"{CAUSE}; its task ended a worker in which it was alone"
    assert Counter(first.failures)[alone] >= 7 * len(killers)
    # Without it each attempt of each member costs a worker: more than 100, and 388 s.
    assert hosted.num_starts < (25 if tells else 45)
    assert seconds < 200.0


def test_lone_workers_of_different_tasks_start_side_by_side() -> None:
    killers = {3, 30, 60, 90}

    def seconds_with(lone_workers: int) -> float:
        hosted = ScriptedEnvironment(
            lambda _, task: task in killers,
            tells=True,
            lone_workers=lone_workers,
        )
        hosted._suspects.lost(killers, in_call=killers)
        (first,), seconds = played(hosted, [number // 8 for number in range(800)])
        assert len(first.failures) == 8 * len(killers)
        return seconds

    assert seconds_with(4) < seconds_with(1)


def test_a_worker_that_hangs_holds_up_its_own_episodes_alone() -> None:
    def seconds_with(further_workers: int) -> float:
        hosted = ScriptedEnvironment(
            lambda step, _: step % 100 == 0,
            tells=True,
            hang_s=15.0,
        )
        hosted._most_further = further_workers
        rounds, seconds = played(hosted, *[range(256)] * 3)
        assert [round_played.passed.total() for round_played in rounds] == [256] * 3
        return seconds

    assert seconds_with(2) < 0.8 * seconds_with(0)


@dataclasses.dataclass
class Hangs:
    """What became of three rounds of episodes of which some hang, and how long they took."""

    num_passed: list[int]
    seconds: float


def with_hangs(*, look_s: float) -> Hangs:
    hosted = ScriptedEnvironment(
        lambda step, _: step % 100 == 0,
        tells=True,
        lone_workers=2,
        hang_s=15.0,
        look_s=look_s,
    )
    hosted._suspects.most_together = 16
    rounds, seconds = played(hosted, *[range(256)] * 3)
    return Hangs([play.passed.total() for play in rounds], seconds)


def test_who_shares_a_worker_with_a_call_that_hangs_goes_elsewhere() -> None:
    hangs = with_hangs(look_s=1.0)
    waiting = with_hangs(look_s=math.inf)
    assert hangs.num_passed == waiting.num_passed == [256] * 3
    assert hangs.seconds < 0.8 * waiting.seconds


def test_a_slow_call_keeps_its_others_where_no_worker_has_ended() -> None:
    slow = 15.0
    hosted = ScriptedEnvironment(lambda *_: False, tells=True, look_s=1.0)
    worker = hosted._make()
    worker.episodes = {"a": 1, "b": 2}
    loop = VirtualLoop(0)

    async def main() -> bool:
        watching = asyncio.create_task(worker._watch_calls())
        worker._is_hung = True
        worker._hung_key = "a"
        await asyncio.sleep(slow)
        before = worker.is_held_up
        hosted._suspects.most_together = 4
        await asyncio.sleep(slow)
        watching.cancel()
        return not before and worker.is_held_up and not worker.takes_episodes

    with virtual_time(loop, 0):
        assert loop.run_until_complete(main())


def test_a_task_that_is_set_aside_gets_another_try_later() -> None:
    suspects = Suspects()
    assert suspects.refusal(3, now_s=10.0) == ""
    suspects.ended_alone(3, "it ended", now_s=20.0)
    refusal = "it ended; its task ended a worker in which it was alone"
    assert suspects.refusal(3, now_s=20.0 + SET_ASIDE_S - 0.1) == refusal
    assert suspects.refusal(4, now_s=21.0) == ""
    assert suspects.refusal(3, now_s=20.0 + SET_ASIDE_S) == ""


def test_a_task_of_which_another_episode_passes_is_set_aside_no_more() -> None:
    suspects = Suspects()
    suspects.ended_alone(3, "it ended", now_s=20.0)
    suspects.passed(3)
    assert suspects.refusal(3, now_s=21.0) == ""


def test_all_episodes_share_workers_again_after_some_without_an_end() -> None:
    hosted = ScriptedEnvironment(lambda step, _: step == 100, tells=True)
    rounds, _ = played(hosted, *[range(256)] * 4)
    assert [round_played.passed.total() for round_played in rounds] == [256] * 4
    # The first one, the next one, that of the suspect, and one for those that wait.
    assert hosted.num_starts == 4


def suspecting(*tasks: int) -> ScriptedEnvironment:
    """An environment in which nothing ends a worker, and these tasks are suspects."""
    hosted = ScriptedEnvironment(lambda *_: False, tells=True)
    hosted._suspects.lost(tasks, in_call=tasks)
    return hosted


def test_all_episodes_of_a_suspect_share_a_worker_again_when_one_has_passed() -> None:
    hosted = suspecting(3)
    (first,), _ = played(hosted, [3] * 64)
    assert first.passed == {3: 64}
    # The worker that they share, and that of the one.
    assert hosted.num_starts == 2


def test_suspects_take_turns_and_the_newest_episode_of_each_goes_first() -> None:
    hosted = suspecting(3, 4)
    episodes_begun = []

    async def leave_unjudged(key: str, task: int) -> None:
        session = await hosted.open(key, task, LIMIT_S)
        episodes_begun.append(key)
        session.close()

    async def main() -> None:
        running = asyncio.create_task(hosted.run())
        await asyncio.gather(*(leave_unjudged(key, int(key[0])) for key in KEYS))
        running.cancel()
        await asyncio.wait([running])

    KEYS = ("3a", "3b", "3c", "4a", "4b", "4c")
    loop = VirtualLoop(0)
    with virtual_time(loop, 0):
        loop.run_until_complete(main())
    assert episodes_begun == ["3a", "3c", "4c", "3b", "4b", "4a"]


def alone(suspects: Suspects) -> list[int]:
    return [task for task in range(10) if suspects.runs_alone(task)]


def test_tasks_that_were_in_a_call_run_alone_until_they_pass() -> None:
    suspects = Suspects()
    suspects.lost([3, 4, 4, 5], in_call=[4])
    assert alone(suspects) == [4]
    suspects.passed(3)
    assert alone(suspects) == [4]
    suspects.passed(4)
    assert alone(suspects) == []


def test_a_task_that_loses_its_worker_repeatedly_is_a_suspect_in_the_end() -> None:
    suspects = Suspects()
    for times in range(1, MAX_LOST_WORKERS + 1):
        assert alone(suspects) == []
        # Several members of a group are one loss.
        suspects.lost([1, 1, 1, 6 + times], in_call=[])
    assert alone(suspects) == [1]


def test_passing_forgets_earlier_losses() -> None:
    suspects = Suspects()
    suspects.lost([1], in_call=[])
    suspects.passed(1)
    suspects.lost([1], in_call=[])
    assert alone(suspects) == []


def test_where_too_many_come_into_question_fewer_share_a_worker_and_none_is_suspected() -> (
    None
):
    suspects = Suspects()
    assert suspects.most_together == math.inf
    many = range(MAX_SUSPECTED + 1)
    for _ in range(MAX_LOST_WORKERS):
        suspects.lost(many, in_call=many)
    assert alone(suspects) == []
    # A quarter of 9 episodes, of 2, and nothing is learnt of others from one that was alone.
    assert suspects.most_together == 2
    suspects.lost([1, 2], in_call=[])
    assert suspects.most_together == 1
    suspects.lost([1], in_call=[1])
    assert suspects.most_together == 1


def test_as_many_passes_in_a_row_as_share_a_worker_double_their_number() -> None:
    suspects = Suspects()
    suspects.lost(range(16), in_call=[3])
    seen = []
    for _ in range(1 + 4 + 8):
        seen.append(suspects.most_together)
        suspects.passed(0)
    assert seen == [4] * 4 + [8] * 8 + [16]
    suspects.lost(range(16), in_call=[])
    assert suspects.most_together == 4
