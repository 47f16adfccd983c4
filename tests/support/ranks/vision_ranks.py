"""Program of one rank: a model with images before and after a step, in one layout."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from slipstream.core.configuration.config_file import check_model, parse_config
from slipstream.core.models.images import image_tokens
from slipstream.core.settings.config import Config
from slipstream.core.types import ImagePlace, PolicyVersion, Trajectory, VersionSpan

from deploy.environments.colours import COLOURS, square_png
from support.fakes.fake_controller import make_trajectory
from support.ranks.rank_program import kept, likelier, opened, weights_of

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy

LAYOUTS = {
    "one": {},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {},
    "ep2": {"ep": 2},
}
REPLAY = "-replay"
CRITIC = "-critic"
LORA = "-lora"
LORA_RANK = 4
LORA_ALPHA = 8.0
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-3
# The longest conversation has a micro batch of its own, without images.
MAX_TOKENS = 40
# Tokens of each reply that a critic values.
SAMPLED = 2
Conversation = tuple[np.ndarray, Sequence[tuple[int, bytes]]]


def noise(width: int, height: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(width).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def conversations(folder: Path) -> list[Conversation]:
    """Token ids and placed images: without images, with one, and with two of other sizes."""
    tokens = image_tokens(folder)
    assert tokens is not None
    red = square_png(COLOURS["red"], 0, 14)
    wide = noise(112, 56)
    high = noise(60, 100)
    models = [
        ([1, *[8, 9, 10, 11, 12] * 7, 3, 8, 2], []),
        ([1, 8, 9, 10, 3, 8, 2], []),
        ([1, 4, 5, 7, 12, 3, 9, 2], [red]),
        ([1, 4, 5, 7, 12, 4, 5, 7, 3, 10, 9, 8, 2], [wide, high]),
    ]
    found = []
    for ids, images in models:
        expanded, placed = tokens.expanded(ids, images)
        found.append(
            (np.asarray(expanded, dtype=np.uint32), [tuple(image) for image in placed])
        )
    return found


def replied(
    asked: Sequence[Conversation], replies: Iterable[np.ndarray]
) -> list[Conversation]:
    """The conversations with a reply behind each."""
    pairs = zip(asked, replies, strict=True)
    return [
        (np.concatenate([tokens, reply]), images) for (tokens, images), reply in pairs
    ]


def experts_of(lengths: Iterable[int]) -> list[np.ndarray]:
    """Experts of each conversation's tokens, 2 of 4; some of them are not known (255)."""
    random = np.random.default_rng(7)
    found = []
    for length in lengths:
        ids = random.random((length, 2, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
        ids[[2, length - 1]] = 255
        found.append(ids)
    return found


def config_of(folder: Path, layout: str):
    layout, *kind = layout.split("-")
    parallel = LAYOUTS[layout]
    table = {
        "run": {"name": "vision", "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "algorithm": {
            "group_size": 2,
            "groups_per_step": 1,
            "learning_rate": LEARNING_RATE,
        },
        "sampling": {
            "max_reply_tokens": 8,
            "max_episode_tokens": MAX_TOKENS,
            "max_images": 2,
        },
        "learner": {
            "world_size": 1 if layout == "one" else 2,
            "parallel": parallel,
            "transformer": {"sequence_parallel": layout == "sp2"},
            "micro_batch_tokens": MAX_TOKENS,
            "weight_decay": 0.0,
            "optimizer": {"adam_eps": ADAM_EPS},
            "grad_clip": 0.0,
        },
    }
    if "critic" in kind:
        table["algorithm"]["advantage"] = "gae"
        table["critic"] = {"learning_rate": LEARNING_RATE, "value_clip": 0.0}
    if "replay" in kind:
        table["algorithm"]["router_replay"] = "rollout"
    if "lora" in kind:
        table["lora"] = {"rank": LORA_RANK, "alpha": LORA_ALPHA}
        if "moe" in folder.name:
            table["lora"]["target_modules"] = ["linear_qkv", "linear_proj"]
    config = parse_config(table, source="test")
    check_model(config)
    return config


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.batches.sequence_images import SequenceImage
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
    from slipstream.learner.trainer.model.schedule import (
        forward_logprobs,
        masked_outputs,
    )

    family, layout = job.split(".")
    config = config_of(folder / family, layout)
    policy = opened(config)
    if config.critic is not None:
        see_critic(policy, config, folder, job)
        return
    sequences = [
        dataclasses.replace(
            TrainingSequence.of_tokens(tokens),
            images=tuple(
                SequenceImage(offset, data, policy.vision.processor)
                for offset, data in images
            ),
        )
        for tokens, images in conversations(folder / family)
    ]
    if REPLAY in layout:
        experts = experts_of(map(len, sequences))
        sequences = [
            dataclasses.replace(sequence, expert_ids=ids)
            for sequence, ids in zip(sequences, experts, strict=True)
        ]
    forward = functools.partial(forward_logprobs, policy, temperature=1.0)
    outputs = functools.partial(masked_outputs, policy, sequences, forward)

    first: dict = {}
    if config.lora.rank:
        from slipstream.learner.trainer.weights.export import save_adapters
        from slipstream.learner.trainer.weights.run_chat import RunChat

        first["weights"] = weights_of(policy)
        save_adapters(policy, config, folder / f"{job}-first", RunChat())
    before = np.concatenate(outputs())
    norm = likelier(policy, sequences, LEARNING_RATE)
    after = np.concatenate(outputs())
    facts = {
        "before": torch.from_numpy(before),
        "after": torch.from_numpy(after),
        "norm": torch.tensor(norm),
        "weights": weights_of(policy),
    }
    if config.lora.rank:
        from slipstream.extensions.other_models.trainer import without_adapters

        save_adapters(policy, config, folder / f"{job}-adapters", RunChat())
        with without_adapters(policy.chunks):
            first["switched_off"] = torch.from_numpy(np.concatenate(outputs()))
        first["sent"] = sent_apart(policy, config)
        facts["first"] = first
    if layout == "one":
        from slipstream.learner.trainer.weights.export import save_hf_folder
        from slipstream.learner.trainer.weights.run_chat import RunChat

        save_hf_folder(policy, folder / family, folder / f"{family}-final", RunChat())
    kept(policy, facts, folder / f"{job}.pt")


def see_critic(policy: Policy, config: Config, folder: Path, job: str) -> None:
    """Values behind images before and after a step of the critic towards its returns."""
    from slipstream.core.configuration.roles import role_settings
    from slipstream.extensions.other_models.trainer import Critic
    from slipstream.learner.trainer.algorithms.loss import (
        ModelEstimates,
        training_sequences,
    )
    from slipstream.learner.trainer.batches.batch import Batch

    settings = role_settings(config)["critic"]
    critic = Critic(settings, policy.ranks)
    batch = Batch(0, "batch", trajectories(config))
    before = critic.values(batch)
    estimates = [ModelEstimates(values=values) for values in before]
    sequences = training_sequences(batch, config, estimates)
    metrics = critic.train(sequences, [range(len(sequences))])
    after = critic.values(batch)
    returns = [sequence.returns[sequence.loss_mask] for sequence in sequences]
    facts = {"before": before, "after": after, "returns": returns}
    joined = {
        name: torch.from_numpy(np.concatenate(parts)) for name, parts in facts.items()
    }
    norm = torch.tensor(metrics["critic_grad_norm"])
    kept(policy, joined | {"norm": norm}, folder / f"{job}.pt")


def trajectories(config: Config) -> tuple[Trajectory, ...]:
    """The conversations, whose last `SAMPLED` tokens are replies with rewards 0 and 1."""
    random = np.random.default_rng(3)
    found = []
    for place, (tokens, images) in enumerate(conversations(config.model.path)):
        plain = make_trajectory(
            random,
            group=place // 2,
            member=place % 2,
            step=0,
            vocab_size=8,
            max_tokens=8,
        )
        found.append(
            dataclasses.replace(
                plain,
                token_ids=tokens,
                run_lengths=(len(tokens) - SAMPLED, SAMPLED),
                behavior_logprobs=np.full(SAMPLED, -1.0, dtype=np.float32),
                version_spans=(VersionSpan(SAMPLED, PolicyVersion(0, 0)),),
                reward=float(place % 2),
                images=tuple(data for _, data in images),
                image_places=tuple(
                    ImagePlace(at, n) for n, (at, _) in enumerate(images)
                ),
            )
        )
    return tuple(found)


def sent_apart(policy: Policy, config: Config) -> dict[str, torch.Tensor]:
    """What rank 0 sends of matrices and adapters in a run with `lora.publish = "adapters"`."""
    from support.ranks.lora_ranks import see_published, sent_by

    published = see_published(policy, config)
    published.fill_ahead()
    return sent_by(published, policy, adapters_alone=False)["tensors"]
