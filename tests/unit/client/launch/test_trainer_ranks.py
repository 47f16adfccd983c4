"""How often the trainer ranks are started again."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from slipstream.client.launch import run_processes
from slipstream.client.launch.children import RestartPolicy, start_child
from slipstream.client.launch.placement import Placement
from slipstream.client.launch.run_processes import RunProcesses
from slipstream.protocol.access.security import Credentials
from slipstream.v1 import status_pb2 as pb
from support.fakes import exits
from support.fakes.small_configs import config_of

pytestmark = pytest.mark.process


class ScriptedRanks(RunProcesses):
    """Ranks that only end: `codes` says for each rank with which exit code each start ends."""

    codes: tuple[tuple[int, ...], ...] = ()

    async def start_ranks(self) -> None:
        self._ranks.clear()
        for rank, codes in enumerate(self.codes):
            name = f"trainer-rank-{rank}"
            folder = self._config.run_dir
            arguments = [str(folder / f"count-{rank}"), *map(str, codes)]
            environ = {"PYTHONPATH": str(Path(exits.__file__).parent)}
            log = folder / f"{name}.log"
            child = await start_child(
                name, "exits", arguments, log_path=log, environ=environ
            )
            self._ranks.append(child)


async def kept(folder, *codes, reached=()):
    """The rank with which it ends, and what the user is told before.

    `reached`: what the controller says after each death; it does not answer after the others.
    """
    messages: list[str] = []
    answers = (
        pb.RunStatus(step=step, checkpoint_step=saved) for step, saved in reached
    )

    async def look() -> pb.RunStatus | None:
        return next(answers, None)

    ranks = ScriptedRanks(
        config_of(folder), Credentials(None, None, None, None), Placement()
    )
    ranks.codes = codes
    ranks.warn = messages.append
    ranks._calls.look = look
    soon = partial(RestartPolicy, first_pause_s=0.01)
    with mock.patch.object(run_processes, "RestartPolicy", soon):
        return await ranks.keep_ranks(), messages


async def test_what_fails_while_it_loads_is_started_once_more(tmp_path: Path) -> None:
    failed, messages = await kept(tmp_path, (4, 4, 0))
    assert "exited with code 4: last words of start 2" in failed.describe_end()
    (line,) = messages
    assert "last words of start 1" in line
    assert line.endswith("the trainer starts again, start 2")


@pytest.mark.parametrize(
    "answers", [0, 9], ids=["no controller", "the same version each time"]
)
async def test_ranks_that_get_no_further_are_not_started_again_for_ever(
    answers, tmp_path
):
    # Every start resumes at version 50, makes 51 to 70 again, and dies.
    reached = [(70, 50)] * answers
    failed, messages = await kept(tmp_path, (1,) * 9, reached=reached)
    assert failed is not None
    assert len(messages) == 3
    assert messages[-1].endswith("start 4")


@pytest.mark.parametrize("what", [0, 1], ids=["version", "checkpoint"])
async def test_ranks_that_get_further_may_die_as_often_as_new_ones(what, tmp_path):
    reached = [
        (100 + death, 50) if what == 0 else (70, 100 + death) for death in range(6)
    ]
    failed, messages = await kept(tmp_path, (1,) * 6 + (0,), reached=reached)
    assert failed is None
    assert len(messages) == 6
