"""What `slipstream doctor` says of GPUs, without one: the driver's answers are played."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from slipstream.client.launch import fit, machine, placement
from slipstream.client.launch.fit import Needs, check_fit
from slipstream.client.launch.machine import check_build, check_gpus
from slipstream.client.launch.placement import Share
from slipstream.client.launch.scene import Finding, Scene, Verdict
from slipstream.core.machine.gpus import Gpu
from slipstream.core.settings.config import Config
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
        self.cuda_number = 13000

    def ask(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlSystemGetDriverVersion":
            return "580.1"
        if name == "nvmlSystemGetCudaDriverVersion_v2":
            return self.cuda_number
        if name == "nvmlDeviceGetHandleByIndex":
            return arguments[0]
        assert name == "nvmlDeviceGetMemoryInfo"
        return Memory(140 * GIB, (130 - 100 * (arguments[0] == self.taken)) * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setattr(machine, "asking_nvml", lambda: nullcontext(nvml.ask))
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
    finding = found(2)["GPU in use"]
    assert (finding.verdict, finding.seen) == (
        Verdict.ADVICE,
        "1: 30 of 140 GiB are free",
    )


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


def config_of(**sections: dict[str, Any]) -> Config:
    return small_config(**sections)


def test_a_build_of_torch_that_does_not_fit_the_machine_is_told(monkeypatch) -> None:
    def told(version: str, gpus: tuple[Gpu, ...]) -> Finding | None:
        monkeypatch.setattr(
            machine, "installed", lambda names: dict.fromkeys(names, version)
        )
        monkeypatch.setattr(machine, "uses_gpus", lambda: not version.endswith("+cpu"))
        monkeypatch.setattr(machine, "list_gpus", lambda: gpus)
        return check_build(Scene())

    assert told("2.13.0+cpu", ()) is None
    assert told("2.13.0+cu130", GPUS) is None
    beside = told("2.13.0+cpu", GPUS[:2])
    assert beside.verdict is Verdict.ADVICE
    here = "is a build for CPUs, and this machine has 2 x NVIDIA H200 with 140 GiB"
    assert beside.seen == f"torch 2.13.0+cpu {here}"
    assert "docs/guides/gpus.md" in beside.remedy
    gone = told("2.13.0+cu130", ())
    assert gone.verdict is Verdict.PROBLEM
    assert gone.seen.endswith("is a build for GPUs, and the driver shows none")


def fits(config, monkeypatch, gpus, billions):
    """Findings for a bf16 model of `billions` of parameters and `gpus` GPUs."""
    parameters = int(billions * 1e9)
    needs = Needs(parameters, *(size * parameters for size in (18, 2, 14, 2, 2)))
    monkeypatch.setattr(fit, "needs_of", lambda config: needs)
    monkeypatch.setattr(placement, "uses_gpus", lambda: True)
    monkeypatch.setattr(placement, "list_gpus", lambda: GPUS[:gpus])
    monkeypatch.setattr(fit, "list_gpus", lambda: GPUS[:gpus])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    learner = config.learner
    count = config.rollout_server.count
    share = Share(range(learner.ranks_per_node or learner.world_size), count)
    scene = Scene(config, share=share)
    return {finding.area or "placement": finding for finding in check_fit(scene)}


def test_memory_of_each_gpu_is_compared_with_the_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = fits(config_of(), monkeypatch, 2, 7.0)
    assert (
        findings["placement"].seen == "trainer rank 0: GPU 0; rollout server 0: GPU 1"
    )
    # 7e9 * 18 bytes are 117.3 GiB, and activations want 15 % of 140.
    assert findings["GPU memory"].verdict is Verdict.OK
    assert findings["GPU memory"].seen == "117.3 of 140.0 GiB for a trainer rank"
    assert findings["transport"].seen == "weights travel by nccl"
    assert findings["engine memory"].seen == "13.0 of 126.0 GiB for an engine's weights"
    shared = fits(config_of(), monkeypatch, 1, 7.0)
    assert shared["transport"].seen == "weights travel by ipc"
    assert shared["GPU memory"].verdict is Verdict.PROBLEM
    assert shared["GPU memory"].seen == "117.3 of 84.0 GiB for a trainer rank"
    assert "lower rollout_server.gpu_memory_utilization" in shared["GPU memory"].remedy
    assert 'controller.turns = "sleep"' in shared["GPU memory"].remedy
    offload = {"offload": {"gradients": True, "optimizer": True}}
    in_turn = config_of(controller={"turns": "sleep"}, learner=offload)
    finding = fits(in_turn, monkeypatch, 1, 7.0)["GPU memory"]
    assert finding.seen == "117.3 of 140.0 GiB for a trainer rank"
    tight = fits(config_of(), monkeypatch, 2, 7.5)
    assert tight["GPU memory"].verdict is Verdict.ADVICE


def headers(folder: Path, tensors: dict[str, list[int]]) -> Path:
    """A model's files as far as their sizes are read."""
    folder.mkdir()
    sizes = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(sizes))
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header
    )
    return folder


