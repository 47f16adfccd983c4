"""Every field of config.json that changes the function is computed with as transformers does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.core.models.model_fields import field_problems, unknown_fields
from slipstream.core.models.model_sizes import read_model_table
from support.fakes import field_models
from support.ranks import field_ranks
from support.ranks.field_ranks import probe
from support.ranks.rank_pool import RankPool
from support.references.plain_policy import plain_model

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# Kind of positions -> settings that make another model, one at a time.
OTHER_ROPE: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 2.0},
    "llama3-other": {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 512},
    "yarn-other": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "truncate": True,
    },
    "yarn-factor": {"attention_factor": 1.0},
    "ministral": {"mscale": 2.0},
    "glm": {"partial_rotary_factor": 1.0},
    "gpt-oss": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    "latent": {"factor": 2.0, "mscale_all_dim": 1.0},
}
OLD_FORM = ["llama.llama3", "qwen3.llama3", "qwen3-moe.default", "llama.yarn"]


@pytest.fixture(scope="module")
def folder(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what the learner makes of them."""
    folder = tmp_path_factory.mktemp("fields")
    for case in field_models.CASES:
        field_models.make_field_model(folder, case)
    for case in OLD_FORM:
        field_models.make_field_model(folder / "old", case)
        field_models.write_as_transformers_4(folder / "old" / case)
    jobs = [*field_models.CASES, *(f"old/{case}" for case in OLD_FORM)]
    rank_pool.run(Path(field_ranks.__file__), jobs, world_size=1, folder=folder)
    return folder


def logprobs(folder: Path, changes: Mapping[str, Any]) -> torch.Tensor:
    """What transformers computes with `changes` to config.json and the same weights."""
    model = plain_model(folder, **changes)
    found = []
    with torch.no_grad():
        for tokens in probe():
            ids = torch.from_numpy(tokens).long()
            scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(scores.gather(1, ids[1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize(
    "case", [*field_models.CASES, *(f"old/{case}" for case in OLD_FORM)]
)
def test_the_learner_computes_what_transformers_does(case: str, folder: Path) -> None:
    stored = torch.load(folder / f"{case}.pt", weights_only=True)
    torch.testing.assert_close(stored, logprobs(folder / case, {}), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", field_models.CASES)
def test_the_models_of_these_tests_show_every_field(case: str, folder: Path) -> None:
    """A field that changed nothing here could be ignored by the learner unseen."""
    family, rope = case.split(".")
    first = logprobs(folder / case, {})
    ropes: dict[str, Any] = {
        "rope_parameters": field_models.ROPES[rope] | {"rope_theta": 10000.0}
    }
    if rope == "gemma3":
        ropes = {
            f"{name} of {layer}": field_models.ROPES[rope]
            | {layer: field_models.ROPES[rope][layer] | {name: 2000.0}}
            for layer, name in (
                ("sliding_attention", "rope_theta"),
                ("full_attention", "rope_theta"),
                ("full_attention", "factor"),
            )
        }
    elif field_models.ROPES[rope]["rope_type"] != "default":
        ropes["unscaled"] = field_models.ROPES[rope] | {"rope_type": "default"}
    other_values = OTHER_ROPE.get(rope, {})
    ropes |= {
        name: field_models.ROPES[rope] | {name: value}
        for name, value in other_values.items()
    }
    choices = field_models.CHOICES | field_models.FAMILIES[family].choices
    for name, value in {**choices, **ropes}.items():
        field = "rope_parameters" if name in ropes else name
        other = logprobs(folder / case, {field: value})
        assert (other - first).abs().max() > 2e-4, name


@pytest.mark.parametrize("case", field_models.CASES)
def test_what_transformers_writes_is_neither_unknown_nor_refused(
    case: str, folder: Path
) -> None:
    values = read_model_table(folder / case)
    assert unknown_fields(values) == []
    assert list(field_problems(values)) == []
