"""A reward model behind a real vLLM server scores as transformers' model does."""

from pathlib import Path

import pytest
import torch
from slipstream.environments.judge import RewardModel
from support.rigs.teacher_server import NAME, teacher_server

pytestmark = [pytest.mark.usefixtures("nothing_survives"), pytest.mark.slow]

REPLIES = ("a", "b c", "c b a")


def conversation(reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a b"}, {"role": "assistant", "content": reply}]


async def test_scores_are_those_of_the_model_in_transformers(
    tmp_path: Path, tiny_model: Path
):
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = LlamaForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.score.weight.data.normal_(std=0.5)
    folder = tmp_path / "reward"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    more = ["--runner", "pooling", "--convert", "classify", "--dtype", "float32"]
    with teacher_server(folder, tmp_path / "log", more=more) as url:
        judge = RewardModel(url, NAME)
        scores = [await judge.score(conversation(reply)) for reply in REPLIES]
        likely = await RewardModel(url, NAME, as_probability=True).score(
            conversation("a")
        )
    expected = []
    for reply in REPLIES:
        ids = tokenizer.apply_chat_template(
            conversation(reply), return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.no_grad():
            expected.append(model(ids).logits.item())
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len(set(scores)) == len(REPLIES)
    assert likely == pytest.approx(1 / (1 + 2.718281828 ** -scores[0]), abs=1e-4)
