"""Models that see images train like plain transformers, in every layout that they take."""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from make_tiny_vision_model import FAMILIES, make_model, make_tokenizer
from safetensors.torch import load_file
from slipstream.core.errors import ConfigError
from slipstream.core.settings.role_sections import ATTENTION, FUSED, matrices_named
from slipstream.extensions.other_models.trainer import INITIAL_SCALE
from support.fakes.published_qwen35 import MTP, write_as_published
from support.ranks import vision_ranks
from support.ranks.rank_pool import RankPool, each_job
from support.ranks.vision_ranks import (
    ADAM_EPS,
    CRITIC,
    LAYOUTS,
    LEARNING_RATE,
    LORA,
    LORA_ALPHA,
    LORA_RANK,
    REPLAY,
    SAMPLED,
    config_of,
    conversations,
    experts_of,
)
from support.references.plain_policy import ForcedExperts, adam_step
from support.references.plain_vision import plain_logprobs, plain_model, plain_outputs

pytestmark = [
    pytest.mark.long_but("qwen3_vl-one"),
    pytest.mark.usefixtures("one_thread"),
]
# Megatron trains experts with tensor parallel ranks only if these share the tokens, too.
LACKING = {
    *((family, "tp2") for family in FAMILIES if family.endswith("_moe")),
    *((family, "ep2") for family in FAMILIES if not family.endswith("_moe")),
}
QWEN35 = ("qwen3_5", "qwen3_5_moe")
# Layouts of Qwen3.5 in every run; the rest of it is slow.
QUICK = {("qwen3_5", "tp2"), ("qwen3_5_moe", "ep2")}
OTHERS = [
    pytest.param(family, layout, marks=[pytest.mark.slow] if is_slow else [])
    for family, layout in itertools.product(FAMILIES, LAYOUTS)
    if layout != "one" and (family, layout) not in LACKING
    for is_slow in [family in QWEN35 and (family, layout) not in QUICK]
]
SCALE = LORA_ALPHA / LORA_RANK
ADAPTED = [
    ("qwen2_5_vl", "pp2"),
    ("qwen3_vl", "tp2"),
    ("qwen3_5", "tp2"),
    pytest.param("qwen3_vl_moe", "ep2", marks=pytest.mark.slow),
]
# Mixtures, whose tokens go where a rollout server sent them.
MIXTURE = "qwen3_vl_moe"
MIXTURES = (MIXTURE, "qwen3_5_moe")
REPLAYED = [f"{MIXTURE}.pp2{REPLAY}", f"qwen3_5_moe.ep2{REPLAY}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        make_tokenizer(folder / family)
        # Two tensor parallel ranks share two heads of keys.
        heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        make_model(folder / family, family, **heads)
    for family in QWEN35:
        write_as_published(folder / family)
    return folder


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, folder: Path) -> Callable[[str, str], dict]:
    """Returns what a family's layout found, which is run once."""

    @functools.cache
    def found(family: str, layout: str) -> dict:
        job = f"{family}.{layout}"
        world_size = 1 if layout.startswith("one") else 2
        return rank_pool.found(vision_ranks, {job: world_size}, folder)[job]

    return found


