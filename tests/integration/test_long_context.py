"""Sequences far beyond a model's original length: one rank, several and transformers agree."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.learner.trainer.layers import attention
from support.fakes.core_attention import core_attention
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import kept, likelier, opened, score, weights_of
from support.references.plain_policy import adam_step
from transformers import AutoModelForCausalLM

LAYOUTS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
}
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-3
VOCAB = 64
ORIGINAL = 1024
LONGEST = 131072
# Half of the product's length needs blocks of queries then, for a quarter of the work.
MOST_SCORES = attention.MOST_SCORES // 4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": LONGEST / ORIGINAL,
    "original_max_position_embeddings": ORIGINAL,
}


def make_model(folder: Path, name: str, *, layers: int) -> None:
    """A random model in float32 whose original length is a small part of what it may be given."""
    import transformers

    kinds = {
        "llama": ("Llama", {}),
        # The window is longer than a block of queries' share of the original length.
        "mistral": ("Mistral", {"sliding_window": 700}),
        "gpt-oss": (
            "GptOss",
            {"sliding_window": 300, "num_local_experts": 4, "num_experts_per_tok": 2}
            | {
                "rope_parameters": YARN
                | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            },
        ),
    }
    kind, values = kinds[name]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "rope_parameters": YARN,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | values)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if parameter.dim() > 1 and not place.endswith("_bias"):
                # Attention must look far: flat scores would hide where a token stands.
                parameter.mul_(5.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def sequences_of(length: int) -> list[np.ndarray]:
    """One sequence of `length` tokens and some short ones, which are packed together."""
    random = np.random.default_rng(length)
    sizes = (length, 700, 60, 9)
    return [random.integers(0, VOCAB, size).astype(np.uint32) for size in sizes]


def config_of(folder: Path, layout: str, length: int):
    world_size, parallel = LAYOUTS[layout]
    table = {
        "run": {"name": "long", "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "algorithm": {
            "group_size": 2,
            "groups_per_step": 1,
            "learning_rate": LEARNING_RATE,
        },
        "sampling": {"max_reply_tokens": length - 8, "max_episode_tokens": length},
        "learner": {
            "world_size": world_size,
            "parallel": parallel,
            "micro_batch_tokens": length // world_size,
            "weight_decay": 0.0,
            "optimizer": {"adam_eps": ADAM_EPS},
            "grad_clip": 0.0,
            "timeout_s": 600.0,
        },
    }
    return parse_config(table, source="test")


def run_rank(folder: Path, job: str) -> None:
    """A rank's part of a job MODEL.LAYOUT.LENGTH: a model before and after a step."""
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence

    model, layout, length = job.split(".")
    if int(length) < LONGEST:
        attention.MOST_SCORES = MOST_SCORES
    config = config_of(folder / model, layout, int(length))
    policy = opened(config)
    token_ids = sequences_of(int(length))
    sequences = [TrainingSequence.of_tokens(token_id) for token_id in token_ids]
    scores = {"before": score(policy, token_ids, max_tokens=policy.max_tokens)}
    scores["norm"] = torch.tensor(likelier(policy, sequences, LEARNING_RATE))
    scores["after"] = score(policy, token_ids, max_tokens=policy.max_tokens)
    kept(policy, scores | {"weights": weights_of(policy)}, folder / f"{job}.pt")


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
        return rank_pool.found(__file__, {job: world_size}, folder)[job]

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
    norm = adam_step(model, -logprobs.mean(), LEARNING_RATE, eps=ADAM_EPS)
    assert found["norm"].item() == pytest.approx(norm, rel=1e-4)
    with torch.no_grad():
        expected = plain_logprobs(model, length)
    assert (found["after"] - found["before"]).abs().mean() > 0.01
    torch.testing.assert_close(found["after"], expected, rtol=1e-4, atol=1e-3)


def test_long_sequences_need_blocks_in_these_tests() -> None:
    assert LENGTH**2 // 2 > MOST_SCORES


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_one_rank_trains_a_long_sequence_like_plain_transformers(
    model, folder, trained
):
    assert_like_plain(trained(model, "one", LENGTH), folder / model, LENGTH)


def test_sinks_and_windows_are_those_of_plain_transformers_far_away(
    folder: Path, trained: Trained
):
    outputs = trained("gpt-oss", "one", LENGTH)
    with torch.no_grad():
        expected = plain_logprobs(plain_model(folder / "gpt-oss", "eager"), LENGTH)
    torch.testing.assert_close(outputs["before"], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("model", ["llama", "mistral", "gpt-oss"])
def test_context_parallel_ranks_train_a_long_sequence_like_one_rank(
    model: str, trained: Trained
):
    assert_alike(trained(model, "cp2", LENGTH), trained(model, "one", LENGTH))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_131072_tokens_on_two_ranks_are_those_of_one_and_of_plain_transformers(
    folder, trained
):
    length = 131072
    one_rank = trained("llama-1", "one", length)
    assert_alike(trained("llama-1", "cp2", length), one_rank)
    with torch.no_grad():
        expected = plain_logprobs(plain_model(folder / "llama-1"), length)
    torch.testing.assert_close(one_rank["before"], expected, rtol=1e-5, atol=2e-5)


# Packed sequences of several lengths; the first two are of one length class.
BOUNDS = (0, 48, 92, 100, 104)


@pytest.mark.parametrize(
    "kind",
    [{"window_size": (5, 0)}, {"window_size": (5, 0), "softmax_type": "learnable"}],
)
def test_blocks_of_queries_attend_like_whole_sequences(
    kind: dict[str, object], monkeypatch
) -> None:
    torch.manual_seed(0)
    layer = core_attention(torch.float64, **kind)
    bounds = torch.tensor(BOUNDS)
    packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    inputs = [
        torch.randn(BOUNDS[-1], heads, 16, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(BOUNDS[-1], 64, dtype=torch.float64)
    found = []
    for most_scores in (MOST_SCORES, 40):
        monkeypatch.setattr(attention, "MOST_SCORES", most_scores)
        attention.length_groups.cache_clear()
        output = layer(*inputs, None, packed_seq_params=packed)
        parameters = [*inputs, *layer.parameters()]
        found.append(
            (output, *torch.autograd.grad((output * weights).sum(), parameters))
        )
    for whole_gradient, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole_gradient, rtol=1e-11, atol=1e-12)
