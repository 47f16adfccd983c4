"""A controller that runs long piles up nothing."""

import asyncio
import gc
import sys
import types
from pathlib import Path

import pytest
from slipstream.learner.controller.application import Controller
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play

# Bytes kept of a step of two trajectories with some sixty metrics: mostly its event's text.
MOST_BYTES_A_STEP = 2000
# Objects that belong to the program or to the loop, not to the state of a run.
FOREIGN = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.FrameType,
    asyncio.Future,
    asyncio.AbstractEventLoop,
)


def kept_bytes(*roots: object) -> int:
    """Bytes of all Python objects of the controller that can be reached from `roots`."""
    seen: set[int] = set()
    waiting = list(roots)
    size = 0
    while waiting:
        pop = waiting.pop()
        if id(pop) in seen or isinstance(pop, FOREIGN):
            continue
        if type(pop).__module__.startswith(
            ("grpc", "uvloop", "asyncio.base", "logging")
        ):
            continue
        seen.add(id(pop))
        size += sys.getsizeof(pop)
        waiting += gc.get_referents(pop)
    return size


@pytest.mark.long
async def test_the_controller_keeps_next_to_nothing_of_old_steps(
    tmp_path: Path,
) -> None:
    num_steps = 220
    config = make_config(
        tmp_path,
        run__steps=num_steps,
        algorithm__group_size=2,
        algorithm__groups_per_step=1,
        controller__sample_every_steps=1000,
    )
    sizes: dict[int, int] = {}
    trainer = FakeTrainer(config.controller.address, checkpoint_every=5)

    async def measure(controller: Controller, _: object) -> None:
        for step in (100, 200):
            trainer.hold_at(step)
            await asyncio.wait_for(trainer.until_held(), 150)
            parts = (
                controller.books.ledger,
                controller.recorder,
                controller._book,
                controller._run.events,
                controller.trainer._former,
                controller._fleet,
                controller.intake.inspector,
                controller.books.environments,
            )
            gc.collect()
            sizes[step] = kept_bytes(*parts)
            trainer.gated_from = num_steps + 1
            trainer.gate.set()

    summary = await play(config, trainer=trainer, during=measure)
    assert (summary["code"], summary["steps"]) == (0, num_steps)
    growth = (sizes[200] - sizes[100]) / 100
    assert growth < MOST_BYTES_A_STEP, f"{growth:.0f} bytes a step"
