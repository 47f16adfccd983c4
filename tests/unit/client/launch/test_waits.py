"""What is shown while a run is silent."""

import asyncio
import io
import sys
from pathlib import Path

import pytest
from slipstream.client.launch import run_processes
from slipstream.client.launch.display import Display, wait_line
from slipstream.client.launch.run_processes import RunCalls, tell_waits
from slipstream.client.requests import status_lines
from slipstream.client.status import run_from_pb
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.small_configs import config_of
from support.rigs.waiting import LIMIT_S, until

OPEN = Credentials()


class Waiting(status_pb2_grpc.StatusServiceServicer):
    """A controller that waits for ever; `asked` is set at the third question."""

    def __init__(self) -> None:
        self.questions = 0
        self.asked = asyncio.Event()

    async def GetStatus(self, request: object, context: object) -> status_pb2.RunStatus:
        self.questions += 1
        if self.questions == 3:
            self.asked.set()
        return status_pb2.RunStatus(
            state=status_pb2.RUN_STATE_STARTING, waiting_for="the trainer"
        )


@pytest.mark.parametrize(
    ("run", "servers", "line"),
    [
        ({"waiting_for": "t"}, {}, "waits for t; no rollout server has joined yet"),
        ({"waiting_for": "t"}, {"a": "SERVING"}, "waits for t"),
        (
            {"waiting_for": "t"},
            {"a": "SERVING", "b": "LOADING"},
            "waits for t; b is loading",
        ),
        (
            {"state": "RUN_STATE_STOPPING"},
            {"b": "LOADING"},
            "the run is stopping; b is loading",
        ),
        (
            {"waiting_for": "t"},
            {"a": "LEFT"},
            "waits for t; a has left; no rollout server is connected",
        ),
        (
            {"waiting_for": "t"},
            {"a": "LEFT", "b": "SERVING"},
            "waits for t; a has left",
        ),
    ],
)
def test_the_line_names_what_is_waited_for_and_servers_that_do_not_serve(
    run, servers, line
):
    status = status_pb2.RunStatus(**run)
    for name, state in servers.items():
        status.servers.add(server_id=name, state=f"SERVER_STATE_{state}")
    assert wait_line(run_from_pb(status), 3072) == line


def test_the_line_says_how_far_open_episodes_are_and_how_fast() -> None:
    status = status_pb2.RunStatus(waiting_for="t")
    for name, report in {
        "a": {
            "open_episodes": 3,
            "in_flight_tokens": 4000,
            "generated_tokens": 900,
            "busy_s": 9,
        },
        "b": {
            "open_episodes": 1,
            "in_flight_tokens": 801,
            "generated_tokens": 1000,
            "busy_s": 10,
        },
        # Neither has it begun, nor does it work on any.
        "c": {"open_episodes": 1},
        "d": {"generated_tokens": 900, "busy_s": 1},
    }.items():
        status.servers.add(server_id=name, state="SERVER_STATE_SERVING", report=report)
    under_way = "5 episodes under way, with 960 tokens each so far, at 200 tok/s in all"
    run = run_from_pb(status)
    assert (
        wait_line(run, 3072)
        == f"waits for t; {under_way} (sampling.max_reply_tokens = 3,072)"
    )
    assert under_way in status_lines(run)


async def test_silence_is_broken_again_and_again_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_processes, "FIRST_S", 0.01)
    monkeypatch.setattr(run_processes, "LIMIT_S", 0.02)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    display = Display(config_of(tmp_path))
    server = create_server(OPEN)
    controller = Waiting()
    status_pb2_grpc.add_StatusServiceServicer_to_server(controller, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', OPEN)}"
    await server.start()
    calls = RunCalls(address, OPEN)
    telling = asyncio.create_task(tell_waits(display, calls, 3072))
    await asyncio.wait_for(controller.asked.wait(), LIMIT_S)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    await server.stop(None)
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 3
    assert all(
        line.endswith("waits for the trainer; no rollout server has joined yet")
        for line in lines
    )


async def test_a_controller_without_an_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_processes, "FIRST_S", 0.01)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    display = Display(config_of(tmp_path))
    telling = asyncio.create_task(
        tell_waits(display, RunCalls("127.0.0.1:1", OPEN), 3072)
    )
    await until(out.getvalue, 20)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    assert (
        "! the controller gives no answer: failed to connect to all" in out.getvalue()
    )
