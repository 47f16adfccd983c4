"""The model that recites, and the requests of benchmarks/rollout/drafts.py."""

from pathlib import Path

import pytest

from benchmarks.rollout import drafts

torch = pytest.importorskip("torch")


def test_a_reciter_goes_on_with_its_text_about_as_often_as_it_was_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from benchmarks.common.shapes import SHAPES, make_reciter

    length = drafts.text_of("small")
    folder = make_reciter(tmp_path, "small", length, "float32")
    weights = load_file(next(folder.glob("*.safetensors")))
    embedding = weights["model.embed_tokens.weight"]
    normed = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    logits = normed @ weights["lm_head.weight"].T
    follows = torch.arange(SHAPES["small"].vocab) % length
    follows[:length] = (follows[:length] + 1) % length
    for told in (0.95, 0.8):
        probabilities = (logits / drafts.slip(told, "small")).softmax(-1)
        found = probabilities.gather(1, follows[:, None]).mean()
        assert abs(found - told) <= 0.1


def test_members_share_a_prompt_and_epochs_differ_in_lengths_alone() -> None:
    group = [drafts.request_of(number, 1, "8B") for number in range(2 * drafts.GROUP)]
    prompts = [prompt for prompt, _ in group]
    assert prompts[0] == prompts[drafts.GROUP - 1] != prompts[drafts.GROUP]
    again = [drafts.request_of(number, 2, "8B") for number in range(2 * drafts.GROUP)]
    assert [prompt for prompt, _ in again] == prompts
    assert [length for _, length in again] != [length for _, length in group]


def test_ratios_are_those_to_the_engine_without_drafts_in_the_same_case() -> None:
    row = {"drafted": 0, "accepted": 0, "went_on": 0.8, "mean_logprob": None}
    found = {
        drafts.PLAIN: [{**row, "case": "64,0.95,1", "tokens_per_s": 1000.0}],
        "shared": [
            {**row, "case": "64,0.95,1", "tokens_per_s": 1500.0, "drafted": 4, "accepted": 3}
        ],
    }
    _, _, plain, shared, _ = drafts.table_of(found)
    assert plain == "| 64 | 0.95 | 1 | off | 1,000 | 1.00 | - | 0.8000 | - |"
    assert shared == "| 64 | 0.95 | 1 | shared | 1,500 | 1.50 | 0.75 | 0.8000 | - |"
