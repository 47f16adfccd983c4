"""The GPUs of a machine as CUDA would number them, and who may fill their memory at one time."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.machine import gpus
from slipstream.core.machine.gpus import (
    Gpu,
    fill_gpus,
    find_gpu,
    gpu_names,
    list_gpus,
    read_each_other,
    visible_ids,
)
from slipstream.protocol.weights.nccl_group import (
    NCCL_ENVIRONMENT,
    agreed_settings,
    set_nccl_environment,
)
from support.rigs.waiting import LIMIT_S

GPUS = tuple(Gpu(n, f"GPU-{n}aaa-bbb", "gpu", 1 << 30) for n in range(4))


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2, 0", ("2", "0")),
        ("3,9,1", ("3",)),
        ("1,1,2", ("1",)),
        ("GPU-2aaa-bbb,GPU-0", ("GPU-2aaa-bbb", "GPU-0")),
        ("GPU-9,1", ()),
        ("MIG-abc", ("MIG-abc",)),
    ],
)
def test_visible_are_the_entries_before_the_first_that_names_no_gpu(value, ids):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_ids(environ, GPUS) == ids


def test_a_gpu_is_found_by_number_and_by_the_beginning_of_its_uuid() -> None:
    assert find_gpu("2", GPUS) is GPUS[2]
    assert find_gpu("GPU-3aaa", GPUS) is GPUS[3]
    assert find_gpu("4", GPUS) is None


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library is what `request` makes."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", request.param)


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("driver", [no_library], indirect=True)
def test_without_a_driver_there_is_no_gpu(driver: None) -> None:
    assert list_gpus() == ()


class FakeLibrary:
    """NVML's answers for two GPUs, the second of which does not tell its memory."""

    def __init__(self, name: str) -> None:
        assert name.startswith("libnvidia-ml")

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.contents = pynvml.struct_c_nvmlDevice_t()
        self.index = index.value
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = f"GPU-{100 + self.index}".encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = 139 << 30
        return 0 if self.index == 0 else pynvml.NVML_ERROR_NOT_SUPPORTED

    def nvmlDeviceGetP2PStatus(
        self, first: Any, second: Any, what: int, status: Any
    ) -> int:
        # Like ctypes, this refuses what is no number.
        assert ctypes.c_uint(what).value == 0
        status._obj.value = pynvml.NVML_P2P_STATUS_OK
        return 0


@pytest.mark.parametrize("driver", [FakeLibrary], indirect=True)
def test_gpus_have_the_drivers_numbers_and_uuids(driver: None) -> None:
    assert list_gpus() == (
        Gpu(0, "GPU-100", "NVIDIA H200", 139 << 30),
        Gpu(1, "GPU-101", "NVIDIA H200", 0),
    )


class ApartLibrary(FakeLibrary):
    """The same for GPUs that cannot read each other's memory."""

    def nvmlDeviceGetP2PStatus(
        self, first: Any, second: Any, what: int, status: Any
    ) -> int:
        status._obj.value = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
        return 0


@pytest.mark.parametrize(
    ("driver", "said"),
    [(FakeLibrary, True), (ApartLibrary, False), (no_library, False)],
    indirect=["driver"],
)
def test_gpus_read_each_other_where_the_driver_says_so(
    driver: None, said: bool
) -> None:
    assert read_each_other(GPUS[0], GPUS[1]) is said


def test_nccl_is_told_the_same_everywhere_unless_the_user_says_otherwise() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1"}
    set_nccl_environment(environ)
    assert environ == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}


def test_members_agree_on_what_decides_how_they_talk_and_not_on_names_of_devices() -> (
    None
):
    environ = {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_PROTO": "Simple",
    }
    environ |= {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0", "PATH": "/bin"}
    environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": ""}
    assert agreed_settings(environ) == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_PROTO": "simple",
    }


def test_containers_are_told_the_same_as_processes() -> None:
    text = (
        Path(__file__).parents[4].joinpath("deploy", "docker-compose.yml").read_text()
    )
    for name, value in NCCL_ENVIRONMENT.items():
        assert f'{name}: "{value}"' in text


def may_fill(folder: Path, *gpus: str, alone: bool) -> bool:
    try:
        with fill_gpus(folder, gpus, alone=alone, limit_s=0.0):
            return True
    except RunFailed:
        return False


def test_an_engine_starts_beside_nobody(tmp_path: Path) -> None:
    with fill_gpus(tmp_path, ["a", "b"], alone=True, limit_s=1.0):
        assert not may_fill(tmp_path, "b", alone=False)
        assert not may_fill(tmp_path, "a", alone=True)
        assert may_fill(tmp_path, "c", alone=True)
    assert may_fill(tmp_path, "a", "b", alone=True)


def test_ranks_load_beside_each_other_and_beside_no_engine(tmp_path: Path) -> None:
    with fill_gpus(tmp_path, ["a"], alone=False, limit_s=1.0):
        assert may_fill(tmp_path, "a", alone=False)
        assert not may_fill(tmp_path, "a", "b", alone=True)
        # The one that could not have all of them holds none.
        assert may_fill(tmp_path, "b", alone=True)


def test_wait_has_a_limit_that_is_said(tmp_path: Path) -> None:
    with (
        fill_gpus(tmp_path, ["a"], alone=True, limit_s=1.0),
        pytest.raises(RunFailed, match=r"on GPU a within 0\.2 s"),
        fill_gpus(tmp_path, ["a"], alone=False, limit_s=0.2),
    ):
        pytest.fail("it had its turn")


def started(program: str, folder: Path, *, until: str) -> subprocess.Popen[str]:
    """The program that is to say a line; it has said it."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == f"{until}\n"
    return process


@pytest.mark.process
def test_turn_ends_although_a_forked_child_lives_on(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from slipstream.core.machine.gpus import fill_gpus\n"
        "with fill_gpus(pathlib.Path(sys.argv[1]), ['a'], alone=True, limit_s=1):\n"
        "    child = os.fork()\n"
        "    if child == 0: sys.stdin.read(); os._exit(0)\n"
        "print('left', flush=True); os.waitpid(child, 0)\n"
    )
    process = started(program, tmp_path, until="left")
    assert may_fill(tmp_path, "a", alone=True)
    process.communicate("", timeout=LIMIT_S)


@pytest.mark.process
def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from slipstream.core.machine.gpus import fill_gpus\n"
        "with fill_gpus(pathlib.Path(sys.argv[1]), ['a'], alone=True, limit_s=1):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = started(program, tmp_path, until="held")
    assert not may_fill(tmp_path, "a", alone=True)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert may_fill(tmp_path, "a", alone=True)


def test_gpus_have_the_names_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", lambda: GPUS)
    assert gpu_names({}, 1, 2) == ["GPU-1aaa-bbb", "GPU-2aaa-bbb"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "2,0"}, 0, 1) == ["GPU-2aaa-bbb"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "MIG-7"}, 0, 1) == ["MIG-7"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": ""}, 0, 1) == []


def test_without_a_gpu_there_is_no_turn(tmp_path: Path) -> None:
    with fill_gpus(tmp_path / "locks", [], alone=True, limit_s=0.0):
        assert not (tmp_path / "locks").exists()
