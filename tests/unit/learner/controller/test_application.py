"""The tasks of a controller, at the end of its run."""

import gc

import pytest
from slipstream.learner.controller.application import RunTasks


async def work() -> None:
    pass


def never_awaited(warnings: pytest.WarningsRecorder) -> list[str]:
    gc.collect()
    return [
        str(warning.message)
        for warning in warnings
        if warning.category is RuntimeWarning
    ]


async def test_a_task_that_comes_behind_the_end_is_refused_and_its_coroutine_closed(
    recwarn,
):
    async with RunTasks(print) as tasks:
        pass
    with pytest.raises(RuntimeError, match="is finished"):
        tasks.create_task(work())
    assert never_awaited(recwarn) == []


async def test_the_coroutine_of_a_task_that_never_started_is_closed(recwarn):
    async with RunTasks(print) as tasks:
        tasks.create_task(work()).cancel()
    assert never_awaited(recwarn) == []
