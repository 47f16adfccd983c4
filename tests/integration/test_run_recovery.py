"""A run with all parts whose servers, workers and controller are killed while agents play."""

from pathlib import Path

import pytest
from support.rigs.recovered_run import GROUP_SIZE, play, unequal_rewards
from support.rigs.run_processes import LONG_RUN, check_replay

pytestmark = [*LONG_RUN, pytest.mark.timeout(1200)]

TURNS = 6
STEPS = 3
GROUPS = 3
RUN_LIMIT_S = 500.0
ROLES = ("worker", "server", "controller")
# Of the replies of all programs.
REPLIES_BETWEEN_KILLS = STEPS * GROUPS * GROUP_SIZE * TURNS // 5


async def test_killed_processes_cost_no_reply_that_a_program_has_read(
    tmp_path: Path, tiny_model: Path
) -> None:
    sizes = {"turns": TURNS, "steps": STEPS, "groups": GROUPS, "limit_s": RUN_LIMIT_S}
    quiet = await play(tmp_path / "quiet", tiny_model, recover=False, **sizes)
    harmed = await play(
        tmp_path / "harmed",
        tiny_model,
        every_replies=REPLIES_BETWEEN_KILLS,
        roles=ROLES,
        pause_s=0.5,
        **sizes,
    )
    assert harmed.kills.keys() == {*ROLES}
    assert harmed.recovered_calls > 0
    assert harmed.sampled_twice == 0
    assert harmed.unasked_calls == 0
    assert harmed.trained_twice == 0
    assert harmed.episodes == quiet.episodes == STEPS * GROUPS * GROUP_SIZE
    assert unequal_rewards(quiet, harmed) == 0
    assert harmed.ledger["difference"] == 0
    assert harmed.faults == []
    # The kept calls go with the run's end, and its batches train to the same weights again.
    assert not (tmp_path / "harmed" / "run" / "calls").exists()
    check_replay(tmp_path / "harmed" / "run")
