"""The totals of all publishes, and the check of a probe."""

from dataclasses import dataclass, field

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.types import LogprobArray
from slipstream.protocol.codec import unpack_logprobs
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

# Least 1 - p in the division: below it, rounding of log-probabilities near 0 would dominate.
_LEAST_DOUBT = 0.01

_STAGES = fleet_pb2.PublishStages.DESCRIPTOR.fields_by_name
_SECONDS = tuple(name for name in _STAGES if name.endswith("_s"))


def logit_gap(expected: LogprobArray, got: LogprobArray) -> float:
    """Returns the typical logit error, in nats, that explains how `got` differs from `expected`.

    Both are log-probabilities of the same tokens. A logit that is off by x moves the
    log-probability of its token by (1 - p) x. The division by 1 - p gives the same error for likely
    and unlikely tokens. The result is the power mean with exponent 1/2, so that a few large errors
    do not dominate. It is NaN if a value is not finite.
    """
    expected_values = expected.astype(np.float64)
    got_values = got.astype(np.float64)
    doubt = np.maximum(1.0 - np.exp(np.minimum(expected_values, 0.0)), _LEAST_DOUBT)
    with np.errstate(invalid="ignore"):
        errors = np.abs(expected_values - got_values) / doubt
    # An infinite difference measures nothing.
    errors[~np.isfinite(errors)] = np.nan
    return float(np.sqrt(errors).mean() ** 2)


def check_probe(
    probe: weights_pb2.Probe, report: fleet_pb2.PublishReport, totals: "PublishTotals"
) -> str:
    """Returns why the probe fails, or "" if it passes; adds its logit gap to `totals`.

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
    totals.publishes_verified += 1
    totals.probe_gap_max = max(totals.probe_gap_max, gap)
    if not gap <= probe.tolerance:
        return (
            "the probe's log-probabilities differ from the learner's like logits that are off "
            f"by {gap:.2e}, more than {probe.tolerance:.2e}"
        )
    return ""


@dataclass
class PublishTotals:
    """Counts, bytes and seconds of all publishes since the controller started.

    All fields but the last ones, which describe the newest publish, are in the run's summary.
    """

    publishes: int = 0
    publishes_verified: int = 0
    probe_gap_max: float = 0.0
    pause_s: float = 0.0
    published_bytes: int = 0
    # Versions in storage, their bytes, and their bytes without deltas; fetches and their bytes.
    versions_stored: int = 0
    stored_bytes: int = 0
    stored_whole_bytes: int = 0
    versions_fetched: int = 0
    fetched_bytes: int = 0

    last_pause_s: float = 0.0
    # The trainer's result of the newest publish that it sent completely.
    last_sent: trainer_pb2.PublishResult = field(default_factory=trainer_pb2.PublishResult)
    last_stages: fleet_pb2.PublishStages = field(default_factory=fleet_pb2.PublishStages)
    last_stored: trainer_pb2.StoredReport = field(default_factory=trainer_pb2.StoredReport)
    last_fetch_s: float = 0.0

    def stored(self, report: trainer_pb2.StoredReport) -> None:
        """Counts a version that was written to storage."""
        self.versions_stored += 1
        self.stored_bytes += report.num_bytes
        self.stored_whole_bytes += report.whole_bytes
        self.last_stored = report

    def fetched(self, report: fleet_pb2.PublishReport) -> None:
        """Notes that a server has fetched a version."""
        self.versions_fetched += 1
        self.fetched_bytes += report.stages.fetched_bytes
        self.last_fetch_s = report.stages.fetch_s

    def sent(self, result: trainer_pb2.PublishResult) -> None:
        """Notes that the trainer has sent a version completely."""
        self.publishes += 1
        self.published_bytes += result.bytes_sent
        self.last_sent = result

    def served(self, report: fleet_pb2.PublishReport, *, told_s: float, unserved_s: float) -> None:
        """Notes that a server serves new weights, and adds the times in its report.

        No reported time may exceed the time that the controller measured. `told_s` is the number of
        seconds since the server was told to receive, and `unserved_s` since it last served or
        joined: a pause may begin before its publish.
        """
        self.last_pause_s = min(report.paused_s, unserved_s)
        self.pause_s += self.last_pause_s
        self.last_stages = stages = fleet_pb2.PublishStages()
        stages.CopyFrom(report.stages)
        for name in _SECONDS:
            setattr(stages, name, min(getattr(stages, name), told_s))

    def gauges(self) -> dict[str, float]:
        """Returns the costs of the newest publish, on the trainer and on the last server.

        The last server is the server that loaded its weights last.
        """
        stages = self.last_stages
        sent = self.last_sent
        return {
            "pause_s": self.last_pause_s,
            "publish_prepare_s": stages.prepare_s,
            "publish_stop_s": stages.pause_s,
            "publish_receive_s": stages.receive_s,
            "publish_load_s": stages.load_s,
            "publish_resume_s": stages.resume_s,
            "publish_steps_s": stages.steps_s,
            "publish_copied": float(stages.copied),
            "publish_staged": float(stages.staged),
            "weights_send_s": sent.send_s,
            "weights_bytes": float(sent.bytes_sent),
            # A side's time includes waits for the other side, so the shorter time is the wire's.
            "weights_wire_s": min(sent.wire_s, stages.wire_s or sent.wire_s),
            "weights_wire_bytes": float(sent.wire_bytes),
            "stored_version_bytes": float(self.last_stored.num_bytes),
            "store_s": self.last_stored.write_s,
            "fetch_s": self.last_fetch_s,
        }

    def summary(self) -> dict[str, float]:
        """Returns the totals, by their names in the run's summary."""
        return {name: value for name, value in vars(self).items() if not name.startswith("last_")}
