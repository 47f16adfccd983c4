"""Calls of the vLLM server at an address; the engine is dead where nothing answers them.

Waits for: the server. Unblocked by: its answer, the limit of a call, or a broken connection.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
from slipstream.rollout_server.engine_interface import EngineDied

# vLLM closes a connection that was idle for 5 s; a request must not meet that moment.
_KEEP_ALIVE_S = 2.0
_CONNECT_LIMIT_S = 10.0
_SHOWN = 300


class Connection:
    """The connections to one server, which `aclose` closes."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_KEEP_ALIVE_S,
        )
        # Proxies and credentials of the environment are not for this server.
        self._http = httpx.AsyncClient(
            base_url=url, headers=dict(headers), limits=limits, trust_env=False
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        limit_s: float,
        body: object = None,
        query: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Returns the whole answer, of whatever status, after at most `limit_s`.

        Raises EngineDied if none comes.
        """
        timeout = httpx.Timeout(limit_s, connect=_CONNECT_LIMIT_S, pool=None)
        try:
            async with asyncio.timeout(limit_s):
                return await self._http.request(
                    method, path, json=body, params=query, timeout=timeout
                )
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EngineDied(
                f"the engine at {self.url} did not answer {path} within {limit_s:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise EngineDied(
                f"the engine at {self.url} was lost at {path}: {type(error).__name__} {error}"
            ) from error

    async def control(
        self,
        method: str,
        path: str,
        *,
        limit_s: float,
        body: object = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the object in the answer to an order; raises EngineDied for a refusal."""
        answer = await self.call(method, path, limit_s=limit_s, body=body, query=query)
        if answer.status_code != httpx.codes.OK:
            raise EngineDied(self.refusal(answer))
        return self.content(answer)

    def content(self, answer: httpx.Response) -> dict[str, Any]:
        """Returns the object in an answer; raises EngineDied if it has none."""
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise EngineDied(f"{self.url} gave no object at {answer.request.url.path}: is it vLLM?")
        return content

    def refusal(self, answer: httpx.Response) -> str:
        """Returns a sentence about an answer whose status is not 200."""
        return (
            f"the engine at {self.url} answered {answer.status_code} to "
            f"{answer.request.url.path}: {answer.text[:_SHOWN]}"
        )

    async def aclose(self) -> None:
        await self._http.aclose()