def logprobs_of(
    model: torch.nn.Module, folder: Path, forced: ForcedExperts | None = None
) -> torch.Tensor:
    all_conversations = conversations(folder)
    if forced is None:
        return torch.cat(plain_logprobs(model, folder, all_conversations))
    experts = experts_of(len(tokens) for tokens, _ in all_conversations)
    found = []
    for conversation, ids in zip(all_conversations, experts, strict=True):
        forced.expert_ids = ids
        found += plain_logprobs(model, folder, [conversation])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "one") for family in FAMILIES),
        *((family, f"one{REPLAY}") for family in MIXTURES),
    ],
)
def test_one_rank_trains_images_like_plain_transformers(
    family, layout, folder, trained
):
    outputs = trained(family, layout)
    model = plain_model(folder / family)
    forced = ForcedExperts(model) if REPLAY in layout else None
    logprobs = logprobs_of(model, folder / family, forced)
    torch.testing.assert_close(
        outputs["before"], logprobs.detach(), rtol=1e-5, atol=1e-5
    )
    norm = adam_step(model, -logprobs.mean(), LEARNING_RATE, eps=ADAM_EPS)
    assert outputs["norm"].item() == pytest.approx(norm, rel=1e-5)
    with torch.no_grad():
        expected = logprobs_of(model, folder / family, forced)
    assert (outputs["after"] - outputs["before"]).abs().mean() > 0.05
    torch.testing.assert_close(outputs["after"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", QWEN35)
def test_a_published_qwen35_is_loaded_whole_and_exported_as_it_was(
    family, folder, trained
):
    weights = trained(family, "one")["weights"]
    published, exported = (
        load_file(folder / name / "model.safetensors")
        for name in (family, f"{family}-final")
    )
    assert torch.equal(exported.pop(MTP), published.pop(MTP))
    shapes = (
        {name: x.shape for name, x in tensors.items()}
        for tensors in (published, exported)
    )
    assert next(shapes) == next(shapes)
    model = plain_model(folder / f"{family}-final").state_dict()
    assert weights.keys() == exported.keys() == model.keys()
    for name, tensor in weights.items():
        assert torch.equal(exported[name], tensor), name
        assert torch.equal(model[name], tensor), name


@pytest.mark.parametrize(("family", "layout"), OTHERS)
def test_layouts_train_images_like_one_rank(family: str, layout: str, trained) -> None:
    check_alike(trained(family, layout), trained(family, "one"))


@pytest.mark.parametrize("job", each_job(REPLAYED, REPLAYED[1:]))
def test_layouts_send_tokens_of_images_to_the_experts_of_the_rollout(
    job: str, trained
) -> None:
    family, layout = job.split(".")
    one_rank = trained(family, f"one{REPLAY}")
    check_alike(trained(family, layout), one_rank)
    # The routers themselves choose others.
    assert (one_rank["before"] - trained(family, "one")["before"]).abs().mean() > 1e-3


def check_alike(found: dict, one: dict) -> None:
    for name in ("before", "after"):
        torch.testing.assert_close(found[name], one[name], rtol=1e-5, atol=2e-5)
    assert found["norm"].item() == pytest.approx(one["norm"].item(), rel=1e-5)
    assert found["weights"].keys() == one["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_a_decoder_train_behind_a_frozen_tower(
    family: str, folder: Path, trained
):
    outputs = trained(family, f"one{LORA}")
    model = plain_model(folder / family)
    before = logprobs_of(model, folder / family)
    torch.testing.assert_close(outputs["before"], before.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        outputs["first"]["switched_off"], outputs["before"], rtol=0, atol=1e-6
    )
    (-before.mean()).backward()
    first = load_file(folder / f"{family}.one{LORA}-first/adapter_model.safetensors")
    squares = 0.0
    for name, parameter in model.named_parameters():
        # B is 0, so A has no gradient yet, and B has alpha / rank * dW A^T.
        factor = first.pop(
            f"base_model.model.{name.removesuffix('weight')}lora_A.weight", None
        )
        if factor is not None:
            squares += (SCALE * parameter.grad @ factor.T).square().sum().item()
    # Every matrix with an adapter is one of transformers' model.
    assert not [name for name in first if "lora_A" in name]
    assert outputs["norm"].item() == pytest.approx(squares**0.5, rel=1e-5)
    assert (outputs["after"] - outputs["before"]).abs().mean() > 0.01
    model.load_state_dict(in_memory(family, outputs["weights"]))
    with torch.no_grad():
        after = logprobs_of(model, folder / family)
    torch.testing.assert_close(outputs["after"], after, rtol=1e-4, atol=1e-4)


def in_memory(family: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with the names and forms that transformers' modules have."""
    if family == "qwen2_5_vl":
        renamed = {
            n.replace("model.", "model.language_model.", 1): t
            for n, t in weights.items()
        }
        return {n.replace("visual.", "model.visual.", 1): t for n, t in renamed.items()}
    is_turned = family == MIXTURE
    return {
        n: t.mT if is_turned and ".experts." in n else t for n, t in weights.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_exported_and_sent_as_what_was_merged(
    family: str, folder: Path, trained
):
    outputs = trained(family, f"one{LORA}")
    path = folder / f"{family}.one{LORA}-adapters"
    adapters = load_file(path / "adapter_model.safetensors")
    settings = json.loads((path / "adapter_config.json").read_text())
    first = in_memory(family, outputs["first"]["weights"])
    weights = in_memory(family, outputs["weights"])
    modules = [name for name, _ in plain_model(folder / family).named_modules()]
    targets = [
        name for name in modules if re.fullmatch(settings["target_modules"], name)
    ]
    adapted = ATTENTION if family in MIXTURES else FUSED
    parts = {part for parts in matrices_named(adapted).values() for part in parts}
    decoder = [name for name in modules if ".layers." in name and "visual" not in name]
    assert targets == [name for name in decoder if name.rpartition(".")[2] in parts]
    assert {
        name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        for name in adapters
    } == {*targets}
    for name, base in first.items():
        expected = base
        module = name.removesuffix(".weight")
        if module in targets:
            a, b = (
                adapters[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB"
            )
            expected = base + SCALE * b @ a
            assert not torch.equal(weights[name], base)
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-7)
    sent = outputs["first"]["sent"]
    assert sent.keys() == {*outputs["weights"], *adapters}
    for name, tensor in (outputs["first"]["weights"] | adapters).items():
        assert torch.equal(sent[name], tensor), name


@pytest.mark.parametrize(("family", "layout"), ADAPTED)
def test_layouts_train_adapters_behind_images_like_one_rank(
    family, layout, folder, trained
):
    check_alike(trained(family, f"{layout}{LORA}"), trained(family, f"one{LORA}"))
    ours, one_rank = (
        load_file(folder / f"{family}.{name}{LORA}-adapters/adapter_model.safetensors")
        for name in (layout, "one")
    )
    torch.testing.assert_close(ours, one_rank, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_values_replies_behind_images_like_plain_transformers(
    family, folder, trained
):
    outputs = trained(family, f"one{CRITIC}")
    config = config_of(folder / family, f"one{CRITIC}")
    model = plain_model(folder / family)
    head = torch.nn.Linear(model.lm_head.in_features, 1)
    generator = torch.Generator().manual_seed(config.run.seed)
    start = torch.randn(1, head.in_features, generator=generator)
    head.weight.data = start * INITIAL_SCALE / math.sqrt(head.in_features)
    head.bias.data.zero_()
    model.lm_head = head

    def values() -> torch.Tensor:
        # The value before a token is that of the token before it.
        expected_outputs = plain_outputs(
            model, folder / family, conversations(folder / family)
        )
        return torch.cat([output[-1 - SAMPLED : -1, 0] for output in expected_outputs])

    before = values()
    torch.testing.assert_close(outputs["before"], before.detach(), rtol=1e-5, atol=1e-5)
    loss = (0.5 * (before - outputs["returns"]).square()).mean()
    norm = adam_step(model, loss, LEARNING_RATE, eps=ADAM_EPS)
    assert outputs["norm"].item() == pytest.approx(norm, rel=1e-5)
    # Features of images reach the values: the tower has gradients.
    assert any(
        p.grad.abs().max() > 1e-6 for n, p in model.named_parameters() if "visual" in n
    )
    with torch.no_grad():
        torch.testing.assert_close(outputs["after"], values(), rtol=1e-4, atol=1e-4)


def test_ranks_of_a_critic_value_replies_behind_images_like_one_rank(trained) -> None:
    ours, one_rank = (trained("qwen3_vl", f"{name}{CRITIC}") for name in ("sp2", "one"))
    for name, tensor in one_rank.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=2e-5)


def test_context_parallel_ranks_are_refused_images(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(LAYOUTS, "cp2", {"cp": 2})
    with pytest.raises(
        ConfigError, match="cp must be 1 for a Qwen3VL.*would cut its images"
    ):
        config_of(folder / "qwen3_vl", "cp2")
