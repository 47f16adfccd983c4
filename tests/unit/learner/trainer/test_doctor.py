"""What the learner's part of `slipstream doctor` says, with and without a GPU."""

import pytest
from slipstream.learner.trainer import doctor


def test_a_build_for_cpus_is_told_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    assert not capsys.readouterr().out


def test_torch_for_gpus_without_a_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    ((area, verdict, seen, _),) = doctor.findings()
    assert (area, verdict) == ("gpu", "problem")
    assert "built for CUDA 13.0 and sees no GPU" in seen


def test_gpu_machine_is_told_which_attention_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_gpus", lambda: iter(()))
    monkeypatch.setattr(doctor, "_nccl", lambda: ("nccl", "ok", "", ""))
    found = {area: (verdict, seen) for area, verdict, seen, _ in doctor.findings()}
    assert found["attention"] == (
        "advice",
        "TransformerEngine is not installed: attention by torch",
    )
