"""A trainer on one machine listens on loopback alone, whatever its host name stands for."""

import json
import sys
from pathlib import Path

import pytest
from slipstream.core.machine.address import free_port
from support.rigs import namespaces
from support.rigs.completed import completed

MISSING = namespaces.missing()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
# A host as a cloud makes it: its name stands for its address in the network.
HOST = (
    "hostname box && mount --bind $0 /etc/hosts && ip link set lo up "
    "&& ip link add d0 type veth peer name d1 "
    '&& ip addr add 10.1.2.3/24 dev d0 && ip link set d0 up && exec "$@"'
)
RANKS = """
import json, os, sys
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from slipstream.learner.trainer.ranks.rendezvous import rendezvous
from slipstream.protocol.access.exposure import narrow_sockets

limit = timedelta(seconds=60)
if narrow := os.fork():
    os.waitpid(narrow, 0)
child = os.fork()
rank = 0 if child else 1
if narrow:
    os.environ["MASTER_PORT"] = sys.argv[1]
    narrow_sockets(os.environ, gloo="127.0.0.1", nccl="127.0.0.1")
store = rendezvous(rank, 2, limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
dist.all_reduce(torch.ones(1))
found = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
everything = [None, None]
dist.all_gather_object(everything, found)
if child:
    print(json.dumps(sorted({address for part in everything for address in part})))
    os.waitpid(child, 0)
dist.destroy_process_group()
"""


def test_ranks_of_one_machine_listen_on_loopback_alone(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.1.2.3 box\n")
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        # vLLM leaves its own in the process that made an engine's settings.
        "LOCAL_WORLD_SIZE": "2",
    }
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", HOST, str(hosts)]
    command += ["env", *(f"{name}={value}" for name, value in environ.items())]
    ended = completed(
        [*command, sys.executable, "-c", RANKS, str(free_port("127.0.0.1"))]
    )
    assert ended.returncode == 0, ended.stderr
    as_torch_does, narrow = map(json.loads, ended.stdout.splitlines())
    assert "10.1.2.3" in as_torch_does
    assert narrow == ["127.0.0.1"]
