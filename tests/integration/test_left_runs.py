"""Rollout servers know whether the run that they leave may go on, and wait for it if so."""

import asyncio
import json
import urllib.request
from pathlib import Path

import grpc.aio
import pytest
from slipstream.core.run_folder import TARGETS
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.fake_server import FakeServer
from support.rigs.live_run import LiveRun
from support.rigs.waiting import LIMIT_S, wait_until


async def fail(channel: grpc.aio.Channel) -> None:
    stub = status_pb2_grpc.StatusServiceStub(channel)
    request = status_pb2.StopRunRequest(reason="a test", failed=True)
    await stub.StopRun(request, timeout=LIMIT_S)


def scrape(run: LiveRun) -> None:
    (target,) = (run.config.run.dir / TARGETS).glob("*@controller.json")
    (address,) = [entry["targets"][0] for entry in json.loads(target.read_text())]
    urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S).close()


@pytest.mark.parametrize("ending", ["finished", "stopped", "failed"])
def test_a_server_is_told_whether_the_run_may_go_on(
    ending: str, tmp_path: Path
) -> None:
    with LiveRun(tmp_path) as run:
        if ending == "stopped":
            run.stop()
        if ending == "failed":
            run.do(fail)
    assert run.summary()["state"] == ending
    assert run.server.run_stopped == (ending != "finished")


def test_a_server_that_joins_a_run_that_has_failed_may_try_again(
    tmp_path: Path,
) -> None:
    """The controller is there until the next scrape; a refusal would end the server for good."""

    async def join() -> grpc.StatusCode:
        server = FakeServer(run.address, "second")
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ExceptionGroup) as refused:
                await server.run()
        error: Exception = refused.value
        while isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, grpc.aio.AioRpcError)
        assert "the run is over" in str(error.details())
        return error.code()

    with LiveRun(tmp_path, tracking__prometheus="127.0.0.1:0") as run:
        scrape(run)
        run.do(fail)
        wait_until((run.config.run_dir / "summary.json").exists)
        code = run.start(join()).result(LIMIT_S)
        scrape(run)
        wait_until(lambda: run.is_over)
    assert code is grpc.StatusCode.UNAVAILABLE
