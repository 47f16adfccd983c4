"""The rights of each end of the queue: the same in tests and documentation, and enough, no more."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import RedisReceiver
from support.fakes.queue_seals import without_seal
from support.rigs.valkey import USERS, EmbeddedServer, QueueUser
from support.rigs.waiting import LIMIT_S

PAGE = Path(__file__).parents[4] / "docs" / "security.md"
NAMES = sorted(USERS)


def arguments_of(rules: str) -> list[str]:
    """Rules as ACL SETUSER takes them: what stands in brackets is one argument."""
    return re.findall(r"\([^)]*\)|\S+", rules)


@pytest.mark.parametrize("user", USERS.values(), ids=NAMES)
def test_the_documented_line_gives_the_rights_of_the_user(user: QueueUser) -> None:
    (line,) = re.findall(
        rf"^redis-cli (ACL SETUSER {user.name} .*)$", PAGE.read_text(), re.M
    )
    assert shlex.split(line) == [
        "ACL",
        "SETUSER",
        user.name,
        "on",
        ">PASSWORD",
        *arguments_of(user.rules),
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "right"),
    [
        *(("rollout_server", right) for right in ("xadd", "watch", "incrby", "get")),
        *(("controller", right) for right in ("incrby", "get", "xinfo|stream")),
        *(
            ("controller", right)
            for right in ("xgroup|create", "xreadgroup", "xrange", "xdel")
        ),
    ],
)
async def test_a_user_who_lacks_a_right_has_one_line_with_its_name(
    end, right, tmp_path
):
    less = re.sub(rf"\+{re.escape(right)} ", "", USERS[end].rules)
    rules = {user.name: user.rules for user in USERS.values()} | {USERS[end].name: less}
    async with (
        EmbeddedServer(tmp_path / "valkey", rules) as server,
        asyncio.timeout(LIMIT_S),
    ):
        with pytest.raises((ConfigError, BaseExceptionGroup)) as caught:
            async with (
                RedisReceiver(
                    server.url("controller"), "run", without_seal
                ) as receiver,
                RedisSender(server.url("rollout"), "run", 10_000) as sender,
            ):
                await sender.put(
                    TrajectoryId("run/g0/0/0"), b"x" * 100, timeout_s=LIMIT_S
                )
                await receiver.acknowledge([(await receiver.get()).trajectory_id])
    cause: BaseException = caught.value
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    assert isinstance(cause, ConfigError)
    lacks = f"user {USERS[end].name} lacks the right to {right.partition('|')[0]}"
    assert lacks in str(cause)
    assert str(cause).endswith("docs/security.md has the lines that give all rights")
