"""Models that see images train like plain transformers, in every layout that they take."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from make_tiny_vision_model import FAMILIES, make_model, make_tokenizer
from slipstream.protocol.errors import ConfigError
from support.ranks import vision_ranks
from support.ranks.rank_pool import RankPool
from support.ranks.vision_ranks import ADAM_EPS, LAYOUTS, LEARNING_RATE, config_of, conversations
from support.references.plain_vision import plain_logprobs, plain_model

pytestmark = pytest.mark.usefixtures("one_thread")
# Megatron trains experts with tensor parallel ranks only if these share the tokens, too.
LACKING = {("qwen3_vl_moe", "tp2"), ("qwen2_5_vl", "ep2"), ("qwen3_vl", "ep2")}
OTHERS = [
    (family, layout)
    for family, layout in itertools.product(FAMILIES, LAYOUTS)
    if layout != "one" and (family, layout) not in LACKING
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        make_tokenizer(folder / family)
        # Two tensor parallel ranks share two heads of keys.
        heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        make_model(folder / family, family, **heads)
    return folder


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, folder: Path) -> Callable[[str, str], dict]:
    """Returns what a family's layout found, which is run once."""

    @functools.cache
    def found(family: str, layout: str) -> dict:
        job, world_size = f"{family}.{layout}", 1 if layout == "one" else 2
        program = Path(vision_ranks.__file__)
        rank_pool.run(program, [job], world_size=world_size, folder=folder)
        return torch.load(folder / f"{job}.pt", weights_only=True)

    return found


def logprobs_of(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    return torch.cat(plain_logprobs(model, folder, conversations(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_trains_images_like_plain_transformers(family: str, folder: Path, trained) -> None:
    found = trained(family, "one")
    model = plain_model(folder / family)
    logprobs = logprobs_of(model, folder / family)
    torch.testing.assert_close(found["before"], logprobs.detach(), rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0
    )
    (-logprobs.mean()).backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    assert found["norm"].item() == pytest.approx(sum(squares).sqrt().item(), rel=1e-5)
    optimizer.step()
    with torch.no_grad():
        expected = logprobs_of(model, folder / family)
    assert (found["after"] - found["before"]).abs().mean() > 0.05
    torch.testing.assert_close(found["after"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_and_the_tower_matter(family: str, folder: Path, trained) -> None:
    found = trained(family, "one")
    model = plain_model(folder / family)
    towers = {name for name in found["weights"] if "visual." in name}
    assert len(towers) > 20
    first = {name.replace("model.", ""): value for name, value in model.state_dict().items()}
    changed = [
        n for n in towers if not torch.equal(found["weights"][n], first[n.replace("model.", "")])
    ]
    assert len(changed) > 0.9 * len(towers)


@pytest.mark.parametrize(("family", "layout"), OTHERS)
def test_layouts_train_images_like_one_rank(family: str, layout: str, trained) -> None:
    one, found = (trained(family, name) for name in ("one", layout))
    for name in ("before", "after"):
        torch.testing.assert_close(found[name], one[name], rtol=1e-5, atol=2e-5)
    assert found["norm"].item() == pytest.approx(one["norm"].item(), rel=1e-5)
    assert found["weights"].keys() == one["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=1e-5)


def test_context_parallel_ranks_are_refused_images(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(LAYOUTS, "cp2", {"cp": 2})
    with pytest.raises(ConfigError, match="cp must be 1 for a Qwen3VL.*would cut its images"):
        config_of(folder / "qwen3_vl", "cp2")
