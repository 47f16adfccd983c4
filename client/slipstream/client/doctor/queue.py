"""Checks the queue of a configuration: its server answers, keeps data, and knows its users."""

from __future__ import annotations

from slipstream.client.launch.checks import Finding, advice, ok, problem
from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.settings.config import Config
from slipstream.core.settings.queue_section import QueueEnd
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.redis_rights import ROLES

LIMIT_S = 3.0
LINES = "docs/security.md has the ACL SETUSER line"


async def check_queue(config: Config) -> list[Finding]:
    """Returns one finding for each end of the queue if it is a Redis of the user's own."""
    if config.queue.kind != "redis" or config.queue.redis_url is None:
        return []
    return [await _check_end(config, end) for end in ROLES]


async def _check_end(config: Config, end: QueueEnd) -> Finding:
    area, role, own = f"queue, {end.replace('_', ' ')}", ROLES[end], config.queue.user_of(end)
    if own is not None and not own.password_file.exists():
        # A host has the passwords of its own role only.
        return advice(
            area,
            f"{own.password_file} is not here: user {own.user} was not tried",
            f"nothing, unless a {end.replace('_', ' ')} starts here",
        )
    try:
        from slipstream.client.doctor.redis_examination import examine

        found = await examine(redis_url_of(config.queue, end), role, limit_s=LIMIT_S)
    except ModuleNotFoundError:
        return problem(area, "queue.kind is redis", "install redis and hiredis")
    except (QueueError, ConfigError) as error:
        return problem(area, str(error), f"check queue.redis_url and the server; {LINES}")
    if found.missing:
        return problem(area, f"user {found.user} may not {', '.join(found.missing)}", LINES)
    if found.excessive:
        return advice(
            area,
            f"user {found.user} has more rights than it needs: {', '.join(found.excessive)}",
            LINES,
        )
    return ok(area, f"{found.server}, user {found.user} has only the rights it needs")
