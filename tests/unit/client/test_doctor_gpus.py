"""What `slipstream doctor` says of GPUs, without one: the driver's answers are played."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from slipstream.client.launch import machine, placement
from slipstream.client.launch.findings import Finding, Scene, Verdict
from slipstream.client.launch.fit import check_fit
from slipstream.client.launch.machine import check_build, check_gpus
from slipstream.client.launch.placement import Share
from slipstream.core.machine.gpus import Gpu
from slipstream.protocol.weights.nccl_group import NCCL_ENVIRONMENT
from support.fakes.small_configs import small_config

GIB = 1 << 30
GPUS = tuple(Gpu(n, f"GPU-{n}aaa", "NVIDIA H200", 140 * GIB) for n in range(3))


class Memory(NamedTuple):
    total: int
    free: int


class FakeNvml:
    """The driver of GPUs with free memory, but for one."""

    def __init__(self) -> None:
        # The GPU whose memory another program holds.
        self.taken = -1

    def __enter__(self) -> FakeNvml:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlSystemGetDriverVersion":
            return "580.1"
        if name == "nvmlDeviceGetHandleByIndex":
            return arguments[0]
        assert name == "nvmlDeviceGetMemoryInfo"
        return Memory(140 * GIB, (130 - 100 * (arguments[0] == self.taken)) * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setattr(machine, "Nvml", lambda: nvml)
    for name in ("CUDA_VISIBLE_DEVICES", *NCCL_ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    return nvml


def found(number: int, environ: Mapping[str, str] = {}) -> dict[str, Finding]:
    """The findings on a machine with so many GPUs; the first one is the driver's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "list_gpus", lambda: GPUS[:number])
        for name, value in environ.items():
            patch.setenv(name, value)
        return {finding.area or "driver": finding for finding in check_gpus(Scene())}


def test_without_a_driver_nothing_is_said() -> None:
    assert found(0) == {}


def test_driver_and_gpus_are_named(nvml: FakeNvml) -> None:
    assert found(2)["driver"].seen == "580.1 shows 2 x NVIDIA H200 with 140 GiB"
    assert found(2).keys() == {"driver"}


def test_a_gpu_that_another_program_holds_is_named(nvml: FakeNvml) -> None:
    assert "GPU in use" not in found(2)
    nvml.taken = 1
    taken = found(2)["GPU in use"]
    assert (taken.verdict, taken.seen) == (Verdict.ADVICE, "1: 30 of 140 GiB are free")


def test_entry_that_names_no_gpu_is_a_problem(nvml: FakeNvml) -> None:
    finding = found(2, {"CUDA_VISIBLE_DEVICES": "1,7,0"})["visible GPUs"]
    assert finding.verdict is Verdict.PROBLEM
    assert finding.seen == "CUDA_VISIBLE_DEVICES is '1,7,0': 1"
    assert "visible GPUs" not in found(2, {"CUDA_VISIBLE_DEVICES": "1,0"})


def test_settings_of_nccl_that_differ_from_ours_are_named(nvml: FakeNvml) -> None:
    assert "nccl settings" not in found(1)
    finding = found(1, {"NCCL_NVLS_ENABLE": "1", "NCCL_DEBUG": "INFO"})["nccl settings"]
    assert finding.verdict is Verdict.ADVICE
    assert finding.seen == "NCCL_NVLS_ENABLE=1"


def test_a_build_of_torch_that_does_not_fit_the_machine_is_told(monkeypatch) -> None:
    def told(version: str, gpus: tuple[Gpu, ...]) -> Finding | None:
        monkeypatch.setattr(machine, "installed", lambda names: dict.fromkeys(names, version))
        monkeypatch.setattr(machine, "uses_gpus", lambda: not version.endswith("+cpu"))
        monkeypatch.setattr(machine, "list_gpus", lambda: gpus)
        return check_build(Scene())

    assert told("2.13.0+cpu", ()) is None
    assert told("2.13.0+cu130", GPUS) is None
    beside = told("2.13.0+cpu", GPUS[:2])
    assert beside is not None
    assert beside.verdict is Verdict.ADVICE
    here = "is a build for CPUs, and this machine has 2 x NVIDIA H200 with 140 GiB"
    assert beside.seen == f"torch 2.13.0+cpu {here}"
    assert "docs/guides/gpus.md" in beside.remedy
    gone = told("2.13.0+cu130", ())
    assert gone is not None
    assert gone.verdict is Verdict.PROBLEM
    assert gone.seen.endswith("is a build for GPUs, and the driver shows none")


def test_what_starts_here_has_a_place_and_a_way_for_weights_or_is_a_problem(monkeypatch) -> None:
    monkeypatch.setattr(placement, "uses_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def seen(gpus: int, servers: int = 1, **tables: Any) -> list[tuple[Verdict, str]]:
        monkeypatch.setattr(placement, "list_gpus", lambda: GPUS[:gpus])
        scene = Scene(small_config(**tables), share=Share(range(1), servers))
        return [(finding.verdict, finding.seen) for finding in check_fit(scene)]

    own, way = seen(2)
    assert own == (Verdict.OK, "trainer rank 0: GPU 0; rollout server 0: GPU 1")
    assert way == (Verdict.OK, "weights travel by nccl")
    ((verdict, said),) = seen(2, servers=4)
    assert verdict is Verdict.PROBLEM
    assert "5 GPUs are needed here" in said
    ((_, said),) = seen(1, weights={"transport": "nccl"})
    assert "nccl joins no two processes on one GPU" in said
