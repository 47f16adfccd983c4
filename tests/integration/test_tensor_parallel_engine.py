"""A rollout engine of two workers that share each matrix, against transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from slipstream.rollout_server.engine_interface import Sampling
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import make_model_folder
from support.rigs.engine_rig import PROMPT, Reference, random_weights
from support.rigs.started_engine import publish, started_engine

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
    async with started_engine(config) as engine:
        assert engine.num_workers == 2
        # Other engines of this machine have such files too.
        maps = [
            memory_map
            for process in engine._processes
            for memory_map in process.memory_maps()
        ]
        shared = {
            Path(memory_map.path) for memory_map in maps if "cpushm" in memory_map.path
        }
        weights = random_weights(load_file(tmp_path / "model.safetensors"), seed=3)
        layout = layout_of(weights)
        sender = GlooSender("both", num_workers=2)
        await publish(engine, sender, sender.order("p1", 1), layout, weights)
        replies = await asyncio.gather(
            *(engine.requests.generate(f"r{n}", PROMPT, SAMPLING, 40) for n in range(8))
        )
    assert shared
    assert not [path for path in shared if path.exists()]
    sequences = [PROMPT + r.token_ids.tolist() for r in replies]
    reference = Reference(tmp_path)
    expected = [
        reference.logprobs(weights, sequence)[len(PROMPT) - 1 :]
        for sequence in sequences
    ]
    gaps = np.abs(
        np.concatenate(expected) - np.concatenate([r.logprobs for r in replies])
    )
    assert len(gaps) == 8 * 40
    assert gaps.mean() <= 1e-4
