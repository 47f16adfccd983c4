"""vLLM computes what transformers does behind images, as loaded and after a publish."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from make_tiny_vision_model import FAMILIES, make_model, make_tokenizer  # noqa: E402
from support.ranks.vision_ranks import conversations  # noqa: E402
from support.references.plain_vision import plain_logprobs, plain_model  # noqa: E402
from support.rigs import vision_engine  # noqa: E402
from support.rigs.sent_engine import run_engine  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_sees_images_as_transformers_does(family: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        make_tokenizer(folder)
        make_model(folder, family, seed=seed)
    run_engine(vision_engine.__file__, *folders, tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz", allow_pickle=False) as found:
        results = [found[name] for name in found.files]
    for folder, tokens, logprobs in zip(folders, results[::2], results[1::2], strict=True):
        expected = reply_logprobs(folder, tokens)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-4)


def reply_logprobs(folder: Path, replies: np.ndarray) -> np.ndarray:
    model, length = plain_model(folder), replies.shape[1]
    whole = [
        (np.concatenate([tokens, reply]), images)
        for (tokens, images), reply in zip(conversations(folder), replies, strict=True)
    ]
    with torch.no_grad():
        return np.stack([one[-length:].numpy() for one in plain_logprobs(model, folder, whole)])
