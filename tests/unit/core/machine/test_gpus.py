"""The GPUs of a machine as CUDA would number them."""

from pathlib import Path
from typing import Any

import pynvml
import pytest
from slipstream.core.machine.gpus import Gpu, find_gpu, list_gpus, visible_ids
from slipstream.protocol.weights.nccl_group import (
    NCCL_ENVIRONMENT,
    agreed_settings,
    set_nccl_environment,
)

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


@pytest.mark.parametrize("driver", [FakeLibrary], indirect=True)
def test_gpus_have_the_drivers_numbers_and_uuids(driver: None) -> None:
    assert list_gpus() == (
        Gpu(0, "GPU-100", "NVIDIA H200", 139 << 30),
        Gpu(1, "GPU-101", "NVIDIA H200", 0),
    )


def test_nccl_is_told_the_same_everywhere_unless_the_user_says_otherwise() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1"}
    set_nccl_environment(environ)
    assert environ == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}


def test_members_agree_on_what_decides_how_they_talk_and_not_on_names_of_devices() -> None:
    environ = {"NCCL_CUMEM_ENABLE": "0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_PROTO": "Simple"}
    environ |= {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0", "PATH": "/bin"}
    environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": ""}
    assert agreed_settings(environ) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_PROTO": "simple"}


def test_containers_are_told_the_same_as_processes() -> None:
    text = Path(__file__).parents[4].joinpath("deploy", "docker-compose.yml").read_text()
    for name, value in NCCL_ENVIRONMENT.items():
        assert f'{name}: "{value}"' in text
