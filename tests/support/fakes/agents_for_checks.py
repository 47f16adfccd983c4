"""Agents that call the model, or do not."""

import asyncio
import threading
import time
import urllib.request

from slipstream.client import AgentEnvironment


class Calls(AgentEnvironment[str]):
    def tasks(self):
        return ["one", "two"]

    def run(self, task, endpoint):
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        with urllib.request.urlopen(
            urllib.request.Request(url, b"{}", headers)
        ) as answer:
            return float(answer.status == 200)


class CallsNobody(Calls):
    def run(self, task, endpoint):
        return 1.0


class Imports(Calls):
    """Needs a package that is not there."""

    def run(self, task, endpoint):
        import no_such_package  # noqa: F401


class Waits(Calls):
    async def run(self, task, endpoint):
        await asyncio.Event().wait()


class Sleeps(Calls):
    def run(self, task, endpoint):
        time.sleep(3600)


class Blocks(Calls):
    async def run(self, task, endpoint):
        time.sleep(3600)


class Alone(Calls):
    """Has a place for one episode at a time."""

    place = threading.Lock()

    def run(self, task, endpoint):
        if not self.place.acquire(blocking=False):
            raise ConnectionError("no place is free")
        try:
            return super().run(task, endpoint)
        finally:
            self.place.release()
