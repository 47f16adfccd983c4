import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.machine.description import installed
from slipstream.core.machine.gpus import Gpu
from slipstream.learner.trainer.ranks import compat, cpu
from slipstream.learner.trainer.ranks.cpu import substitute
from slipstream.learner.trainer.ranks.parallel import Launch


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of megatron-core; those that are installed are the tested ones."""
    for name, version in installed(compat.TESTED_VERSIONS).items():
        monkeypatch.setitem(compat.TESTED_VERSIONS, name, version)
    return compat.TESTED_VERSIONS["megatron-core"]


def test_another_version_of_megatron_is_named_and_not_refused(
    monkeypatch, found: str
) -> None:
    assert compat.check_installed() == ""
    monkeypatch.setitem(compat.TESTED_VERSIONS, "megatron-core", "9.9")
    assert compat.check_installed() == f"megatron-core {found} (tested: 9.9)"


def test_another_version_that_lacks_what_a_patch_replaces_is_refused(
    monkeypatch, found
) -> None:
    """A name that is set where nobody reads it would change nothing, in silence."""
    lacking = ModuleType("megatron.core.renamed")
    monkeypatch.setattr(compat, "_install", lambda: substitute(lacking, {"Adam": None}))
    missing = r"module 'megatron\.core\.renamed' has no attribute 'Adam'"
    install = inspect.unwrap(compat.install)
    with pytest.raises(AttributeError, match=missing):
        install()
    monkeypatch.setitem(compat.TESTED_VERSIONS, "megatron-core", "9.9")
    with pytest.raises(
        ConfigError,
        match=rf"megatron-core {re.escape(found)} \(tested: 9\.9\): {missing}",
    ):
        install()
    assert not hasattr(lacking, "Adam")


def test_missing_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.TESTED_VERSIONS, "megatron-absent", "1.0")
    with pytest.raises(ConfigError, match=r"megatron-absent 1\.0 is required"):
        compat.check_installed()


def test_rank_without_torchruns_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="must set WORLD_SIZE"):
        Launch.from_environment()


def test_a_config_that_cannot_be_used_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "none"}')
    with pytest.raises(
        ValueError, match=f"^{tmp_path}/config.json cannot be used: .*none"
    ):
        compat._read_config(str(tmp_path), trust_remote_code=False)


def test_code_of_a_models_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"is never run, got {tmp_path}"):
        compat._read_config(str(tmp_path), trust_remote_code=True)


def test_a_rank_that_cannot_use_the_drivers_gpus_does_not_train_on_the_cpu(
    monkeypatch,
) -> None:
    gpus = (
        Gpu(0, "GPU-0aaa", "NVIDIA H100", 1 << 30),
        Gpu(1, "GPU-1aaa", "NVIDIA H100", 1 << 30),
    )
    monkeypatch.setattr(cpu, "list_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        RunFailed, match="shows GPU 0, 1, but torch .* for CUDA 13.0 can use none"
    ):
        cpu.refuse_unused_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cpu.refuse_unused_gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    cpu.refuse_unused_gpus()
