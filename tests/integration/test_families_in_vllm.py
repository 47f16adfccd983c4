"""vLLM computes what transformers does for every family, as loaded and after a publish."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.fakes.field_models import add_tokenizer, make_field_model
from support.ranks.field_ranks import probe
from support.references.plain_policy import plain_model
from support.rigs import family_engine
from support.rigs.receiver_story import run_program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CASES = [
    "llama.linear",
    "llama.yarn-other",
    "llama.llama3-other",
    "mistral.default",
    "ministral3.ministral",
    "olmo2.default",
    "gemma3.gemma3",
    "glm.glm",
    "deepseek.latent",
    "gpt-oss.gpt-oss",
    "kimi.latent",
    "kimi25.latent",
    "mimo.default",
    "glm-lite.untied",
    "minimax.glm",
    "smollm3.llama3",
]
# vLLM's kernels for a CPU take no smaller heads, and pad smaller experts.
WIDER_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
WIDER_EXPERTS = {
    "glm": {"moe_intermediate_size": 64},
    "deepseek": {"moe_intermediate_size": 64},
    "kimi": {"moe_intermediate_size": 64},
    "kimi25": {"moe_intermediate_size": 64},
    "glm-lite": {"moe_intermediate_size": 64},
    "minimax": {"intermediate_size": 64},
    "gpt-oss": {"intermediate_size": 64},
}

# vLLM's convolution for a CPU takes the published width alone.
DELTA_NETS = {"moe_intermediate_size": 64, "linear_conv_kernel_dim": 4}


def computed(
    folder: Path, case: str, *, stages: int = 1, **sizes: object
) -> tuple[np.ndarray, np.ndarray, float]:
    """What an engine computes with two sets of weights, what transformers does, and how far apart.

    The engine's: as loaded, with the other's weights, and with its own again.
    """
    for name, seed in (("first", 0), ("second", 1)):
        make_field_model(folder / name, case, seed=seed, **sizes)
    folders = [folder / name / case for name in ("first", "second")]
    add_tokenizer(folders[0])
    output = folder / "found.npy"
    arguments = (*map(str, folders), str(output), f"--stages={stages}")
    run_program(family_engine.__file__, *arguments, limit_s=400)
    first, second = map(logprobs, folders)
    expected = np.stack([first, second, first])
    return np.load(output, allow_pickle=False), expected, np.abs(first - second).mean()


@pytest.mark.parametrize("stages", [1, 2], ids=["one stage", "two stages"])
@pytest.mark.parametrize("case", CASES)
def test_an_engine_computes_what_transformers_does(
    case: str, stages: int, tmp_path: Path
) -> None:
    sizes = WIDER_EXPERTS.get(case.split(".")[0], {})
    if case.startswith(("olmo", "mimo", "smollm3")):
        sizes = sizes | WIDER_HEADS
    if stages > 1 and case.startswith("glm"):
        # The first layer has no experts, and vLLM wants a layer with experts in each stage.
        sizes = sizes | {"num_hidden_layers": 4}
    logprobs, expected, apart = computed(tmp_path, case, stages=stages, **sizes)
    assert apart > 0.1
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", ["qwen3-next.glm", "qwen35.glm", "qwen35-moe.glm"])
def test_an_engine_in_bfloat16_computes_delta_nets_as_transformers_does(
    case: str, tmp_path: Path
):
    logprobs, expected, apart = computed(tmp_path, case, **DELTA_NETS)
    gaps = np.abs(logprobs - expected).mean(axis=1)
    print(f"mean gaps {gaps}, {apart} between the models")
    assert gaps.max() < 0.02 * apart


def logprobs(folder: Path) -> np.ndarray:
    """Log-probabilities of the probe by transformers."""
    model = plain_model(folder)
    found = []
    with torch.no_grad():
        for tokens in probe():
            ids = torch.from_numpy(tokens[:-1]).long()
            scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(scores.gather(1, ids[1:, None])[:, 0])
    return torch.cat(found).numpy()
