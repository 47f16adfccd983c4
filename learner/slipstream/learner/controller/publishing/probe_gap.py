"""The gap between two computations of the same tokens' log-probabilities."""

from __future__ import annotations

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.types import LogprobArray
from slipstream.learner.controller.publishing.publish_totals import PublishTotals
from slipstream.protocol.codec import unpack_logprobs
from slipstream.v1 import fleet_pb2, weights_pb2

# Least 1 - p in the division: below it, rounding of log-probabilities near 0 would dominate.
_LEAST_DOUBT = 0.01


def logit_gap(expected: LogprobArray, got: LogprobArray) -> float:
    """The typical error of a token's logit that explains the difference, in nats.

    A logit that is off by x moves the log-probability of its token by (1 - p) x. Divided by 1 - p,
    sure and unsure tokens show the same rounding. The result is the power mean with exponent 1/2,
    so that a few large errors do not dominate. NaN when a value is not finite.
    """
    wanted, given = expected.astype(np.float64), got.astype(np.float64)
    doubt = np.maximum(1.0 - np.exp(np.minimum(wanted, 0.0)), _LEAST_DOUBT)
    with np.errstate(invalid="ignore"):
        errors = np.abs(wanted - given) / doubt
    # An infinite difference measures nothing.
    errors[~np.isfinite(errors)] = np.nan
    return float(np.sqrt(errors).mean() ** 2)


def check_probe(
    probe: weights_pb2.Probe, report: fleet_pb2.PublishReport, totals: PublishTotals
) -> str:
    """The reason why the probe fails, or an empty string; adds the gap to `totals`.

    A failed probe means that the server does not compute with the weights that it was sent.
    """
    try:
        expected = unpack_logprobs(probe.expected_logprobs)
        got = unpack_logprobs(report.probe_logprobs)
    except ProtocolError as error:
        return f"the probe: {error}"
    if len(expected) == 0 or len(expected) != len(got):
        return f"the probe asked for {len(expected)} log-probabilities and got {len(got)}"
    gap = logit_gap(expected, got)
    totals.verified += 1
    totals.probe_gap_max = max(totals.probe_gap_max, gap)
    if not gap <= probe.tolerance:
        return (
            "the probe's log-probabilities differ from the learner's like logits that are off "
            f"by {gap:.2e}, more than {probe.tolerance:.2e}"
        )
    return ""
