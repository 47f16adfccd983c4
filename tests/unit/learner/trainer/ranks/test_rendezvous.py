"""The ranks' meeting place: strangers are no ranks, and who does not come is named in time."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import free_port
from slipstream.learner.trainer.ranks import rendezvous as module
from slipstream.learner.trainer.ranks.rendezvous import RankFlags, rendezvous
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE
from support.rigs.waiting import LIMIT_S

HOST = "127.0.0.1"
SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=60)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port at which the ranks that this process starts meet."""
    number = free_port(HOST)
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, "of this run")
    # An earlier test that played a rank may have left these variables.
    for name in (
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)
    return number


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def listening(port: int) -> None:
    """Returns when something listens there."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
    raise AssertionError("nothing listens")


@pytest.fixture
def attempts_end() -> Iterator[None]:
    """Abandoned attempts end here with what torch prints about them, not in a later test."""
    yield
    for thread in threading.enumerate():
        if thread.name == "rendezvous":
            thread.join(LIMIT_S)


@pytest.mark.usefixtures("attempts_end")
def test_a_listener_that_does_not_answer_is_given_up_and_named(
    port: int, monkeypatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_GRACE_S", 0.5)
    # The ranks may start again: a rank 0 that is stopped listens too. If its port is taken, it
    # says so itself.
    message = (
        f"learner.master: what listens on 127.0.0.1:{port} did not answer like rank 0 within 1 s: "
        "rank 0 is stopped or very slow, or another program has the port"
    )
    with socket.create_server((HOST, port)), pytest.raises(TimeoutError, match=message):
        rendezvous(1, 2, SHORT)


@pytest.mark.usefixtures("attempts_end")
@pytest.mark.parametrize(
    "connect_grace_s", [0.1, 30.0], ids=["torch still tries", "torch said so"]
)
def test_a_rank_0_that_does_not_listen_is_no_port_in_use(
    port, connect_grace_s, monkeypatch
):
    monkeypatch.setattr(module, "CONNECT_GRACE_S", connect_grace_s)
    # The ranks may start again after this error: rank 0 may be there the next time.
    message = (
        rf"rank 0 did not listen on 127.0.0.1:{port} \(learner.master\) within "
        rf"1 s: it has not "
    )
    with pytest.raises(
        TimeoutError, match=f"{message}started, is stopped or very slow"
    ):
        rendezvous(1, 2, SHORT)


def test_rank_0_says_that_its_port_is_taken(port: int) -> None:
    with (
        socket.create_server((HOST, port)),
        pytest.raises(ConfigError, match=f"got 127.0.0.1:{port}: .*in use"),
    ):
        rendezvous(0, 2, SHORT)


def test_ranks_of_one_start_share_what_they_say(
    port: int, threads: ThreadPoolExecutor
) -> None:
    stores = [threads.submit(rendezvous, rank, 2, LONG) for rank in range(2)]
    first, second = (store.result(LIMIT_S) for store in stores)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_stranger_is_not_taken_for_a_rank(
    port: int, threads: ThreadPoolExecutor
) -> None:
    came: Future[object] = threads.submit(rendezvous, 0, 2, timedelta(seconds=3))
    listening(port)
    # A rank of another program would come like this, and torch counts it.
    stranger = dist.TCPStore(
        HOST, port, is_master=False, wait_for_workers=False, timeout=LONG
    )
    stranger.add("init/", 1)
    stranger.set("rank/1", "here")
    with pytest.raises(
        TimeoutError, match=rf"of 2 ranks 1 did not join at 127.0.0.1:{port}"
    ):
        came.result(LIMIT_S)


def test_a_rank_of_another_run_is_told_so(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((HOST, port)) as listener:
        descriptor = listener.detach()
    store = dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    dist.PrefixStore("of this run/0", store).set("rank/0", "here")
    rendezvous(1, 2, LONG)
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, "of another run")
    monkeypatch.setattr(module, "RECOGNITION_LIMIT_S", 1.0)
    with pytest.raises(
        ConfigError,
        match=f"rank 0 at 127.0.0.1:{port} did not recognise rank 1 "
        r".*belongs to another run, or has another",
    ):
        rendezvous(1, 2, LONG)


# A rank 0 that announces itself and waits for others until it is killed.
RANK_0 = """
import os, sys, threading
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
dist.PrefixStore("of this run/0", store).set("rank/0", "here")
print("here", flush=True)
threading.Event().wait()
"""


@pytest.mark.process
@pytest.mark.usefixtures("attempts_end")
def test_a_rank_0_that_freezes_while_others_wait_is_given_up(
    port, threads, monkeypatch
):
    monkeypatch.setattr(module, "CONNECT_GRACE_S", 0.5)
    command = [sys.executable, "-c", RANK_0, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            assert rank_0.stdout.readline() == "here\n"
            # Rank 2 never comes.
            waiting = threads.submit(rendezvous, 1, 3, timedelta(seconds=3))
            seen = dist.TCPStore(
                HOST, port, is_master=False, wait_for_workers=False, timeout=LONG
            )
            seen.wait(["of this run/0/rank/1"], LONG)
            rank_0.send_signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError, match="rank 0 is stopped or very slow"):
                waiting.result(LIMIT_S)
        finally:
            rank_0.kill()


def test_a_word_is_heard_by_the_others() -> None:
    store = dist.HashStore()
    ours = RankFlags(store)
    theirs = RankFlags(store)
    assert not theirs.is_set("stop")
    ours.set("stop")
    assert theirs.is_set("stop")
    assert not theirs.is_set("go")


def test_a_word_with_data_is_taken_once() -> None:
    store = dist.HashStore()
    ours = RankFlags(store)
    theirs = RankFlags(store)
    assert theirs.take("list") is None
    ours.set("list", b"what was written")
    assert theirs.take("list") == b"what was written"
    assert theirs.take("list") is None
    ours.set("list")
    assert theirs.take("list") == b""


def test_without_rank_0_every_word_counts_as_said(port: int) -> None:
    leader = dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, timeout=SHORT
    )
    words = RankFlags(dist.TCPStore(HOST, port, is_master=False, timeout=SHORT))
    assert not words.is_set("stop")
    del leader
    assert words.is_set("stop")
    words.set("go")
