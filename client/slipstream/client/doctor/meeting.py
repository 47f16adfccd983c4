"""Learner nodes meet before a run: the first one answers the others as its controller will.

Consumes: calls of the other nodes. Produces: one finding.
Waits for: a call from each of them. Unblocked by: the last call, or the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator

from slipstream.client.launch.findings import Finding, ok, problem
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.protocol.setup import describe_setup
from slipstream.v1 import status_pb2, status_pb2_grpc

GRACE_S = 1.0


class MeetingServicer(status_pb2_grpc.StatusServiceServicer):
    """Tells the other nodes this one's setup, and notes who has compared it."""

    def __init__(self, setup: status_pb2.Setup, others: int) -> None:
        """`others`: the number of nodes that are to ask."""
        self._setup, self._others = setup, others
        self.askers: set[str] = set()
        self.all_asked = asyncio.Event()

    async def GetSetup(  # noqa: N802
        self, request: status_pb2.GetSetupRequest, context: object
    ) -> status_pb2.Setup:
        """Returns the setup with the time of this moment."""
        if request.has_compared:
            self.askers.add(request.asker)
            if len(self.askers) >= self._others:
                self.all_asked.set()
        setup = status_pb2.Setup(unix_time_s=time.time())
        setup.MergeFrom(self._setup)
        return setup


async def meet_nodes(config: Config, nodes: int, limit_s: float) -> Finding:
    """Answers the other nodes for `limit_s` at most; a problem if one of them does not ask."""
    area = "nodes"
    try:
        credentials = Credentials.load(config.security)
        server = create_server(credentials)
        with _marked_folder(config) as (run_id, mark):
            setup = describe_setup(config, run_id=run_id, mark=mark)
            servicer = MeetingServicer(setup, nodes - 1)
            status_pb2_grpc.add_StatusServiceServicer_to_server(servicer, server)
            bind(server, config.controller.address, credentials)
            await server.start()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await servicer.all_asked.wait()
            finally:
                await server.stop(GRACE_S)
    except ConfigError as error:
        return problem(area, str(error))
    came = ", ".join(sorted(servicer.askers)) or "none"
    if servicer.all_asked.is_set():
        return ok(area, f"all {nodes} are here: this one, {came}")
    return problem(
        area,
        f"{len(servicer.askers)} of {nodes - 1} other nodes asked within {limit_s:g} s: {came}",
        "start this command on all nodes of the learner at once, and see what the others say",
    )


@contextlib.contextmanager
def _marked_folder(config: Config) -> Iterator[tuple[str, str]]:
    """Puts a file into run.dir for the block; yields the run id in it, and its name."""
    run_id = f"{config.run.name}-{secrets.token_hex(4)}"
    path = config.run.dir / f".{run_id}"
    made = [folder for folder in (config.run.dir, *config.run.dir.parents) if not folder.exists()]
    try:
        config.run.dir.mkdir(parents=True, exist_ok=True)
        path.write_text(run_id)
        yield run_id, path.name
    except OSError as error:
        raise ConfigError(
            f"run.dir: cannot write into {config.run.dir}: {error.strerror}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
