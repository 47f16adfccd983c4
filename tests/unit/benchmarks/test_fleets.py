"""What the benchmarks of whole fleets compute from what they measure."""

import argparse
import json
import math
import statistics
from types import SimpleNamespace

import pytest
from slipstream.core.types import ServerId
from slipstream.learner.controller.servers.session import ServerKey
from support.fakes.small_configs import small_config

from benchmarks.asynchrony import speedup as asynchrony
from benchmarks.asynchrony import step_windows
from benchmarks.common.rig import SteeredController
from benchmarks.common.shapes import SHAPES
from benchmarks.common.workloads import reply_length
from benchmarks.weights import broadcast as weight_broadcast


def test_every_stretch_of_lengths_has_nearly_the_same_sum_and_the_same_tail() -> None:
    lengths = [reply_length(place, 96.0, 0.8326, 10_000) for place in range(4096)]
    mean = statistics.fmean(lengths)
    deviation = statistics.pstdev(lengths)
    # Lognormal: the mean is the median times exp(sigma^2 / 2), the coefficient of variation 1.
    assert mean == pytest.approx(96 * math.exp(0.8326**2 / 2), rel=0.01)
    assert deviation / mean == pytest.approx(1.0, abs=0.05)
    stretches = [lengths[start : start + 128] for start in range(0, 4096, 128)]
    sums = [sum(stretch) for stretch in stretches]
    assert (max(sums) - min(sums)) / statistics.fmean(sums) < 0.15
    assert min(max(stretch) for stretch in stretches) > 5 * 96


def test_speed_up_and_ceiling_are_those_of_the_same_repeat() -> None:
    def step(seconds: float) -> dict[str, float]:
        return {"step_s": seconds, "lag_mean": 1.0, "generated": 90.0, "tokens": 100.0}

    times = {
        "alone": [{"generation_s": 2.0, "training_s": 1.0}] * 2,
        "0": [step(4.0), step(8.0)],
        "2": [step(2.5), step(2.5)],
    }
    lines, shares = asynchrony.summary(times)
    # 4 / 2.5 and 8 / 2.5; at best 4 / 2 and 8 / 2; 2 / 2.5 of it both times.
    expected = {"speedup": 2.4, "ceiling": 3.0, "share": 0.8, "step_s": 2.5}
    assert shares["2"] == pytest.approx(expected)
    assert lines[3].startswith(
        "| 2 | 2.50 (2.50-2.50) | 2.40 (1.60-3.20) | 3.00 (2.00-4.00) |"
    )
    # A tenth of what was trained was there before.
    assert lines[3].endswith("| 0.90 (0.90-0.90) |")


def test_rate_of_generation_is_that_between_heartbeats() -> None:
    # A publish comes first; looks between two heartbeats find the same count.
    seen = [(100, 0.0), (100, 0.3), (140, 0.5), (140, 0.6)]
    with pytest.raises(RuntimeError, match="less than two heartbeats"):
        step_windows.rate(seen)
    # 200 tokens in 0.4 s.
    assert step_windows.rate(
        [*seen, (240, 0.7), (340, 0.9), (340, 1.0)]
    ) == pytest.approx(500.0)


def test_what_is_under_way_counts_for_as_long_as_it_lasts() -> None:
    # 10 episodes for a second, then 30 for three, in one of which the trainer is held up.
    seen = [(5.0, 10, False), (6.0, 30, True), (7.0, 30, False), (9.0, 0, False)]
    assert step_windows.means(seen) == pytest.approx((25.0, 0.25))


