"""A policy with adapters needs no second model as its reference."""

from pathlib import Path

import pytest
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.configuration.roles import reference_is_policy, role_settings
from support.ranks import bare_ranks
from support.ranks.bare_ranks import JOBS, SHARING, WITH_REFERENCE, config_of
from support.ranks.rank_pool import RankPool

NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    return rank_pool.found(bare_ranks, {job: size for job, (size, _) in JOBS.items()}, folder)


@pytest.mark.parametrize("job", WITH_REFERENCE)
def test_switched_off_adapters_leave_the_model_of_the_folder(job: str, found: dict[str, dict]):
    result = found[job]
    assert result["kind"] == "PolicyWithoutAdapters"
    torch.testing.assert_close(result["bare"], result["own"], rtol=1e-6, atol=1e-6)
    first, second = result["metrics"]
    # New adapters have no effect; after a step the policy has left its reference.
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_reference"] > 1e-7
    expected = found["one-alone" if job in SHARING else "one"]["metrics"][1]["kl_reference"]
    assert second["kl_reference"] == pytest.approx(expected, rel=1e-4)


def test_a_pass_without_adapters_counts_in_no_step(found: dict[str, dict]) -> None:
    for metrics, plain in zip(
        found["one-shared"]["metrics"], found["without-reference"]["metrics"], strict=True
    ):
        assert metrics["shared_tokens"] == plain["shared_tokens"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": 0}},
        {"reference": {"path": "models/other"}},
        {"reference": {"refresh_every_steps": 2}},
    ],
)
def test_a_reference_that_differs_is_a_model_of_its_own(changes: dict, folder: Path) -> None:
    table = config_of("one", folder).model_dump(mode="json", exclude_none=True)
    bare = parse_config(table, source="test")
    assert reference_is_policy(bare)
    assert role_settings(bare) == {}
    assert not reference_is_policy(parse_config(table | changes, source="test"))
