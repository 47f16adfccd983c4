"""A rollout engine of two workers that share each matrix, against transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.engine_interface import Sampling
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import make_model_folder
from support.rigs.started_engine import started_engine

PROMPT = [1, 4, 5, 6, 3]
SAMPLING = Sampling(1.0, 1.0, 0, 40, 1, 60, ignore_eos=True)


@pytest.mark.slow
async def test_two_workers_take_weights_and_sample_as_one(tmp_path: Path) -> None:
    make_model_folder(tmp_path, num_key_value_heads=2, tie_word_embeddings=True)
    config = small_config(
        model={"path": str(tmp_path), "dtype": "float32"},
        sampling={"max_reply_tokens": 40, "max_episode_tokens": 60},
        rollout_server={
            "max_episodes": 8,
            "threads": 1,
            "enforce_eager": True,
            "tensor_parallel_size": 2,
        },
    )
    shared = set(Path("/dev/shm").iterdir())
    async with started_engine(config) as engine:
        assert engine.num_workers == 2
        generator = torch.Generator().manual_seed(3)
        weights = {
            name: torch.randn(tensor.shape, generator=generator) * 0.2
            if tensor.ndim > 1
            else tensor
            for name, tensor in load_file(tmp_path / "model.safetensors").items()
        }
        layout, sender = layout_of(weights), GlooSender("both", num_workers=2)
        order = sender.order("p1", 1)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, weights))
        await engine.prepare_weights(order, layout, 1)
        loaded = await engine.receive_weights("p1")
        assert list(loaded.bucket_digests) == await sending
        await engine.pauses.resume(PolicyVersion(0, 1))
        replies = await asyncio.gather(
            *(engine.requests.generate(f"r{n}", PROMPT, SAMPLING, 40) for n in range(8))
        )
    assert not [p for p in Path("/dev/shm").iterdir() if "cpushm" in p.name and p not in shared]
    expected = [reference(tmp_path, weights, PROMPT + r.token_ids.tolist()) for r in replies]
    gaps = np.abs(np.concatenate(expected) - np.concatenate([r.logprobs for r in replies]))
    assert len(gaps) == 8 * 40
    assert gaps.mean() <= 1e-4


@torch.no_grad()
def reference(folder: Path, weights: dict[str, torch.Tensor], token_ids: list[int]) -> np.ndarray:
    """Log-probabilities of what follows the prompt, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[len(PROMPT) - 1 :, 0].numpy()
