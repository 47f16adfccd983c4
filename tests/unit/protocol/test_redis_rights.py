"""The rights of each end of the queue: the same in code and documentation, and enough, no more."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from slipstream.client.doctor.redis_examination import examine
from slipstream.protocol.queue.embedded import EmbeddedServer
from slipstream.protocol.queue.redis_rights import ROLES, QueueRole, right_of

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
LIMIT_S = 20.0
NAMES = sorted(ROLES)


def arguments_of(rules: str) -> list[str]:
    """Rules as ACL SETUSER takes them: what stands in brackets is one argument."""
    return re.findall(r"\([^)]*\)|\S+", rules)


@pytest.mark.parametrize("role", ROLES.values(), ids=NAMES)
def test_the_documented_line_gives_the_rights_of_the_role(role: QueueRole) -> None:
    (line,) = re.findall(rf"^redis-cli (ACL SETUSER {role.user} .*)$", PAGE.read_text(), re.M)
    assert shlex.split(line) == [
        *("ACL", "SETUSER", role.user, "on", ">PASSWORD"),
        *arguments_of(role.rules),
    ]


@pytest.mark.process
@pytest.mark.parametrize("role", ROLES.values(), ids=NAMES)
async def test_each_right_is_needed_and_noticed_when_it_is_missing(
    role: QueueRole, tmp_path: Path
) -> None:
    names = {
        "|".join(command[: 2 if command[0] in ("CONFIG", "ACL", "XGROUP") else 1])
        for command in role.needed
    }
    less = {name.lower().replace("|", "-"): name.lower() for name in names}
    users = {
        without: role.rules.replace(f"+{right} ", "").replace(f" +{right}", "")
        for without, right in less.items()
    }
    # The first one asks whether the server is ready.
    async with EmbeddedServer(tmp_path / "valkey", {"whole": role.rules} | users) as server:
        whole = await examine(server.url("whole"), role, limit_s=LIMIT_S)
        assert (whole.missing, whole.excessive) == ((), ())
        for user, right in less.items():
            found = await examine(server.url(user), role, limit_s=LIMIT_S)
            lacking = {
                right_of(command)
                for command in role.needed
                if right_of(command).split()[0] == right
            }
            assert set(found.missing) == lacking, user
            assert lacking


@pytest.mark.process
@pytest.mark.parametrize("role", ROLES.values(), ids=NAMES)
async def test_each_right_too_many_is_noticed(role: QueueRole, tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "valkey", {"all": "~* &* +@all"}) as server:
        found = await examine(server.url("all"), role, limit_s=LIMIT_S)
    assert found.missing == ()
    assert found.excessive == tuple(right_of(command) for command in role.forbidden)


def test_a_right_reads_as_command_and_key() -> None:
    assert right_of(("CONFIG", "GET", "appendfsync")) == "config|get"
    assert right_of(("XADD", "slipstream:examination:trajectories", "*")) == (
        "xadd slipstream:RUN:trajectories"
    )
