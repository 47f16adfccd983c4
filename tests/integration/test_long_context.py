"""Sequences far beyond a model's original length: one rank, several and transformers agree."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slipstream.learner.trainer.layers.attention import CoreAttention
from slipstream.learner.trainer.ranks import compat, cpu
from support.ranks import long_ranks
from support.ranks.long_ranks import (
    ADAM_EPS,
    LAYOUTS,
    LEARNING_RATE,
    MOST_SCORES,
    make_model,
    sequences_of,
)
from support.ranks.rank_pool import RankPool
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
# Beyond four times the original length; two context parallel ranks need blocks of queries.
LENGTH = 4608
Trained = Callable[[str, str, int], dict]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    for name in ("llama", "mistral", "gpt-oss"):
        make_model(folder / name, name, layers=2)
        make_model(folder / f"{name}-1", name, layers=1)
    return folder


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, folder: Path) -> Trained:
    """Returns what a model found in a layout, which is run once."""

    @functools.cache
    def found(model: str, layout: str, length: int) -> dict:
        job, (world_size, _) = f"{model}.{layout}.{length}", LAYOUTS[layout]
        return rank_pool.found(long_ranks, {job: world_size}, folder)[job]

    return found


def plain_logprobs(model: torch.nn.Module, length: int) -> torch.Tensor:
    found = []
    for tokens in sequences_of(length):
        ids = torch.from_numpy(tokens.astype("int64"))[None]
        scores = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def plain_model(folder: Path, attention: str = "sdpa") -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )


def assert_alike(found: dict, one: dict) -> None:
    for name in ("before", "after"):
        torch.testing.assert_close(found[name], one[name], rtol=1e-5, atol=5e-5)
    assert found["norm"].item() == pytest.approx(one["norm"].item(), rel=1e-4)
    assert found["weights"].keys() == one["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-4, atol=2e-5)


def assert_like_plain(found: dict, folder: Path, length: int) -> None:
    model = plain_model(folder)
    logprobs = plain_logprobs(model, length)
    torch.testing.assert_close(found["before"], logprobs.detach(), rtol=1e-5, atol=2e-5)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0
    )
    (-logprobs.mean()).backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    assert found["norm"].item() == pytest.approx(sum(squares).sqrt().item(), rel=1e-4)
    optimizer.step()
    with torch.no_grad():
        expected = plain_logprobs(model, length)
    assert (found["after"] - found["before"]).abs().mean() > 0.01
    torch.testing.assert_close(found["after"], expected, rtol=1e-4, atol=1e-3)


def test_long_sequences_need_blocks_in_these_tests() -> None:
    assert LENGTH**2 // 2 > MOST_SCORES


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_one_rank_trains_a_long_sequence_like_plain_transformers(model, folder, trained):
    assert_like_plain(trained(model, "one", LENGTH), folder / model, LENGTH)


def test_sinks_and_windows_are_those_of_plain_transformers_far_away(folder: Path, trained: Trained):
    found = trained("gpt-oss", "one", LENGTH)
    with torch.no_grad():
        expected = plain_logprobs(plain_model(folder / "gpt-oss", "eager"), LENGTH)
    torch.testing.assert_close(found["before"], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("model", ["llama", "mistral", "gpt-oss"])
def test_context_parallel_ranks_train_a_long_sequence_like_one_rank(model: str, trained: Trained):
    assert_alike(trained(model, "cp2", LENGTH), trained(model, "one", LENGTH))


@pytest.mark.slow
def test_131072_tokens_on_two_ranks_are_those_of_one_and_of_plain_transformers(folder, trained):
    length = 131072
    one = trained("llama-1", "one", length)
    assert_alike(trained("llama-1", "cp2", length), one)
    with torch.no_grad():
        expected = plain_logprobs(plain_model(folder / "llama-1"), length)
    torch.testing.assert_close(one["before"], expected, rtol=1e-5, atol=2e-5)


# Packed sequences of several lengths; the first two are of one length class.
BOUNDS = (0, 48, 92, 100, 104)


@pytest.mark.parametrize(
    "kind",
    [
        {"window_size": (5, 0)},
        {"window_size": (5, 0), "softmax_type": "learnable"},
    ],
)
def test_blocks_of_queries_attend_like_whole_sequences(kind: dict[str, object]) -> None:
    cpu.install()
    compat.install()
    settings = {
        "kv_channels": 16,
        "window_size": None,
        "window_attn_skip_freq": None,
        "softmax_type": "vanilla",
        "num_attention_heads": 4,
        "tensor_model_parallel_size": 1,
        "params_dtype": torch.float64,
        "use_cpu_initialization": True,
    }
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = SimpleNamespace(**settings | kind)
    attention = CoreAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=group))
    torch.manual_seed(0)
    if attention.softmax_offset is not None:
        torch.nn.init.normal_(attention.softmax_offset)
    bounds = torch.tensor(BOUNDS)
    packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    given = [
        torch.randn(BOUNDS[-1], heads, 16, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(BOUNDS[-1], 64, dtype=torch.float64)
    found = []
    for most_scores in (MOST_SCORES, 40):
        attention.most_scores = most_scores
        output = attention(*given, None, packed_seq_params=packed)
        parameters = [*given, *attention.parameters()]
        found.append((output, *torch.autograd.grad((output * weights).sum(), parameters)))
    for whole, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-11, atol=1e-12)
