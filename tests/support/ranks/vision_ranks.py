"""Program of one rank: a model with images before and after a step, in one layout."""

from __future__ import annotations

import dataclasses
import functools
import io
from pathlib import Path

import numpy as np
import torch
from slipstream.client.builtin.colours import COLOURS, square_png
from slipstream.protocol.settings.config_file import check_model, parse_config
from slipstream.protocol.vision.placed import image_tokens

LAYOUTS = {
    "one": {},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {},
    "ep2": {"ep": 2},
}
LEARNING_RATE, ADAM_EPS = 1e-2, 1e-3
# The longest conversation has a micro batch of its own, without images.
MAX_TOKENS = 32


def noise(width: int, height: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def conversations(folder: Path) -> list[tuple[np.ndarray, list[tuple[int, bytes]]]]:
    """Token ids and placed images: without images, with one, and with two of other sizes."""
    tokens = image_tokens(folder)
    assert tokens is not None
    red, wide, high = square_png(COLOURS["red"], 0, 14), noise(112, 56), noise(60, 100)
    made = [
        ([1, *[8, 9, 10, 11, 12] * 5, 3, 8, 2], []),
        ([1, 8, 9, 10, 3, 8, 2], []),
        ([1, 4, 5, 7, 12, 3, 9, 2], [red]),
        ([1, 4, 5, 7, 12, 4, 5, 7, 3, 10, 9, 8, 2], [wide, high]),
    ]
    found = []
    for ids, images in made:
        whole, placed = tokens.expanded(ids, images)
        found.append((np.asarray(whole, dtype=np.uint32), [tuple(image) for image in placed]))
    return found


def config_of(folder: Path, layout: str):
    parallel = LAYOUTS[layout]
    table = {
        "run": {"name": "vision", "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": LEARNING_RATE},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": MAX_TOKENS, "max_images": 2},
        "learner": {
            "world_size": 1 if layout == "one" else 2,
            "parallel": parallel,
            "micro_batch_tokens": MAX_TOKENS,
            "weight_decay": 0.0,
            "adam_eps": ADAM_EPS,
            "grad_clip": 0.0,
        },
    }
    config = parse_config(table, source="test")
    check_model(config)
    return config


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.algorithms.loss import TokenLoss
    from slipstream.learner.trainer.batches.images import PlacedImage
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
    from slipstream.learner.trainer.model.schedule import forward_backward, forward_logprobs
    from slipstream.learner.trainer.model.shares import masked_outputs, rank_micro_batches
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.weights.export import hf_tensors

    family, layout = job.split(".")
    policy = open_policy(config_of(folder / family, layout), Launch.from_environment())
    sequences = [
        dataclasses.replace(
            TrainingSequence.of_tokens(tokens),
            images=tuple(
                PlacedImage(offset, data, policy.vision.processor) for offset, data in images
            ),
        )
        for tokens, images in conversations(folder / family)
    ]
    forward = functools.partial(forward_logprobs, policy, temperature=1.0)
    outputs = functools.partial(masked_outputs, policy, sequences, forward, max_tokens=MAX_TOKENS)

    def loss(_place, micro_batch, logprobs, _entropy) -> TokenLoss:
        mask = micro_batch.loss_mask
        total = -(logprobs * mask).sum()
        return TokenLoss(total, mask.sum(), None, logprobs.detach())

    before = np.concatenate(outputs())
    batches = rank_micro_batches(policy, sequences, range(len(sequences)), max_tokens=MAX_TOKENS)
    policy.zero_grad()
    forward_backward(policy, batches, loss, temperature=1.0)
    norm = policy.optimizer_step(LEARNING_RATE)
    after = np.concatenate(outputs())
    weights = {name: tensor.clone() for name, tensor in hf_tensors(policy, torch.float32)}
    if policy.ranks.is_main:
        found = {"before": torch.from_numpy(before), "after": torch.from_numpy(after)}
        torch.save(found | {"norm": torch.tensor(norm), "weights": weights}, folder / f"{job}.pt")
    policy.ranks.close()