@pytest.mark.process
def test_a_window_that_failed_leaves_what_was_measured_before(tmp_path, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    arguments = argparse.Namespace(
        device="cpu", shape="small", out=tmp_path / "result.json"
    )
    alone = {"generation_s": 2.0, "training_s": 1.0}
    step = {"step_s": 4.0, "lag_mean": 1.0, "generated": 9.0, "tokens": 9.0}
    figures = asynchrony.Found(
        {"alone": [alone, alone], "0": [step, step], "2": [step]}
    )
    figures.failures["repeat 2"] = "it took too long"
    lines = asynchrony.write(arguments, figures)
    assert lines[-1] == "best share of the ceiling 0.50, target 0.80"
    written = json.loads(arguments.out.read_text())
    assert written["results"]["0"] == [step, step]
    assert written["failures"] == {"repeat 2": "it took too long"}
    # A setting without any window leaves nothing to compare.
    figures.rows["2"] = []
    assert asynchrony.write(arguments, figures) == []
    assert json.loads(arguments.out.read_text())["results"]["alone"] == [alone, alone]


def test_broadcast_is_compared_with_one_buffer_of_as_many_bytes() -> None:
    row = {
        # Times by the controller's clock and by that of the server.
        "serving_s": 0.011,
        "served_s": 0.010,
        "started_s": 0.001,
        "sent_s": 0.006,
        "loaded_s": 0.008,
        "paused_s": 0.012,
        # The trainer waited for the servers, and the first of these for the second.
        "trainer": {"wire_s": 0.009, "wire_bytes": 1e9, "bytes_sent": 1e9},
        "servers": {
            "server-0": {
                "paused_s": 0.012,
                "steps_s": 0.005,
                "wire_s": 0.006,
                "receive_s": 0.0064,
            },
            "server-1": {"paused_s": 0.011, "wire_s": 0.005, "receive_s": 0.0054},
        },
    }
    figures = weight_broadcast.Found(
        num_bytes=1_000_000_000,
        raw_wire=[0.003, 0.003, 0.004],
        raw=[0.004, 0.004, 0.005],
    )
    figures.ours["idle"] = [row]
    lines, ratios = weight_broadcast.summary(figures)
    assert lines[2] == (
        "| ours, idle | 200.0 | 5.00 (5.00-5.00) | 0.60 | 6.40 (6.40-6.40) | 0.62 "
        "| 10.0 (10.0-10.0) | 0.40 | 12.0 (12.0-12.0) | 2.4 | 11.0 (11.0-11.0) |"
    )
    # On the device; what the host times is compared with what the host times.
    assert ratios["ours, idle: wire of raw"] == pytest.approx(0.6)
    assert ratios["ours, idle: end to end of raw"] == pytest.approx(0.4)
    assert ratios["ours, idle: pause in wire times"] == pytest.approx(2.4)
    assert ratios["ours, idle: receive of raw"] == pytest.approx(0.625)
    assert lines[-1] == (
        "| one buffer (limit) | 333.3 | 3.00 (3.00-4.00) | 1.00 | 4.00 (4.00-5.00) | 1.00 "
        "| 4.0 (4.0-5.0) | 1.00 |  |  |  |"
    )


def test_stages_of_an_idle_and_a_busy_engine_stand_side_by_side() -> None:
    def row(sent_s: float, *copied: int) -> dict[str, object]:
        names = ("started_s", "loaded_s", "serving_s", "served_s", "finished_s")
        times = dict.fromkeys(names, 0.001)
        servers = {
            f"server-{at}": {"load_s": 0.002, "copied": c}
            for at, c in enumerate(copied)
        }
        return {
            **times,
            "sent_s": sent_s,
            "trainer": {"bytes_sent": 5.0},
            "servers": servers,
        }

    figures = weight_broadcast.Found()
    figures.ours["idle"] = [row(0.006, 1, 1), row(0.008, 1, 0)]
    assert weight_broadcast.stages(figures)[0] == "| stage | idle, ms |"
    figures.ours["busy"] = [row(0.030, 1)]
    lines = weight_broadcast.stages(figures)
    assert lines[0] == "| stage | idle, ms | busy, ms |"
    assert lines[3] == "| controller: sent | 7.00 (6.00-8.00) | 30.00 (30.00-30.00) |"
    assert lines[-2:] == [
        "| server: load | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) |",
        "| server: loads by copy plan | 3 of 4 | 1 of 1 |",
    ]


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("8B", 8.19)])
def test_shapes_have_the_parameters_that_their_names_say(
    name: str, billions: float
) -> None:
    total = sum(math.prod(sizes) for _, sizes in SHAPES[name].tensors())
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_open_episodes_of_a_run_are_those_of_connected_servers() -> None:
    controller = SteeredController(small_config())
    here = ServerKey(ServerId("here"), 1)
    server = ServerKey(ServerId("lost"), 1)
    controller._fleet.sessions[here.server_id] = SimpleNamespace(key=here)
    for task, holder in enumerate((here, server)):
        controller._book.lease("e", task, 0, holder, 0)
    assert controller.open_episodes() == 2
