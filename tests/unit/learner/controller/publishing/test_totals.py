"""The costs of publishing, and the gap that its probes measure."""

import math
from pathlib import Path

import numpy as np
import pytest
from slipstream.learner.controller.publishing.totals import PublishTotals, logit_gap
from slipstream.v1 import fleet_pb2, trainer_pb2
from support.fakes.small_configs import small_config


def wire(*, trainer_s: float, server_s: float) -> float:
    totals = PublishTotals()
    totals.sent(trainer_pb2.PublishResult(wire_s=trainer_s))
    totals.served(
        fleet_pb2.PublishReport(stages=fleet_pb2.PublishStages(wire_s=server_s)),
        told_s=1.0,
        unserved_s=1.0,
    )
    return totals.gauges()["weights_wire_s"]


def test_wire_is_the_time_of_the_side_that_did_not_wait_for_the_other() -> None:
    assert (
        wire(trainer_s=0.5, server_s=0.25) == wire(trainer_s=0.25, server_s=0.5) == 0.25
    )
    # A server that cannot time it says nothing.
    assert wire(trainer_s=0.5, server_s=0.0) == 0.5


def test_a_server_was_paused_no_longer_than_the_controller_saw() -> None:
    totals = PublishTotals()
    stages = fleet_pb2.PublishStages(
        prepare_s=1e8,
        pause_s=1e8,
        receive_s=0.25,
        resume_s=1e8,
        steps_s=1e8,
        staged=True,
    )
    report = fleet_pb2.PublishReport(paused_s=1e8, stages=stages)
    totals.served(report, told_s=2.0, unserved_s=3.0)
    assert totals.summary()["pause_s"] == totals.gauges()["pause_s"] == 3.0
    names = (
        "publish_prepare_s",
        "publish_stop_s",
        "publish_receive_s",
        "publish_resume_s",
    )
    names += ("publish_steps_s", "publish_staged")
    assert [totals.gauges()[name] for name in names] == [2.0, 2.0, 0.25, 2.0, 2.0, 1.0]


RECORDED = Path(__file__).parents[4] / "data" / "probe_logprobs.npz"
# A fault that misses small updates only moves logits by less than their rounding.
TOO_SMALL = ("one layer stale", "embedding and head stale")


def default_tolerance(dtype: str) -> float:
    return small_config(model={"dtype": dtype}).probe_tolerance


def recorded() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(learner, engine) by weights and fault."""
    with np.load(RECORDED, allow_pickle=False) as file:
        arrays = dict(file)
    return {
        name: (arrays[f"{name.rpartition('/')[0]}/learner"], values)
        for name, values in arrays.items()
        if not name.endswith("/learner")
    }


@pytest.mark.parametrize(
    ("expected", "moved", "gap"),
    [
        # d log p = (1 - p) x: 0.02 at p = 0.5 and 0.03 at p = 0.25 are errors of 0.04.
        (np.log([0.5, 0.25]), [0.02, -0.03], 0.04),
        # Sure tokens: 1 - p is taken as at least 0.01.
        ([-1e-7], [-1e-6], 1e-4),
        # Nine errors of 0 and one of 4 nats at p near 0: (sqrt(4) / 10) ** 2.
        ([-30.0] * 10, [0, 0, 0, -4.0, 0, 0, 0, 0, 0, 0], 0.04),
        *(
            (np.log([0.5, 0.5]), [bad, 0], math.nan)
            for bad in (math.nan, -math.inf, math.inf)
        ),
    ],
)
def test_gap_is_the_error_of_a_logit_over_most_tokens(expected, moved, gap):
    before = np.asarray(expected, np.float32)
    moved = np.asarray(moved, np.float32)
    rel = 0.1 if len(moved) == 1 else 1e-4
    assert logit_gap(before, before + moved) == pytest.approx(gap, rel=rel, nan_ok=True)


def test_right_weights_pass_in_bfloat16_with_room() -> None:
    gaps = {
        name: logit_gap(*both) for name, both in recorded().items() if "/right" in name
    }
    assert len(gaps) >= 2
    assert max(gaps.values()) < default_tolerance("bfloat16") / 2, gaps


def test_faulty_weights_are_noticed_in_bfloat16() -> None:
    gaps = {
        name: logit_gap(*both)
        for name, both in recorded().items()
        if not name.endswith(("/right", *TOO_SMALL))
    }
    assert len(gaps) >= 14
    assert min(gaps.values()) > 2 * default_tolerance("bfloat16"), gaps
