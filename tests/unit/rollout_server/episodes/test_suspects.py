import math

from slipstream.rollout_server.episodes.workers import (
    MAX_LOST_WORKERS,
    MAX_SUSPECTED,
    Suspects,
)


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


def test_where_too_many_come_into_question_fewer_share_a_worker_and_none_is_suspected() -> None:
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
