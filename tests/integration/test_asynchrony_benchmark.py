"""Windows of the asynchrony benchmark in whole runs of its controller, with fakes as fleets."""

import asyncio

import pytest
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config

from benchmarks.asynchrony.step_windows import Windows
from benchmarks.common.rig import Placement, Rig


@pytest.mark.long
async def test_a_window_trains_nothing_that_was_leased_under_a_wider_bound(tmp_path):
    config = make_config(tmp_path, run__steps=10_000, algorithm__max_staleness=4)
    # Slower than a step, so that groups of the wide window are generated when the bound falls.
    server = FakeServer(config.controller.address, delay_s=0.1)
    trainer = FakeTrainer(config.controller.address, step_s=0.02)
    fakes = []
    try:
        async with asyncio.timeout(200), Rig(config, Placement((0,), ((1,),), "cpu")) as rig:
            rig.controller.bound(0)
            fakes = [asyncio.ensure_future(fake.run()) for fake in (server, trainer)]
            windows = Windows(rig, steps=3, bounds=2, limit_s=60.0)
            first, wide, second = [await windows.bounded(bound) for bound in (0, 4, 0)]
            assert first["lag_mean"] == 0
            assert wide["lag_mean"] > 0
            assert second["lag_mean"] == 0
            # What was leased under the wide bound was trained all the same, before the window.
            assert rig.controller.rows[-1]["quarantined_trajectories"] == 0
            assert max(row["lag_max"] for row in rig.controller.rows) > 1
    finally:
        for fake in fakes:
            fake.cancel()
        await asyncio.gather(*fakes, return_exceptions=True)
