"""A real engine with the weights of a folder, which is then sent those of another.

It runs as a program of its own, since an engine forks: `run_engine` starts the file of a rig, whose
main function awaits `seen_twice`.
"""

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from slipstream.core.configuration.config_file import check_model, parse_config
from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.engine_interface import LoadedWeights

from support.fakes.gloo_sender import GlooSender, layout_of
from support.rigs.started_engine import publish, started_engine

BUCKET_BYTES = 1 << 20
Seen = TypeVar("Seen")


def parse_folders(description: str | None) -> argparse.Namespace:
    """The arguments of such a program: folder, sent and output."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("folder", "sent", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument(
        "--stages", type=int, default=1, help="of the engine's pipeline"
    )
    return parser.parse_args()


async def seen_twice(
    options: argparse.Namespace,
    look: Callable[[Any, str], Awaitable[Seen]],
    **sections: Mapping[str, object],
) -> tuple[Seen, Seen, LoadedWeights]:
    """What `look` sees of the engine as it was loaded and after the publish, which is last."""
    (first, second), loaded = await seen_each_time(
        options, look, [options.sent], **sections
    )
    return first, second, loaded


async def seen_each_time(
    options: argparse.Namespace,
    look: Callable[[Any, str], Awaitable[Seen]],
    sent: Sequence[Path],
    **sections: Mapping[str, object],
) -> tuple[list[Seen], LoadedWeights]:
    """What `look` sees of the engine as loaded and after each folder is `sent`; the last publish.

    From the second one on, weights may be copied past vLLM's loader.
    """
    table = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": str(options.folder), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "rollout_server": {
            "max_episodes": 8,
            "threads": 1,
            "pipeline_parallel_size": options.stages,
        },
    }
    for name, settings in sections.items():
        table[name] = {**table.get(name, {}), **settings}
    config = parse_config(table, source="rig")
    check_model(config)
    async with started_engine(config) as engine:
        await engine.pauses.resume(PolicyVersion(0, 0))
        seen = [await look(engine, "first")]
        dtype = getattr(torch, config.model.dtype)
        sender = GlooSender("communicator", num_workers=engine.num_workers)
        for step, folder in enumerate(sent, 1):
            read = load_file(folder / "model.safetensors")
            weights = {name: tensor.to(dtype) for name, tensor in read.items()}
            layout = layout_of(weights, BUCKET_BYTES)
            order = sender.order(f"publish-{step}", step)
            loaded = await publish(engine, sender, order, layout, weights)
            seen.append(await look(engine, "second"))
        return seen, loaded
