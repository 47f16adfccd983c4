from slipstream.rollout_server.episodes.workers import MAX_LOST_WORKERS, Suspects


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
