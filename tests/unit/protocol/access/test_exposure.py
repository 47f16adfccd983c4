"""What listens without TLS and token: on private addresses only, and on one interface."""

import socket
import subprocess
import sys

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.protocol.access.exposure import (
    describe_exposure,
    local_address,
    narrow_sockets,
    rendezvous_secret,
)
from slipstream.protocol.access.tokens import role_token
from support.fakes.small_configs import small_config
from support.rigs import namespaces
from support.rigs.waiting import LIMIT_S

MISSING = namespaces.missing()


def config_of(master: str) -> Config:
    return small_config(learner={"master": master})


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.9", "172.16.4.4", "100.64.0.1"],
)
def test_private_addresses_are_taken(host: str) -> None:
    describe_exposure(config_of(f"{host}:29500"))


@pytest.mark.parametrize("host", ["8.8.8.8", "2600::1", "172.32.0.1"])
def test_a_public_address_is_refused(host: str) -> None:
    where = f"[{host}]" if ":" in host else host
    with pytest.raises(
        ConfigError, match=rf"learner.master {host} is a public address, and torch"
    ):
        describe_exposure(config_of(f"{where}:29500"))


def test_a_name_that_nobody_knows_is_left_to_its_user() -> None:
    describe_exposure(config_of("nowhere.invalid:29500"))


def test_what_others_reach_is_described_with_its_ports() -> None:
    assert describe_exposure(config_of("localhost:0")) == ""
    assert describe_exposure(config_of("10.0.0.1:29500")) == (
        "learner.master 10.0.0.1 (port 29500; weights at any port)"
    )


def test_a_run_on_one_machine_keeps_gloo_and_nccl_on_loopback() -> None:
    environ: dict[str, str] = {}
    narrow_sockets(environ, gloo="127.0.0.1", nccl="localhost")
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_what_the_user_has_set_stays() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    narrow_sockets(environ, gloo="127.0.0.1", nccl="127.0.0.1")
    assert environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}


def test_a_host_that_cannot_be_reached_leaves_the_choice_to_them() -> None:
    environ: dict[str, str] = {}
    narrow_sockets(environ, gloo="nowhere.invalid", nccl="nowhere.invalid")
    assert environ == {}


def test_a_host_is_reached_from_an_address_of_this_machine() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        local_address("nowhere.invalid")


@pytest.mark.process
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_interface_of_an_address_is_found_also_behind_a_label() -> None:
    script = (
        "ip link add d0 type veth peer name d1 && ip addr add 10.1.2.3/24 dev d0 "
        "&& ip addr add 10.1.3.4/24 dev d0 label d0:second && ip link set d0 up "
        "&& ip link set lo up && ip addr add fd00:1::3/64 dev d0 nodad "
        '&& exec "$@"'
    )
    ask = (
        "from slipstream.protocol.access.exposure import interface_to, narrow_sockets\n"
        "hosts = ('10.1.2.9', '10.1.2.3', '10.1.3.4', '10.1.3.8', 'fd00:1::9', '127.0.0.5')\n"
        "print(*map(interface_to, hosts), interface_to('10.7.7.7'))\n"
        "environ = {}\n"
        "narrow_sockets(environ, gloo='127.0.0.1', nccl='10.1.2.9')\n"
        "print(environ['GLOO_SOCKET_IFNAME'], environ['NCCL_SOCKET_IFNAME'])\n"
    )
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-c", ask]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert process.stdout == "d0 d0 d0 d0 d0 lo None\nlo =d0\n", process.stderr


def test_the_rendezvous_is_known_to_holders_of_the_token_alone() -> None:
    first = rendezvous_secret("t" * 32, "run")
    # Processes of the trainer's role hold it too.
    assert first == rendezvous_secret(role_token("t" * 32, "trainer"), "run")
    assert (
        len(
            {
                first,
                rendezvous_secret("u" * 32, "run"),
                rendezvous_secret("t" * 32, "r"),
            }
        )
        == 3
    )
    assert "t" * 8 not in first
