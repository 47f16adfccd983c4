from __future__ import annotations

import pytest
from slipstream.learner.trainer import compat
from slipstream.learner.trainer.parallel import Launch, check_parallel
from slipstream.protocol.config import LearnerSection, ParallelSection
from slipstream.protocol.errors import ConfigError


def test_another_version_of_megatron_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_versions()
    monkeypatch.setitem(compat.TESTED_VERSIONS, "megatron-core", "9.9")
    with pytest.raises(ConfigError, match=r"megatron-core must be 9\.9.*got 0\.16\.1"):
        compat.check_versions()


def test_missing_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.TESTED_VERSIONS, "megatron-absent", "1.0")
    with pytest.raises(ConfigError, match=r"megatron-absent 1\.0 is required"):
        compat.check_versions()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelSection(cp=2), r"learner\.parallel\.cp must be 1.*got 2"),
    ],
)
def test_layout_that_is_not_there_yet_is_refused(parallel: ParallelSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(LearnerSection(world_size=4, parallel=parallel))


def test_rank_without_torchruns_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="must set WORLD_SIZE"):
        Launch.from_environment()