def test_needs_of_damaged_files_are_not_known(tmp_path: Path) -> None:
    model = {"path": str(headers(tmp_path / "model", {"model.norm.weight": [3]}))}
    assert fit.needs_of(config_of(model=model)) is not None
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:30])
    assert fit.needs_of(config_of(model=model)) is None


def test_experts_are_spread_over_the_expert_parallel_ranks(tmp_path):
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": [1000, 1000],
        "model.layers.0.mlp.shared_experts.up_proj.weight": [1000, 1000],
        "model.layers.0.mlp.experts.0.up_proj.weight": [12000, 1000],
        "model.layers.0.mlp.experts.gate_up_proj": [2, 6000, 1000],
    }
    model = {"path": str(headers(tmp_path / "model", tensors)), "dtype": "bfloat16"}

    tables = {}

    def needs(world_size=4, distributed=False, **parallel):
        ddp = {"use_distributed_optimizer": distributed}
        learner = {"world_size": world_size, "parallel": parallel, "ddp": ddp}
        needs_of = fit.needs_of(config_of(model=model, learner=learner, **tables))
        assert needs_of is not None
        return needs_of

    # 2 million beside 24 million of experts; weight, gradient, moments and master are 18 bytes.
    assert needs(ep=4).rank_bytes == (2 + 6) * 18e6
    assert needs(tp=2).rank_bytes == (1 + 12) * 18e6
    assert needs(tp=2, ep=2, etp=1).rank_bytes == (1 + 12) * 18e6
    assert needs(tp=2, ep=2).rank_bytes == (1 + 6) * 18e6
    assert needs(pp=2, ep=2).rank_bytes == (1 + 6) * 18e6
    # Optimizer state is shared by the copies of each: four of the dense, one of experts.
    assert needs(ep=4, distributed=True).rank_bytes == 2e6 * (6 + 12 / 4) + 6e6 * 18
    assert needs(ep=4).saved_bytes == 26e6 * 14
    assert needs(ep=4).worker_bytes == 52e6

    # A layer that drafts is whole on every rank; here it is the product of two states alone.
    tables["drafts"] = {}
    sizes = tmp_path / "model" / "config.json"
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"hidden_size": 1000}))
    assert needs(ep=4).rank_bytes == (2 + 6) * 18e6 + 2e6 * 16
    assert needs(ep=4).saved_bytes == 26e6 * 14 + 2e6 * 12
    assert needs(ep=4).worker_bytes == 56e6
    del tables["drafts"]

    # Layers that predict further tokens are not loaded.
    tensors |= {
        "mtp.fc.weight": [9, 9],
        "model.layers.1.mlp.experts.0.up_proj.weight": [9, 9],
    }
    model["path"] = str(headers(tmp_path / "further", tensors))
    assert needs(ep=4).rank_bytes == (2 + 6) * 18e6

    # The check of the model says this.
    (tmp_path / "further" / "config.json").unlink()
    assert fit.needs_of(config_of(model=model)) is None


def test_engine_without_room_for_a_cache_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(rollout_server={"gpu_memory_utilization": 0.1})
    finding = fits(config, monkeypatch, 2, 6.0)["engine memory"]
    assert finding.verdict is Verdict.PROBLEM
    assert finding.seen == "11.2 of 14.0 GiB for an engine's weights"


def test_what_does_not_fit_one_machine_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(rollout_server={"count": 4})
    finding = fits(config, monkeypatch, 2, 1.0)["placement"]
    assert finding.verdict is Verdict.PROBLEM
    assert "5 GPUs are needed here" in finding.seen
    wrong = fits(config_of(weights={"transport": "nccl"}), monkeypatch, 1, 1.0)[
        "placement"
    ]
    assert "nccl joins no two processes on one GPU" in wrong.seen


@pytest.mark.parametrize(
    ("torch", "runtime", "cuda_number", "is_problem"),
    [
        ("2.11.0+cu130", "", 13000, False),
        ("2.11.0+cu130", "", 13020, False),
        ("2.11.0+cu130", "", 12080, True),
        ("2.9.0+cu128", "", 12040, False),
        ("2.13.0", "13.0.96", 12080, True),
        ("2.13.0", "13.0.96", 13000, False),
        # Nothing says what this build needs, or which CUDA the driver has.
        ("2.13.0", "", 12080, False),
        ("2.11.0+cu130", "", 0, False),
        ("2.13.0+cpu", "", 12080, False),
    ],
)
def test_a_driver_for_an_older_cuda_than_torchs_is_a_problem(
    torch: str,
    runtime: str,
    cuda_number: int,
    is_problem: bool,
    nvml: FakeNvml,
    monkeypatch,
) -> None:
    versions = {"torch": torch, "nvidia-cuda-runtime": runtime}
    monkeypatch.setattr(
        machine, "installed", lambda names: {name: versions[name] for name in names}
    )
    nvml.cuda_number = cuda_number
    findings = found(1)
    assert ("CUDA" in findings) is is_problem
    if is_problem:
        assert findings["CUDA"].verdict is Verdict.PROBLEM
        assert "driver 580.1 is for CUDA 12.8, and torch was built for 13.0" in (
            findings["CUDA"].seen
        )
