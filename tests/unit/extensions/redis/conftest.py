"""A real Valkey with an administrator, who spoils what is in it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from support.rigs.valkey import RIGHTS, EmbeddedServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    users = RIGHTS | {"administrator": "~* &* +@all"}
    async with EmbeddedServer(tmp_path / "valkey", users) as server:
        yield server


@pytest.fixture
async def administrator(server: EmbeddedServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url("administrator")) as client:
        yield client
